"""README.md and docs/: their links lead somewhere, and their Python runs."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import jax.export
import jax.numpy as jnp
import pytest

import jaxconv

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


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_products_stand_in_code(page):
    """A star between two words is emphasis to Markdown, and is lost with another one in the line."""
    text = re.sub(r"^```.*?^```|^ {4,}.*?$|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"\w\*\w+.*", text)


def _files() -> list[str]:
    """Files of the checkout, from its root."""
    rooms = ("jaxconv", "common", "ffi", "cpu", "cuda", "tests", "benchmarks", "examples", "docs", ".ci")
    found = [path for room in rooms for path in (ROOT / room).rglob("*") if path.is_file()]
    return [str(path.relative_to(ROOT)) for path in [*ROOT.glob("*"), *found]]


def test_files_that_documents_name_are_there():
    files = _files()
    for page in PAGES:
        if "results" in page.relative_to(ROOT).parts:
            continue
        for name in re.findall(r"`([\w./*-]+/[\w.*-]+\.(?:py|h|cc|cu|cuh|md|ipynb))`", page.read_text()):
            there = any(fnmatch.fnmatch(f"/{file}", f"*/{name}") for file in files)
            assert there, f"{_name(page)} names {name}"


ARCHITECTURE = ROOT / "docs" / "architecture.md"


def _commands() -> list[tuple[str, str]]:
    """(command, what its comment says that it prints) of the page's directions: "command # comment", or a line each."""
    block = re.search(r"^```sh\n(.*?)^```", ARCHITECTURE.read_text(), re.DOTALL | re.MULTILINE)[1]
    found, said = [], ""
    for line in block.splitlines():
        if line.startswith("# "):
            said = line[2:]
            continue
        command, comment = (line, said) if said else line.rsplit(" # ", 1)
        found.append((command.strip(), comment.strip()))
        said = ""
    return found


@pytest.mark.skipif(not ARCHITECTURE.exists(), reason="the checkout is not beside these tests")
@pytest.mark.parametrize("number", range(14))
def test_directions_are_as_the_architecture_says(number):
    """ "nothing: why", "folder/ only: why" or "file: why"."""
    commands = _commands()
    assert len(commands) == 14
    command, says = commands[number]
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert not done.stderr, command  # a folder that is gone has nothing in it
    printed = done.stdout.splitlines()
    expected = re.match(r"(nothing|(\S+/) only|([\w.]+\.\w+))[:,] ", says)
    assert expected, f"unknown: {says}"
    if expected[1] == "nothing":
        assert not printed, command
    elif expected[2]:
        assert printed and all(line.startswith(expected[2]) for line in printed), (command, printed)
    else:
        assert [pathlib.Path(line).name for line in printed] == [expected[3]], (command, printed)


# Pages that tell where in the code something is done
TELLING = [page for page in PAGES if page == ARCHITECTURE or page.parent.name == "contributing"]
SUFFIXES = {".py", ".h", ".cc", ".cu", ".cuh", ".txt", ".toml", ""}


@functools.cache
def _words() -> set[str]:
    """Of the checkout's code, and of its files' names."""
    found: set[str] = set()
    for name in _files():
        found |= {*re.findall(r"\w+", name)}
        path = ROOT / name
        if path.is_file() and not name.startswith("docs/") and path.suffix in SUFFIXES:
            found |= {*re.findall(r"\w+", path.read_text(errors="ignore"))}
    return found


@pytest.mark.parametrize("page", TELLING, ids=_name)
def test_names_in_pages_about_the_code_are_in_the_code(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", text):
        if "/" in span or "=" in span:  # a path, of which the test above knows; a command with its settings
            continue
        for name in re.findall(r"\b[A-Za-z_]\w+", span):
            assert name in _words(), f"{_name(page)} names {name} (`{span}`)"


ERRORS = ROOT / "docs" / "guide" / "errors.md"


def test_errors_by_their_text_are_in_the_code():
    """What a table's rows have in code marks in the column of texts, but for XLA's and JAX's."""
    code = " ".join(path.read_text() for path in (ROOT / "jaxconv").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code).replace('\\"', '"')
    texts = []
    for row in re.findall(r"^\| (.*) \|$", ERRORS.read_text(), re.MULTILINE):
        cells = row.split(" | ")
        texts += re.findall(r"`([^`]+)`", cells[len(cells) - 3])
    assert len(texts) > 30
    for text in texts:
        for part in text.split("..."):
            assert part in code, f"{text}: {part!r} is no error of jaxconv's"


EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n|\n)+)", re.MULTILINE)
FUNCTIONS = [name for name in jaxconv.__all__ if inspect.isfunction(getattr(jaxconv, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_in_docstrings_run(name):
    """Layers all have one; blocks behind other words show formulas and names that are the reader's."""
    text = inspect.getdoc(getattr(jaxconv, name))
    found = EXAMPLE.findall(text + "\n")
    ops = ("conv", "batchnorm", "dense", "groupnorm", "layernorm", "max_pool", "avg_pool", "mlp", "squeeze")
    layer = name.startswith(ops)
    assert len(found) == 1 or not layer, name
    try:
        for code in found:
            scope = {"jax": jax, "jnp": jnp, "jaxconv": jaxconv}
            exec(textwrap.dedent(code), scope)
            shape = re.search(r"# (\([\d, ]+\))$", code.rstrip())
            assert shape is None or scope["y"].shape == ast.literal_eval(shape[1])
    finally:
        jaxconv.disable()


MODULES = ("linen", "nnx")


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_layers_run(name):
    """Every class and function of jaxconv.linen and jaxconv.nnx has one."""
    pytest.importorskip("flax")
    import flax.nnx

    module = importlib.import_module(f"jaxconv.{name}")
    for public in module.__all__:
        (code,) = EXAMPLE.findall(inspect.getdoc(getattr(module, public)) + "\n")
        scope = {"jax": jax, "jnp": jnp, "jaxconv": jaxconv, "nnx": flax.nnx}
        importlib.import_module("jaxconv.linen")
        exec(textwrap.dedent(code), scope)
        assert scope["y"].shape[0] == 8, public


def test_the_citation_has_the_packages_version():
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def _missing(code: str) -> list[str]:
    """Packages that `code` imports and that are not installed."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
    return sorted(name for name in {name.partition(".")[0] for name in found} if importlib.util.find_spec(name) is None)


# The guides' code has a test of its own, with the libraries that they show.
RUN = [page for page in PAGES if CODE.search(page.read_text()) and page.parent != ROOT / "docs" / "guide"]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.promise] if page.name == "README.md" else []) for page in RUN],
    ids=_name,
)
def test_a_pages_python_runs_from_top_to_bottom(page, tmp_path):
    code = "\n".join(CODE.findall(page.read_text()))
    if missing := _missing(code):
        pytest.skip(f"the page shows {', '.join(missing)}, not installed here")
    # In a process of its own: a page may change what every later program does.
    program = tmp_path / "page.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
