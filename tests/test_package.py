"""The package as somebody meets it who has just installed it: names, versions, messages, `python -m jaxconv`."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil
import site
import subprocess
import sys
import types
from typing import Any

import pytest

import jaxconv

LAZY = {"linen", "nnx"}


def python(*arguments: str, cwd: Any = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Names


def test_version_is_that_of_the_distribution():
    assert jaxconv.__version__ == importlib.metadata.version("jaxconv")
    assert jaxconv.info().startswith(f"jaxconv {jaxconv.__version__}\n")


def test_dir_has_public_names_only():
    names = [name for name in dir(jaxconv) if not name.startswith("__")]
    assert set(names) == {*jaxconv.__all__, *LAZY} - {"__version__"}
    for name in names:
        value = getattr(jaxconv, name)
        assert not isinstance(value, types.ModuleType) or name in {*LAZY, "checkpoint_policies"}
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_flax_modules_come_when_they_are_asked_for():
    done = python(
        "-c",
        "import sys, jaxconv\n"
        "assert 'flax' not in sys.modules\n"
        "jaxconv.linen.Conv, jaxconv.nnx.Linear\n"
        "from jaxconv import *\n"
        "assert conv2d is jaxconv.conv2d",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "says"), [("conv", "conv1d, conv2d and conv3d"), ("Conv", "jaxconv.linen.Conv")])
def test_near_names_say_what_there_is(name, says):
    with pytest.raises(AttributeError, match=f"module 'jaxconv' has no attribute '{name}'; it has .*{says}"):
        getattr(jaxconv, name)
    with pytest.raises(AttributeError, match=r"module 'jaxconv' has no attribute 'winograd'$"):
        _ = jaxconv.winograd


def test_the_modules_are_still_found():
    from jaxconv import conv, conv_transpose

    assert conv.conv2d is jaxconv.conv2d
    assert conv_transpose.conv_transpose2d is jaxconv.conv_transpose2d


# ----------------------------------------------------------------------------------------------------------------------
# The command, and what is said where something is missing


def test_command_prints_info():
    done = python("-m", "jaxconv")
    assert done.returncode == 0, done.stderr
    assert f"jaxconv {jaxconv.__version__}" in done.stdout and "CPU code: loaded" in done.stdout
    assert python("-m", "jaxconv", "--version").stdout == f"jaxconv {jaxconv.__version__}\n"
    assert python("-m", "jaxconv", "digits").returncode == 2


def test_source_folder_says_that_it_is_one(tmp_path):
    """What `import jaxconv` in a checkout says after a plain `pip install .`."""
    shutil.copytree(pathlib.Path(jaxconv.__file__).parent, tmp_path / "jaxconv", ignore=shutil.ignore_patterns("*.so"))
    # -S: without the editable installation's finder, which would still find the compiled modules
    path = os.pathsep.join([str(tmp_path), *site.getsitepackages()])
    copied = python("-S", "-c", "import jaxconv", cwd=tmp_path, PYTHONPATH=path)
    assert "ImportError" in copied.stderr and "copied there, not installed" in copied.stderr
    (tmp_path / "CMakeLists.txt").touch()
    checkout = python("-S", "-c", "import jaxconv", cwd=tmp_path, PYTHONPATH=path)
    last = checkout.stderr.strip().splitlines()[-1]
    assert "ImportError" in last and f"from its source folder {tmp_path / 'jaxconv'}" in last
    assert "make install" in last and "circular" not in checkout.stderr
