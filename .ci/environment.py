"""What the Makefile asks about an environment: what pyproject.toml wants in it, and whether that is still there.

    python .ci/environment.py needs NAME                 # requirements: of the extra NAME, or of the build
    python .ci/environment.py check VENV NAME=extra,...  # removes VENV/NAME.stamp where it says what is no longer so

`check` is run by VENV's own Python. A stamp says that the package and these extras are installed (without "=": what the
extra NAME asks for). Since it was made somebody may have uninstalled a package, moved the folder, or installed another
jaxconv. Versions are not looked at.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def needs(name: str) -> list[str]:
    """The requirements of an extra; or those of an installation that is not isolated ("build").

    Then pip provides nothing. (For jaxlib, whose headers are compiled against, the environment's own stands in for the
    pinned oldest one.)
    """
    read = project()
    if name != "build":
        return read["project"]["optional-dependencies"][name]
    tools = [line for line in read["build-system"]["requires"] if not line.startswith("jaxlib")]
    return [
        *tools,
        *read["project"]["dependencies"],
        f"cmake{read['tool']['scikit-build']['cmake']['version']}",
        "ninja",
    ]


def missing(requirements: list[str]) -> Iterator[str]:
    """Names of packages that are asked for and not installed, with those of extras, as of jax[cuda13]."""
    for line in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", line).groups()  # type: ignore[union-attr]
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            yield name
            continue
        for extra in (extras or "").split(","):
            inner = [one for one in needed if extra and re.search(rf"; extra == ['\"]{extra}['\"]$", one)]
            yield from missing([one.partition(";")[0] for one in inner])


def not_this_package() -> str | None:
    """Why the jaxconv that is installed is not this folder's; None where it is."""
    try:
        package = importlib.metadata.distribution("jaxconv")
    except importlib.metadata.PackageNotFoundError:
        return "jaxconv is not installed"
    # The record itself: from Python 3.12 on `files` leaves out what is gone.
    files = [row[0] for row in csv.reader((package.read_text("RECORD") or "").splitlines()) if row]
    gone = [
        file for file in files if not file.endswith(".pyc") and not pathlib.Path(package.locate_file(file)).exists()
    ]
    if gone:
        return f"jaxconv's {gone[0]} is gone"
    spec = importlib.util.find_spec("jaxconv")
    if spec is None or spec.origin is None:
        return "jaxconv cannot be imported"
    if pathlib.Path(spec.origin).resolve().parent != ROOT / "jaxconv":
        return f"jaxconv is {pathlib.Path(spec.origin).parent}"
    return None


def check(venv: pathlib.Path, promises: list[str]) -> None:
    package = not_this_package()
    for promise in promises:
        name, with_package, extras = promise.partition("=")
        stamp = venv / f"{name}.stamp"
        if not stamp.exists():
            continue
        wanted = [line for extra in (extras or name).split(",") for line in needs(extra)]
        if with_package:
            wanted += project()["project"]["dependencies"]
        lost = [f"{one} is not installed" for one in missing(wanted)]
        if with_package and package:
            lost.insert(0, package)
        if lost:
            print(f"{stamp} no longer holds: {', '.join(lost)}", file=sys.stderr)
            stamp.unlink()


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "needs":
        print(*needs(arguments[0]), sep="\n")
    elif command == "check":
        check(pathlib.Path(arguments[0]), arguments[1:])
    else:
        sys.exit(__doc__)
