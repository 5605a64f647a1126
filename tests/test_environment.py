"""The Makefile's environment: what a stamp says is installed is made again where it no longer is."""

from __future__ import annotations

import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").exists() or shutil.which("make") is None, reason="there is no Makefile here, or no make"
)


def make(root: pathlib.Path) -> tuple[str, bool]:
    """(what it says of stamps, whether it installs) of `make .venv/examples.stamp`, with a pip that does nothing."""
    log = root / ".venv" / "install.log"
    log.unlink(missing_ok=True)
    options = ["PIP=bash pip.sh", "cuda=", "JAXCONV_CUDA=OFF", f"PYTHON={root}/python"]
    names = ("MAKEFLAGS", "MAKELEVEL", "VENV", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = ["make", *options, ".venv/examples.stamp"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr, log.exists()


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    """A checkout with what the stamp needs, in a path with a space and the package's name, and an environment."""
    root = tmp_path / "a jaxconv folder"
    for folder in ("common", "cpu", "ffi", "cuda", "jaxconv", "jaxconv_plugin", ".ci"):
        (root / folder).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt", ".ci/environment.py"):
        shutil.copy(ROOT / name, root / name)
    (root / "jaxconv" / "__init__.py").touch()
    (root / "python").symlink_to(os.path.realpath(sys.executable))
    (root / "pip.sh").write_text('for word; do case "$word" in /dev/fd/*) cat "$word" >/dev/null ;; esac; done\n')
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True, timeout=240)
    asked = runpy.run_path(str(root / ".ci" / "environment.py"))
    for requirement in (*asked["needs"]("build"), *asked["needs"]("examples"), "jaxconv"):
        install(root, requirement)
    (site(root) / "jaxconv.pth").write_text(f"{root}\n")
    (root / ".venv" / "venv.stamp").touch()
    said, installed = make(root)
    assert installed and not said
    return root


def site(root: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(sysconfig.get_path("purelib", "venv", {"base": str(root / ".venv")}))


def install(root: pathlib.Path, requirement: str) -> None:
    """Writes what pip writes of a distribution that is installed."""
    name = requirement
    for separator in "<>=[; ":
        name = name.partition(separator)[0]
    folder = site(root) / f"{name.replace('-', '_')}-1.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n")


def test_what_is_installed_is_not_installed_again(checkout):
    assert make(checkout) == ("", False)


@pytest.mark.parametrize("name", ("jaxconv", "jax", "flax", "nanobind"))
def test_what_was_uninstalled_is_installed_again(name, checkout):
    shutil.rmtree(site(checkout) / f"{name}-1.dist-info")
    said, installed = make(checkout)
    assert installed and f"no longer holds: {name} is not installed" in said
    install(checkout, name)
    assert make(checkout) == ("", False)


def test_a_checkout_that_moved_is_installed_again(checkout):
    moved = checkout.parent / "elsewhere"
    checkout.rename(moved)
    said, installed = make(moved)
    assert installed and "no longer holds: jaxconv cannot be imported" in said
    (site(moved) / "jaxconv.pth").write_text(f"{moved}\n")
    assert make(moved) == ("", False)
    copied = checkout.parent / "copied"
    shutil.copytree(moved, copied, symlinks=True)
    said, installed = make(copied)
    assert installed and f"no longer holds: jaxconv is {moved / 'jaxconv'}" in said


def test_a_compiled_module_that_is_gone_is_made_again(checkout):
    with (site(checkout) / "jaxconv-1.dist-info" / "RECORD").open("a") as record:
        record.write("jaxconv/_cpu.so,,\n")
    said, installed = make(checkout)
    assert installed and "no longer holds: jaxconv's jaxconv/_cpu.so is gone" in said


def test_an_interpreter_that_is_gone_is_replaced(checkout):
    for link in (checkout / ".venv" / "bin").glob("python*"):
        link.unlink()
        link.symlink_to(checkout / "gone")
    assert make(checkout)[1]
    inside = subprocess.run([checkout / ".venv" / "bin" / "python", "-c", "import sys; print(sys.prefix)"], timeout=60)
    assert inside.returncode == 0


def test_an_environment_with_a_space_in_its_name_is_refused(checkout):
    done = subprocess.run(["make", "VENV=my environment", "install"], cwd=checkout, capture_output=True, text=True)
    assert done.returncode and "must be a path without spaces" in done.stderr
