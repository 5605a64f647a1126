"""docs/checks.py, which `make docs` runs: each check finds a fault that is planted, and the pages have none."""

from __future__ import annotations

import importlib.util
import io
import pathlib

import pytest

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
SPEC = importlib.util.spec_from_file_location("docs_checks", DOCS / "checks.py")
checks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(checks)


def test_the_pages_have_no_faults():
    lines = [f"{path.relative_to(checks.ROOT)}:{number}: {what}" for path, (number, what) in checks.found()]
    assert not lines, "\n".join(lines)


WORDS = " ".join(["word"] * 40)


@pytest.mark.parametrize(
    "check, fault, line",
    [
        ("numbers", "It took\n.48 of the time.", 2),
        ("numbers", "It took (.48).", 1),
        ("numbers", "| a | b |\n|---|---|\n| 1 | .48 |", 3),
        ("bullets", f"* {WORDS} one", 1),
        ("bullets", f"text\n\n* short\n* {WORDS}\n  [more](words.md)", 4),
        ("bullets", f"1. {WORDS} one", 1),
        ("tables", "# A page\n\n## A heading\n\n| " + " | ".join(["x" * 30] * 9) + " |", 5),
        ("stars", "where at(o, t) = o*stride - pad + t*dilation", 1),
        ("docstrings", 'def f():\n    """Takes\n    .48 of it."""', 3),
    ],
)
def test_a_fault_is_found(check, fault, line):
    found = list(getattr(checks, check)(fault))
    assert found and found[0][0] == line


@pytest.mark.parametrize(
    "check, text",
    [
        ("numbers", "0.48, jax.numpy, `.48`, tests/.ci, version 3.11 ... and so on.\n\n```python\nx = .5\n```\n"),
        ("bullets", f"* {WORDS}\n* another\n\n{WORDS} {WORDS}\n"),
        ("bullets", "* a link counts its words: [" + "w " * 20 + "](" + "x" * 90 + ".md)\n"),
        ("bullets", f"```text\n* {WORDS} {WORDS}\n```\n"),
        ("tables", "| " + " | ".join(["short words only"] * 9) + " |"),
        ("stars", "*emphasis*, **bold**, `o*stride`, tests/*.py\n\n    a*b + c*d\n"),
        ("docstrings", 'def f():\n    """Takes 0.48."""\n    # .48 and more'),
    ],
)
def test_what_is_right_is_not_found(check, text):
    assert not list(getattr(checks, check)(text))


def figure(text: str, x: float, anchor: str = "start", turned: int = 0) -> str:
    style = f"font-size: 10px; text-anchor: {anchor}"
    where = f'x="{x}" y="150" transform="rotate({turned} {x} 150)"'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 300">'
        f'<text style="{style}" {where}>{text}</text></svg>'
    )


def test_texts_of_figures_beyond_their_edges():
    legend = "Flax, jaxconv.linen by import, jaxconv.accelerate"  # 255 pixels
    assert list(checks.cut_off(figure(legend, 150)))
    assert list(checks.cut_off(figure(legend, 100, "end")))
    assert not list(checks.cut_off(figure(legend, 20)))
    assert not list(checks.cut_off(figure(legend, 280, "end")))
    assert not list(checks.cut_off(figure(legend, 150, "middle")))
    assert not list(checks.cut_off(figure(legend, 5, "middle", -90)))  # upright, at the left edge
    assert list(checks.cut_off(figure(legend, 5, "middle")))


def test_emphasis_that_was_a_product():
    assert checks.lost_stars("stride - pad + t") and checks.lost_stars("s + t")
    assert not checks.lost_stars("linear twin") and not checks.lost_stars("two-pass")


def test_examples():
    assert checks.has_example("Does it.\n\nExample::\n\n    f(1)\n")
    assert not checks.has_example("Does it: f(1).\n\n    Args::\n")


def test_a_page_with_faults_does_not_build(tmp_path):
    """Through Sphinx, with the site's own settings: a link, an anchor, and stars that Markdown takes for emphasis."""
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    from sphinx.application import Sphinx

    source = tmp_path / "source"
    source.mkdir()
    (source / "index.md").write_text(
        "# A page\n\nwhere at = o *stride - pad + t* dilation\n\n"
        "[a page](missing.md), [a heading](#there-is-none), [right](#a-page).\n"
    )
    warnings = io.StringIO()
    settings = {"html_static_path": [], "html_theme": "basic"}
    Sphinx(
        srcdir=source,
        confdir=DOCS,
        outdir=tmp_path / "out",
        doctreedir=tmp_path / "trees",
        buildername="html",
        confoverrides=settings,
        status=None,
        warning=warnings,
    ).build()
    said = warnings.getvalue()
    assert "missing.md" in said and "there-is-none" in said and "a-page" not in said
    assert "stars are lost" in said
    assert "is public and not in docs/api" in said  # as no page here has them
