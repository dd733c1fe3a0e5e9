"""A drawing as rectangles and texts, written as SVG without any library, or as PNG by matplotlib."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FONT = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
CHARACTER = 0.56  # width of a character over the font's size, on average


@dataclass
class Scene:
    """Shapes in pixels, y downwards, in the order in which they are painted."""

    width: float
    height: float
    title: str
    rects: list[tuple] = field(default_factory=list)
    texts: list[tuple] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, tip: str = "", opacity: float = 1.0
    ) -> None:
        self.rects.append((x, y, width, height, fill, tip, opacity))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        fill: str = "#1d2430",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """`y` is the baseline; `anchor` is start, middle or end."""
        self.texts.append((x, y, text, size, fill, anchor, bold))

    def svg(self) -> str:
        """The same bytes for the same shapes."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" font-family="{FONT}">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{self.width:g}" height="{self.height:g}" fill="#fff"/>',
        ]
        for x, y, width, height, fill, tip, opacity in self.rects:
            shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"'
            shape += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
            lines.append(f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>")
        for x, y, text, size, fill, anchor, bold in self.texts:
            weight = ' font-weight="bold"' if bold else ""
            place = f'x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}'
            lines.append(f"<text {place}>{escape(text)}</text>")
        return "\n".join([*lines, "</svg>"]) + "\n"

    def png(self, path: Path, scale: float = 2.0) -> None:
        """Write it as PNG, `scale` pixels for each of the SVG's. Raises ImportError without matplotlib."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        dpi = 72 * scale
        figure = Figure(figsize=(self.width / 72, self.height / 72), dpi=dpi, facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        axes.set_axis_off()
        for x, y, width, height, fill, _, opacity in self.rects:
            axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, alpha=opacity, linewidth=0))
        for x, y, text, size, fill, anchor, bold in self.texts:
            place = {"start": "left", "middle": "center", "end": "right"}[anchor]
            weight = "bold" if bold else "normal"
            axes.text(x, y, text, fontsize=size * 0.92, color=fill, ha=place, va="baseline", fontweight=weight)
        FigureCanvasAgg(figure).print_png(str(path))
