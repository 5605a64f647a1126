"""The documentation as a site: `make docs` builds it into build/docs, warnings are errors."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pathlib
import re
import sys
import types
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parent))
import checks
import notebooks

project = "jaxconv"
release = version = importlib.metadata.version("jaxconv")
project_copyright = "the jaxconv authors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"jaxconv {release}"
# Single backticks in docstrings are code, and indented blocks are pictures and formulas more often than programs.
default_role = "code"
highlight_language = "text"
smartquotes = False  # "NHWC" is a string
html_static_path = ["_static"]
html_css_files = ["wide.css"]

myst_heading_anchors = 3
autodoc_member_order = "bysource"
# A signature names arguments and defaults (`readable` below); what an argument may be, the text under it says.
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "show-inheritance": True}

# Public modules; each has a page in docs/api.
MODULES = ("jaxconv", "jaxconv.linen", "jaxconv.nnx", "jaxconv.tune", "jaxconv.checkpoint_policies")


# Classes that users are given, and do not make.
GIVEN = (
    "jaxconv.Accelerated",
    "jaxconv.Explanation",
    "jaxconv.Frozen",
    "jaxconv.Launches",
    "jaxconv.Quantization",
    "jaxconv.tune.Results",
    "jaxconv.tune.Tuned",
    "jaxconv.tune.Tuning",
)


def check_public_names(app: Any, env: Any) -> list[str]:
    """Warns of public names without an entry in the API reference."""
    from sphinx.util import logging

    documented = set(env.get_domain("py").objects)
    for name in MODULES:
        module = importlib.import_module(name)
        local = [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", None) == name]
        for public in getattr(module, "__all__", local):
            value = getattr(module, public)
            where = value.__name__ if inspect.ismodule(value) else f"{name}.{public}"
            found = where in MODULES if inspect.ismodule(value) else where in documented or not callable(value)
            if not found:
                logging.getLogger(__name__).warning("%s is public and not in docs/api", where)
            told = (inspect.isfunction(value) or inspect.isclass(value)) and where not in GIVEN
            if told and not checks.has_example(inspect.getdoc(value) or ""):
                logging.getLogger(__name__).warning("%s has no example", where)
    return []


def check_texts(app: Any) -> None:
    """Warns of what `checks` finds in pages, figures and docstrings."""
    from sphinx.util import logging

    for path, (line, what) in checks.found():
        logging.getLogger(__name__).warning("%s", what, location=f"{path}:{line}")


def end_of_code(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings say `Call`s; reStructuredText wants a break behind the second backtick."""
    lines[:] = [re.sub(r"(?<!`)(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]


def _default(value: Any) -> str:
    """A default as people write it: `float32`, `zeros`, and not an object with its address."""
    if getattr(value, "__qualname__", "").startswith("variance_scaling"):
        return "lecun_normal()"
    if isinstance(value, types.MappingProxyType):
        return repr(dict(value))
    return value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)


def readable(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """A function's or layer's signature without types, which overloads repeat and aliases make a line each."""
    if name in GIVEN:
        return "", None
    if what not in ("function", "class", "method"):
        return None
    own = inspect.isclass(obj) and name.startswith("jaxconv.nnx.")  # its metaclass takes anything
    found = inspect.signature(obj.__init__ if own else obj)
    parameters = [
        p for p in found.parameters.values() if p.name not in ("self", "parent", "name") or what == "function"
    ]
    plain = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else _Shown(_default(p.default)))
        for p in parameters
    ]
    result = getattr(obj, "__annotations__", {}).get("return")
    # A function that returns a function says so in its text.
    told = isinstance(result, str) and not result.startswith("OfArguments")
    return str(inspect.Signature(plain)), result if told else None


class _Shown(str):
    """A default whose repr is its text."""

    def __repr__(self) -> str:
        return str(self)


def without_navigation(app: Any, doctree: Any) -> None:
    """Recorded tables are found by their index, not by 75 entries of the navigation."""
    name = app.env.docname
    if name.startswith("results/") and name != "results/index":
        app.env.metadata[name]["orphan"] = True


def notebook_cells(app: Any, name: str, source: list[str]) -> None:
    """A page's line `<!-- cells of PATH -->` becomes the notebook's cells and their outputs."""

    def cells(found: re.Match[str]) -> str:
        return notebooks.rendered(pathlib.Path(app.srcdir, found[1]).resolve())

    source[0] = re.sub(r"^<!-- cells of (\S+) -->$", cells, source[0], flags=re.MULTILINE)


def check_stars(app: Any, doctree: Any) -> None:
    """Warns of a product that has become emphasis: `o*stride + t*dilation` outside of code."""
    from docutils import nodes
    from sphinx.util import logging

    for node in doctree.findall(nodes.emphasis):
        if checks.lost_stars(node.astext()):
            logging.getLogger(__name__).warning("stars are lost around %r", node.astext(), location=node)


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", check_texts)
    app.connect("autodoc-process-docstring", end_of_code)
    app.connect("autodoc-process-signature", readable)
    app.connect("doctree-read", check_stars)
    app.connect("source-read", notebook_cells)
    app.connect("doctree-read", without_navigation, priority=900)  # after Sphinx has read a page's own metadata
    app.connect("env-check-consistency", check_public_names)
    return {"parallel_read_safe": True}
