"""The code blocks of docs/guide run, each page's from top to bottom, as a reader would run them."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re

import pytest

import jaxconv

GUIDE = pathlib.Path(__file__).parent.parent / "docs" / "guide"
# meshes.md needs eight devices: test_meshes_guide.py
PAGES = sorted(page for page in GUIDE.glob("*.md") if page.stem != "meshes") if GUIDE.exists() else []
# A block's first line, where it needs what the tests' environment may not have: the blocks without come first.
NEEDS = re.compile(r"# needs: (\w+)\n")


def blocks(page: pathlib.Path) -> list[tuple[str, str, int]]:
    """(what it needs besides Flax and Optax, code, line) of each Python block."""
    text = page.read_text()
    found = []
    for match in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        needs = NEEDS.match(match[1])
        found.append((needs[1] if needs else "", match[1], text[: match.start(1)].count("\n")))
    return found


def run(page: pathlib.Path, needed: str) -> int:
    """Runs the page's blocks that need nothing, and those that need `needed`, in order. How many of the latter."""
    for module in ("flax", "optax", *([needed] if needed else [])):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the page's code needs {module}, which is not installed")
    scope: dict[str, object] = {"__name__": page.stem}
    count = 0
    try:
        for needs, code, line in blocks(page):
            if needs in ("", needed):
                exec(compile("\n" * line + code, str(page), "exec"), scope)  # errors show the page's line
                count += needs == needed
    finally:
        jaxconv.disable()  # a page may show how to enable it
    return count


@pytest.mark.parametrize("needed", ("", "haiku", "equinox", "keras"), ids=lambda n: n or "flax")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_guides_code_runs(page, needed, tuning_file):
    if needed not in {needs for needs, _, _ in blocks(page)}:
        pytest.skip(f"the page has no code for {needed or 'Flax'}")
    if needed == "keras":
        os.environ.setdefault("KERAS_BACKEND", "jax")
    assert run(page, needed) > 0


def test_there_is_a_page_and_it_has_code():
    assert any(len(blocks(page)) > 5 for page in PAGES)
