"""The report as one HTML file: no script, nothing from outside, plots inside the page, links to files beside it."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from urllib.parse import quote

from markdown_it import MarkdownIt

LONG_CELL = 28  # letters from which on a cell's text is broken into lines
LONG_NAME = 16  # and that of the first cell of a row, on a phone
LONG_TABLE = 50  # rows from which on a table is folded
MANY_FILES = 4  # sources from which on their list is folded
# Code spans that name a file of the repository: the records and notes beside the page, the rest one folder up.
_BESIDE = re.compile(r"results/[^`]+\.\w+|notes\.json|proposal\.md")
_ABOVE = re.compile(r"README\.md|(?:scripts|tests|passes|compile_overlap|research_topic_2)/[\w/.-]+\.(?:py|sh|md)")

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d0d4d9; --soft: #f3f5f7; --link: #1a5fb4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe3e8; --paper: #15181c; --line: #3a4048; --soft: #20252b; --link: #7db4ff }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 74rem; background: var(--paper); color: var(--ink);
       font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; -webkit-text-size-adjust: 100% }
h1, h2, h3, h4 { line-height: 1.25; margin: 2rem 0 .6rem } h1 { font-size: 1.6rem; margin-top: .5rem }
h2 { font-size: 1.3rem; border-top: 1px solid var(--line); padding-top: 1.2rem } h3 { font-size: 1.08rem }
h4 { font-size: 1rem }
p, ul, ol, pre, blockquote, details > p { max-width: 52rem }
ul, ol { padding-left: 1.6rem }
a { color: var(--link) }
code { font: .88em ui-monospace, monospace; background: var(--soft); padding: .1em .25em; border-radius: .2em }
pre { background: var(--soft); padding: .8rem; overflow-x: auto } pre code { padding: 0 }
.scroll { overflow-x: auto; margin: .8rem 0; border: 1px solid var(--line); width: fit-content; max-width: 100% }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { white-space: normal; vertical-align: bottom; background: var(--soft) }
td { vertical-align: top; background: var(--paper) } td.long { white-space: normal; min-width: 12rem }
th:first-child, td:first-child { position: sticky; left: 0; border-right: 1px solid var(--line) }
tr:last-child td { border-bottom: 0 }
table code { background: none; padding: 0; overflow-wrap: normal }
.sources, summary { font-size: .85rem } summary { cursor: pointer; margin: .8rem 0; color: var(--link) }
blockquote { margin: 1rem 0; padding: .1rem 1rem; border-left: .3rem solid #e08a1e; background: var(--soft) }
figure { margin: 1rem 0; overflow-x: auto }
figure svg { display: block; width: 100%; max-width: 32rem; height: auto }
figure svg.wide { min-width: 60rem; max-width: none }
nav ol { columns: 2 18rem; column-gap: 2rem }
.top { position: fixed; right: .6rem; bottom: .6rem; padding: .3rem .6rem; font-size: .85rem; border-radius: .3rem;
       background: var(--soft); border: 1px solid var(--line); text-decoration: none }
@media (max-width: 40rem) {
  td.name { white-space: normal; min-width: 8rem; max-width: 9rem; overflow-wrap: anywhere }
  td.name code { overflow-wrap: anywhere }
}
@media print { .top { display: none } }
"""


def page(markdown: str, folder: Path) -> str:
    """The HTML page of a report in Markdown; its figures are SVG files below ``folder``."""
    converter = MarkdownIt("commonmark").enable("table")
    converter.add_render_rule("table_open", lambda _, tokens, index, *__: tokens[index].meta["opening"])
    converter.add_render_rule("table_close", lambda _, tokens, index, *__: tokens[index].meta["closing"])
    converter.add_render_rule("code_inline", lambda _, tokens, index, *__: _code(tokens[index].content))
    tokens = converter.parse(markdown)
    contents = _name_headings(tokens)
    _frame_tables(tokens)
    for before, token, content in zip(tokens, tokens[1:], tokens[2:]):
        if token.type == "td_open":
            kinds = ["name"] if before.type == "tr_open" and len(content.content) > LONG_NAME else []
            kinds += ["long"] if len(content.content) > LONG_CELL else []
            token.attrs |= {"class": " ".join(kinds)} if kinds else {}
    body = converter.renderer.render(tokens, converter.options, {})
    body = re.sub(
        r'<p><img src="([^"]+\.svg)" alt="([^"]*)" ?/?></p>', lambda found: _figure(folder / found[1], found[2]), body
    )
    body = re.sub(r"<p><em>((?:Source|In the text): )(.*)</em></p>", lambda found: _sources(*found.groups()), body)
    title = escape(next(tokens[i + 1].content for i, token in enumerate(tokens) if token.tag == "h1"))
    head, first, rest = body.partition("<h2")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{head}{contents}{first}{rest}"
        '<a class="top" href="#contents">Contents</a>\n</body>\n</html>\n'
    )


def _name_headings(tokens: list) -> str:
    """Give each heading a name to link to, as GitHub has it; returns the list of contents, of the second level."""
    lines, names = [], set()
    for index, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag != "h1":
            text = tokens[index + 1].content
            name = re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")
            if name in names:
                raise ValueError(f"heading {text!r}: must be of a name that no other heading has, is {name!r}")
            names.add(name)
            token.attrSet("id", name)
            if token.tag == "h2":
                lines.append(f'<li><a href="#{name}">{escape(text)}</a></li>')
    return f'<nav id="contents"><ol>\n{chr(10).join(lines)}\n</ol></nav>\n'


def _frame_tables(tokens: list) -> None:
    """Tables scroll in a frame of their own; long ones are folded, and say of how many rows they are."""
    for index, token in enumerate(tokens):
        if token.type == "table_open":
            opening, rows = token, -1  # without the head
        elif token.type == "tr_open":
            rows += 1
        elif token.type == "table_close":
            fold = rows >= LONG_TABLE
            summary = f"<details>\n<summary>Table of {rows} rows</summary>\n" if fold else ""
            opening.meta["opening"] = f'{summary}<div class="scroll" tabindex="0"><table>\n'
            token.meta["closing"] = f"</table></div>\n{'</details>' if fold else ''}\n"


def _code(text: str) -> str:
    code = f"<code>{escape(text)}</code>"
    if _BESIDE.fullmatch(text):
        return f'<a href="{quote(text)}">{code}</a>'
    return f'<a href="../{quote(text)}">{code}</a>' if _ABOVE.fullmatch(text) else code


def _sources(what: str, files: str) -> str:
    count = files.count("<code>")
    if count < MANY_FILES:
        return f'<p class="sources">{what}{files}</p>'
    return f'<details class="sources">\n<summary>{what}{count} files</summary>\n<p>{files}</p>\n</details>'


def _figure(path: Path, title: str) -> str:
    svg = path.read_text("utf-8")
    svg = svg[svg.index("<svg") :]
    if 'class="plot"' not in svg:  # drawn for a wide page
        svg = svg.replace("<svg", f'<svg class="wide" role="img" aria-label="{escape(title)}"', 1)
    return f'<figure tabindex="0">\n{svg.rstrip()}\n</figure>'
