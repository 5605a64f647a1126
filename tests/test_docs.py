"""README.md and docs/: their links lead somewhere, and their Python runs."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _name(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    for link in LINK.findall(page.read_text()):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            continue
        found = page.parent / target if target else page
        assert found.exists(), f"{_name(page)} links to {link}"
        assert not anchor or anchor in _anchors(found.read_text()), f"{_name(page)} links to {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if CODE.search(page.read_text())], ids=_name)
def test_a_pages_python_runs_from_top_to_bottom(page):
    blocks = CODE.findall(page.read_text())
    if any("flax" in block for block in blocks):
        pytest.importorskip("flax", reason="the page shows Flax's modules")
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, _name(page), "exec"), namespace)
