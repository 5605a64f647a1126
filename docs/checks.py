"""What can be checked of the pages without a browser: `make docs` warns of each line, and a warning is an error.

Run alone, `python docs/checks.py` prints the same lines. A check is here only if its false alarms are few.
"""

from __future__ import annotations

import ast
import itertools
import pathlib
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Words in a bullet. A path, a formula in code marks, or a link's text counts word by word, its target not at all.
MOST_WORDS = 40
# Pixels: `.content` of _static/wide.css on a page with and without contents beside it, the size of a table's letters,
# and the padding of a cell.
WITH_CONTENTS, WITHOUT_CONTENTS, LETTER, PADDING = 928, 1216, 12.2, 12
# A letter's width in its size, on average: of DejaVu Sans, in which figures are drawn, and of the theme's letters.
DRAWN, WRITTEN = 0.52, 0.5

Line = tuple[int, str]  # number from 1, what is wrong

FENCE = re.compile(r"^(\s*)(`{3,}|~{3,}).*?^\1\2\s*$", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"^(\s*)(?:[*+-]|\d+[.)]) +(?=\S)")


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def prose(text: str) -> str:
    """A page without blocks of code and comments, with its lines where they were."""
    return re.sub(r"<!--.*?-->", _blank, FENCE.sub(_blank, text), flags=re.DOTALL)


def _without_code(text: str) -> str:
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", lambda found: "`" + _blank(found) + "`", text, flags=re.DOTALL)


def numbers(text: str) -> Iterator[Line]:
    """ ".48" for "0.48"."""
    for i, line in enumerate(_without_code(prose(text)).splitlines(), 1):
        for found in re.finditer(r"(?:^|(?<=[\s(\[|/+-]))\.\d+", line):
            yield i, f"a number without its zero: {found[0]}"


def bullets(text: str) -> Iterator[Line]:
    """Bullets, and numbered steps, of more words than a reader keeps in mind."""
    lines = prose(text).splitlines()
    i = 0
    while i < len(lines):
        item = ITEM.match(lines[i])
        if item is None:
            i += 1
            continue
        start, words = i, [lines[i][item.end() :]]
        i += 1
        while i < len(lines) and lines[i].strip() and not ITEM.match(lines[i]) and lines[i].strip()[:1] not in "|>":
            words.append(lines[i])
            i += 1
        n = len(re.sub(r"\]\([^)\s]*\)", "]", " ".join(words)).split())
        if n > MOST_WORDS:
            yield start + 1, f"a bullet of {n} words, expected at most {MOST_WORDS}"


def tables(text: str) -> Iterator[Line]:
    """Tables whose columns cannot be as narrow as the page, even where each cell is broken at every space."""
    body = prose(text)
    headings = len(re.findall(r"^#+ ", body, re.MULTILINE))
    room = WITH_CONTENTS if headings > 1 else WITHOUT_CONTENTS
    lines = body.splitlines()
    for is_table, group in itertools.groupby(enumerate(lines, 1), key=lambda one: one[1].lstrip().startswith("|")):
        rows = list(group)
        if not is_table:
            continue
        widths: dict[int, int] = {}
        for _, line in rows:
            plain = re.sub(r"\]\([^)\s]*\)", "", line.replace("\\|", "/")).replace("`", "").replace("[", "")
            for column, cell in enumerate(plain.strip().strip("|").split("|")):
                if not re.fullmatch(r"\s*:?-+:?\s*", cell):
                    longest = max(map(len, re.split(r"[\s/-]", cell)), default=0)
                    widths[column] = max(widths.get(column, 0), longest)
        width = sum(n * LETTER * WRITTEN + PADDING for n in widths.values())
        if width > room:
            yield rows[0][0], f"a table of at least {width:.0f} pixels, the page has {room}"


def cut_off(svg: str) -> Iterator[Line]:
    """Texts of a figure that reach beyond its edges, with letters of average width."""
    root = ET.fromstring(svg)
    left, top, width, height = (float(n) for n in root.get("viewBox", "0 0 0 0").split())
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        text, style = "".join(element.itertext()).strip(), element.get("style", "")
        size = re.search(r"font-size: ([\d.]+)", style) or re.search(r"font: ([\d.]+)", style)
        turned = re.match(r"rotate\((-?[\d.]+)", element.get("transform", ""))
        if not text or size is None or element.get("x") is None:
            continue
        upright = turned is not None and abs(float(turned[1])) > 45
        long, room = len(text) * float(size[1]) * DRAWN, height if upright else width
        at = float(element.get("y" if upright else "x", 0)) - (top if upright else left)
        anchor = re.search(r"text-anchor: (\w+)", style)
        before = {"middle": long / 2, "end": long}.get(anchor[1] if anchor else "start", 0.0)
        before = long - before if upright else before  # turned to the left, a text runs upwards
        # Letters of a short text may all be narrow.
        slack = 0.12 * long + float(size[1])
        if at - before < -slack or at - before + long > room + slack:
            yield 1, f"a figure's text is cut off: {text!r}"


def lost_stars(emphasised: str) -> bool:
    """Whether a text between two stars is a part of formulas, "stride - pad + t", and not meant to be emphasised."""
    return re.search(r"(^|\s)[-+=/<>] |[-+=/] ?$|^[ (\[]", emphasised) is not None


def stars(text: str) -> Iterator[Line]:
    """Products outside of code: Markdown takes `o*stride - pad + t*dilation` for emphasis."""
    for i, line in enumerate(_without_code(prose(text)).splitlines(), 1):
        if line.startswith("    "):
            continue
        for found in re.finditer(r"\w\*(?=\w)", line.replace("**", "")):
            yield i, f"a product outside of code: {line[max(found.start() - 10, 0) : found.end() + 10]}"


def docstrings(source: str) -> Iterator[Line]:
    """The numbers in the docstrings of a module's public classes and functions."""
    nodes = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, nodes) and (text := ast.get_docstring(node)) and getattr(node, "name", "")[:1] != "_":
            for i, what in numbers(text):
                yield getattr(node, "lineno", 1) + i, what


def has_example(docstring: str) -> bool:
    """Whether a block of code stands in it, behind `::`."""
    return re.search(r"::\n\n(?: {4,}\S|\t)", docstring) is not None


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def found() -> Iterator[tuple[pathlib.Path, Line]]:
    for page in pages():
        text = page.read_text()
        for check in (numbers, bullets, tables, stars):
            yield from ((page, line) for line in check(text))
    for figure in sorted((ROOT / "docs").glob("*.svg")):
        yield from ((figure, line) for line in cut_off(figure.read_text()))
    for module in sorted((ROOT / "jaxconv").rglob("*.py")):
        yield from ((module, line) for line in docstrings(module.read_text()))


if __name__ == "__main__":
    lines = [f"{path.relative_to(ROOT)}:{number}: {what}" for path, (number, what) in found()]
    print("\n".join(lines) or "nothing found")
    sys.exit(bool(lines))
