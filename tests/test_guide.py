"""The code blocks of docs/guide run, each page's from top to bottom, as a reader would run them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import export
from packaging.requirements import Requirement

import jaxconv

GUIDE = pathlib.Path(__file__).parent.parent / "docs" / "guide"
# meshes.md needs eight devices: test_meshes_guide.py
PAGES = sorted(page for page in GUIDE.glob("*.md") if page.stem not in ("meshes", "serving"))
SERVING = GUIDE / "serving.md"
ERRORS = GUIDE / "errors.md"
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


@pytest.mark.as_planned
@pytest.mark.parametrize("needed", ("", "haiku", "equinox", "keras"), ids=lambda n: n or "flax")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_guides_code_runs(page, needed, tuning_file):
    if needed not in {needs for needs, _, _ in blocks(page)}:
        pytest.skip(f"the page has no code for {needed or 'Flax'}")
    if needed == "keras":
        os.environ.setdefault("KERAS_BACKEND", "jax")
    assert run(page, needed) > 0


# ----------------------------------------------------------------------------------------------------------------------
# Serving: with what a documented installation brings, and nothing that only the tests have


def brought(name: str, extra: str = "", found: set[str] | None = None) -> set[str]:
    """The distributions that `pip install name[extra]` brings, of those that are here, by their canonical names."""
    found = set() if found is None else found
    for line in importlib.metadata.requires(name) or ():
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate({"extra": extra}):
            for one in {*needed.extras, ""}:
                key = f"{canonical(needed.name)}[{one}]"
                if key not in found and _installed(needed.name):
                    found.add(key)
                    brought(needed.name, one, found)
    return {key.partition("[")[0] for key in found}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


HIDE = """
import sys


class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hide)
"""


@pytest.mark.skipif(not SERVING.exists(), reason="the guide is not beside these tests")
def test_serving_needs_what_is_installed(tmp_path):
    """In a process, and processes of it, that find no other packages."""
    if importlib.util.find_spec("flax") is None:
        pytest.skip("the page's code needs flax, which is not installed")
    there = brought("jaxconv", "flax") | {"jaxconv"}
    assert {"jax", "flax", "numpy"} <= there and "pytest" not in there
    modules = importlib.metadata.packages_distributions()
    hidden = {module for module, names in modules.items() if not {*map(canonical, names)} & there}
    assert "pytest" in hidden
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names=hidden))
    (tmp_path / "page.py").write_text("\n".join(code for _, code, _ in blocks(SERVING)))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "JAXCONV_ENABLE": "", "JAXCONV_DISABLE": ""}
    command = [sys.executable, str(tmp_path / "page.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


LOADED = """
import sys
import jax, numpy as np
{first}
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
{then}
exported.call(np.zeros((1, 4, 4, 4), np.float32))
"""


@pytest.mark.parametrize(
    "missing", ("jaxconv", "a JAX as new as the file's", "the platform", "a jaxconv as new as the file's")
)
def test_errors_quotes_what_is_said(missing, tmp_path):
    """Each message is what a process says, and stands on the page."""
    x = jnp.ones((1, 4, 4, 4))
    f = jax.jit(lambda x: jaxconv.conv2d(x, jnp.ones((3, 3, 4, 4)), jnp.ones(4), implementation="native"))
    first, then = "import jaxconv", "jaxconv.check_exported(exported)"
    if missing == "the platform":
        other, here = ("cpu", "cuda") if jax.default_backend() == "gpu" else ("cuda", "cpu")
        file = export.export(jax.jit(lambda x: x + 1), platforms=(other,))(x).serialize()
        expected = f"was exported for platforms '('{other}',)' but it is used on '('{here}',)'"
    else:
        file = export.export(f, disabled_checks=jaxconv.export_checks())(x).serialize()
    if missing == "jaxconv":
        first = then = ""
        expected = "NOT_FOUND: No FFI handler registered for jaxconv_conv_v2"
    elif missing.startswith("a JAX"):
        # What a newer JAX does: the operation in a form with a new number
        changed = re.sub(rb"custom_call_v\d", b"custom_call_v9", bytes(file))
        assert changed != file
        file, expected = changed, "Failed to deserialize StableHLO"
    elif missing.startswith("a jaxconv"):
        file = bytes(file).replace(b"jaxconv_conv_v2", b"jaxconv_conv_v3")
        expected = "calls jaxconv_conv_v3, which this jaxconv does not have"
    (tmp_path / "program.jax").write_bytes(file)
    command = [sys.executable, "-c", LOADED.format(first=first, then=then), str(tmp_path / "program.jax")]
    environment = {**os.environ, "JAXCONV_ENABLE": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode and expected in done.stderr, done.stderr[-3000:]
    if ERRORS.exists() and (missing != "the platform" or jax.default_backend() != "gpu"):
        assert expected.split(", ")[-1] in ERRORS.read_text()


def test_there_is_a_page_and_it_has_code():
    assert any(len(blocks(page)) > 5 for page in PAGES)
