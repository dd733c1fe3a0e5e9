"""The report as one HTML file: no script, nothing from outside, plots inside the page."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

LONG_CELL = 60  # letters from which on a cell's text is broken into lines

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d0d4d9; --soft: #f3f5f7; --link: #1a5fb4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe3e8; --paper: #15181c; --line: #3a4048; --soft: #20252b; --link: #7db4ff }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 52rem; background: var(--paper); color: var(--ink);
       font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; -webkit-text-size-adjust: 100% }
h1, h2, h3 { line-height: 1.25; margin: 2rem 0 .6rem } h1 { font-size: 1.6rem; margin-top: .5rem }
h2 { font-size: 1.3rem; border-top: 1px solid var(--line); padding-top: 1.2rem } h3 { font-size: 1.08rem }
a { color: var(--link) }
code { font: .88em ui-monospace, monospace; background: var(--soft); padding: .1em .25em; border-radius: .2em }
pre { background: var(--soft); padding: .8rem; overflow-x: auto } pre code { padding: 0 }
.scroll { overflow-x: auto; margin: .8rem 0; border: 1px solid var(--line) }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .35rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line) }
td { vertical-align: top } td.long { white-space: normal; min-width: 18rem }
th { background: var(--soft) } tr:last-child td { border-bottom: 0 }
table code { background: none; padding: 0; overflow-wrap: normal }
p > em:only-child { font-size: .85rem }
blockquote { margin: 1rem 0; padding: .1rem 1rem; border-left: .3rem solid #e08a1e; background: var(--soft) }
figure { margin: 1rem 0; overflow-x: auto }
figure svg { display: block; width: 100%; max-width: 34rem; height: auto }
figure svg.wide { min-width: 38rem; max-width: none }
nav ol { columns: 2 16rem; padding-left: 1.4rem }
"""


def page(markdown: str, folder: Path) -> str:
    """The HTML page of a report in Markdown; its figures are SVG files below ``folder``."""
    converter = MarkdownIt("commonmark").enable("table")
    converter.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>\n')
    converter.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = converter.parse(markdown)
    contents = _name_headings(tokens)
    for token, content in zip(tokens, tokens[1:]):
        if token.type == "td_open" and len(content.content) > LONG_CELL:
            token.attrSet("class", "long")
    body = converter.renderer.render(tokens, converter.options, {})
    body = re.sub(
        r'<p><img src="([^"]+\.svg)" alt="([^"]*)" ?/?></p>', lambda found: _figure(folder / found[1], found[2]), body
    )
    title = escape(next(tokens[i + 1].content for i, token in enumerate(tokens) if token.tag == "h1"))
    head, first, rest = body.partition("<h2")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{head}{contents}{first}{rest}</body>\n</html>\n"
    )


def _name_headings(tokens: list) -> str:
    """Give each second-level heading a name to link to; returns the list of contents."""
    lines = []
    for index, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            text = tokens[index + 1].content
            name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
            token.attrSet("id", name)
            lines.append(f'<li><a href="#{name}">{escape(text)}</a></li>')
    return f"<nav><ol>\n{chr(10).join(lines)}\n</ol></nav>\n"


def _figure(path: Path, title: str) -> str:
    svg = path.read_text()
    svg = svg[svg.index("<svg") :]
    if "<title>" not in svg:
        svg = svg.replace(">", f"><title>{escape(title)}</title>", 1)
    if 'class="plot"' not in svg:  # drawn for a wide page
        svg = svg.replace("<svg", '<svg class="wide" role="img"', 1)
    return f"<figure>\n{svg.rstrip()}\n</figure>"
