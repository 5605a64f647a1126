"""The documentation as a site: `make docs` builds it into build/docs, warnings are errors."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from typing import Any

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

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}

# Public modules; each has a page in docs/api.
MODULES = ("jaxconv", "jaxconv.linen", "jaxconv.nnx", "jaxconv.tune", "jaxconv.checkpoint_policies")


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
    return []


def end_of_code(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings say `Call`s; reStructuredText wants a break behind the second backtick."""
    lines[:] = [re.sub(r"(?<!`)(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", end_of_code)
    app.connect("env-check-consistency", check_public_names)
    return {"parallel_read_safe": True}
