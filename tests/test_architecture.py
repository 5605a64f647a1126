"""The commands of docs/architecture.md, "Directions", run here, and print what their comments say."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"


def commands(page: str) -> list[tuple[str, str]]:
    """(command, what its comment says) of the first shell block behind "## Directions". A comment stands behind its
    command or in a line in front of it."""
    block = re.search(r"^## Directions$.*?^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    pairs, before = [], ""
    for line in block[1].splitlines():
        if line.startswith("# "):
            before = line[2:]
            continue
        command, _, comment = line.rpartition(" # ")
        pairs.append((command or line, comment if command else before))
        before = ""
    return pairs


def mistake(printed: str, comment: str) -> str | None:
    """What is printed and should not be; None where it is as the comment says: "nothing: ...", "cuda/ only: ...", or
    the name of a file, in the one line that there is."""
    lines, said = printed.splitlines(), re.split(r"[:,]", comment)[0]
    folder = said.removesuffix(" only")
    if said == "nothing":
        good = not lines
    elif folder != said:
        good = bool(lines) and all(line.startswith(folder) for line in lines)
    else:
        good = len(lines) == 1 and lines[0].endswith(f"/{said}")
    return None if good else f"expected {said}, got {printed or 'nothing'}"


@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are a shell's")
@pytest.mark.parametrize(("command", "comment"), commands(PAGE.read_text()))
def test_a_direction_holds(command, comment):
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert mistake(done.stdout, comment) is None


def test_every_direction_says_what_it_prints():
    pairs = commands(PAGE.read_text())
    assert len(pairs) >= 14 and all(command.strip() and comment for command, comment in pairs)


@pytest.mark.parametrize(
    ("printed", "comment"),
    [
        ("cuda/a.cu\n", "nothing: why"),
        ("", "cuda/ only: why"),
        ("cuda/a.cu\ncpu/b.cc\n", "cuda/ only: why"),
        ("", "primitives.py: why"),
        ("jaxconv/_core/primitives.py\njaxconv/_ops/conv.py\n", "primitives.py: why"),
        ("jaxconv/_core/other_primitives.py\n", "primitives.py: why"),
    ],
)
def test_a_wrong_answer_is_noticed(printed, comment):
    assert mistake(printed, comment) is not None
