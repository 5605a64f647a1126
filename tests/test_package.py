"""The package as somebody meets it who has just installed it: names, versions, messages, `python -m jaxconv`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import os
import pathlib
import re
import runpy
import shutil
import site
import subprocess
import sys
import textwrap
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
import matrix
import pytest

import jaxconv
from jaxconv import _problem
from jaxconv._core import types as _types

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
    from jaxconv._ops import conv, conv_transpose

    assert conv.conv2d is jaxconv.conv2d
    assert conv_transpose.conv_transpose2d is jaxconv.conv_transpose2d


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("name", ["Conv", "ConvTranspose", "Dense or Linear", "BatchNorm"])
def test_flax_arguments_are_documented(library, name):
    """All of the installed Flax's, and the activation: in the docstring, which is what an editor shows."""
    name = {"Dense or Linear": {"linen": "Dense", "nnx": "Linear"}[library]}.get(name, name)
    ours = getattr(getattr(jaxconv, library), name)
    flax = ours.__base__
    if library == "linen":
        arguments = {field.name for field in dataclasses.fields(flax)} - {"parent", "name"}
    else:
        parameters = inspect.signature(flax.__init__).parameters
        arguments = set(parameters) - {"self"}
        # What help() shows: Flax's own signature, and one more argument.
        signature = inspect.signature(ours.__init__).parameters
        assert {k: v for k, v in signature.items() if k != "activation"} == dict(parameters)
        assert signature["activation"].default is None
        # What type checkers see: every keyword of Flax's.
        hints = typing.get_type_hints(inspect.unwrap(ours.__init__), include_extras=False)
        options = typing.get_type_hints(typing.get_args(hints["options"])[0]) if "options" in hints else {}
        assert arguments <= {*options, *hints}, arguments - {*options, *hints}
    lines = re.findall(r"^  ([\w, ]+):", inspect.getdoc(ours) or "", re.MULTILINE)
    documented = set(re.findall(r"\w+", " ".join(lines)))
    assert arguments | {"activation"} == documented


RELEASE = pathlib.Path(__file__).parent.parent / ".ci" / "version.py"


@pytest.mark.skipif(not RELEASE.exists(), reason="the checkout's scripts are not beside these tests")
@pytest.mark.parametrize(
    ("changelog", "tag", "wrong"),
    [
        ("# C\n\n## [1.2.3] - unreleased\n\n## [1.0.0] - 2020-01-01\n", None, None),
        ("## [1.2.3] - 2026-11-22\n", "v1.2.3", None),
        ("## [1.2.3] - unreleased\n", "v1.2.3", "1.2.3 is unreleased"),
        ("## [1.2.3] - 2026-11-22\n", "v1.2.4", "the tag is v1.2.4, pyproject.toml says 1.2.3"),
        (
            "## [1.3.0] - unreleased\n## [1.2.3] - 2026-11-22\n",
            None,
            "newest section is 1.3.0, pyproject.toml says 1.2.3",
        ),
        ("## [1.2.3] - soon\n", None, "1.2.3 is dated 'soon'"),
        ("# Changelog\n", None, "has no section"),
    ],
)
def test_version_and_changelog_must_agree(changelog, tag, wrong):
    found = "; ".join(runpy.run_path(str(RELEASE))["check"]("1.2.3", changelog, tag))
    assert (wrong in found) if wrong else not found


def test_the_matrix_has_what_the_requirements_allow():
    """Of each minor version of JAX its newest patch and its first: what nobody tried is not allowed."""
    for name in ("jax", "jaxlib"):
        (given,) = (r for r in importlib.metadata.requires("jaxconv") or () if re.match(rf"{name}[<>=]", r))
        first, end = (int(re.search(rf"{bound}0\.(\d+)", given)[1]) for bound in (">=", "<"))
        allowed = {f"0.{minor}{patch}" for minor in range(first, end) for patch in ("", ".0")}
        assert allowed == set(matrix.JAX), given
    assert matrix.pairs(("3.11", "3.12"), ("0.10.0", "0.10", "0.12.0", "0.12")) == [
        ("3.11", "0.10.0"),
        ("3.11", "0.10"),
        ("3.12", "0.10"),
        ("3.12", "0.12.0"),
        ("3.12", "0.12"),
    ]


@pytest.mark.skipif(not RELEASE.exists(), reason="the checkout's scripts are not beside these tests")
def test_this_version_has_its_section():
    done = python(str(RELEASE))
    assert (done.returncode, done.stdout) == (0, f"{jaxconv.__version__}\n"), done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# Types


def test_user_code_runs():
    """The program that type checkers look at (make typecheck) is one that runs."""
    done = python(str(pathlib.Path(__file__).parent / "typing" / "user_code.py"))
    assert done.returncode == 0, done.stderr


def test_literals_are_what_is_taken():
    assert (pathlib.Path(jaxconv.__file__).parent / "py.typed").exists()
    for nd, layout in ((1, _types.Layout1d), (2, _types.Layout2d), (3, _types.Layout3d)):
        assert typing.get_args(layout) == (_problem.CHANNELS_LAST[nd], _problem.CHANNELS_FIRST[nd])
    for f in (jaxconv.conv1d, jaxconv.conv2d, jaxconv.conv3d, jaxconv.conv_transpose2d, jaxconv.dense):
        explicit = set(inspect.signature(f).parameters)
        for overload in typing.get_overloads(f):
            hints = typing.get_type_hints(overload)
            options = typing.get_args(hints.pop("options"))[0]
            assert explicit == ({*hints} - {"return"}) | {*typing.get_type_hints(options)}


# ----------------------------------------------------------------------------------------------------------------------
# The command, and what is said where something is missing


@pytest.mark.promise
def test_command_prints_info():
    done = python("-m", "jaxconv")
    assert done.returncode == 0, done.stderr
    assert f"jaxconv {jaxconv.__version__}" in done.stdout and "CPU code: loaded" in done.stdout
    assert python("-m", "jaxconv", "--version").stdout == f"jaxconv {jaxconv.__version__}\n"
    assert python("-m", "jaxconv", "digits").returncode == 2


def test_unknown_names_in_the_environment_are_told():
    warned = python("-c", "import jaxconv; print(jaxconv.info())", JAXCONV_DISABLE="conv,depthwise")
    assert "UserWarning: JAXCONV_DISABLE=conv,depthwise: unknown: 'depthwise'; expected some of conv, " in warned.stderr
    assert "JAXCONV_DISABLE=conv,depthwise (unknown: 'depthwise'" in warned.stdout
    known = python("-c", "import jaxconv; print(jaxconv.info())", JAXCONV_DISABLE=" dense, conv_wgrad ,all")
    assert known.stderr == "" and "these go to XLA" in known.stdout


def test_explain_shows_the_epilogue_and_refuses_unknown_platforms():
    x, w, b = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 6)), jnp.ones(6)

    def calls(x):
        y = jaxconv.conv2d(x, w, b, activation="relu"), jaxconv.conv2d(x, w, activation=("leaky_relu", 0.2))
        d = jaxconv.dense(x, w[0, 0], b, c=jnp.ones((2, 8, 8, 6)), activation=jax.nn.gelu)
        n, *_ = jaxconv.batchnorm(y[0], b, b, b, b, training=True, residual=y[1], activation="silu")
        return y, d, n, jaxconv.conv2d(x, w)

    shown = ["+ bias + relu", "+ leaky_relu(0.2)", "+ c + bias + gelu", "+ residual + silu"]
    table, jaxpr = str(jaxconv.explain(calls)(x)), str(jax.make_jaxpr(calls)(x))
    assert all(text in table and text in jaxpr for text in shown)
    plain = [str(call.problem) for call in jaxconv.explain(calls)(x) if call.op == "conv_fprop"]
    assert plain == ["2x8x8 4->6 3x3 float32 NHWC"]
    with pytest.raises(ValueError, match="explain: platform='foo' is unknown, expected None or one of cpu, cuda"):
        jaxconv.explain(calls, platform="foo")
    assert str(jaxconv.explain(calls, platform="gpu")(x)) == str(jaxconv.explain(calls, platform="cuda")(x))


def test_explain_says_what_its_short_words_mean():
    """Those that are in the table."""
    x, w, large = (
        jnp.ones((2, 8, 8, 4)),
        jnp.ones((3, 3, 4, 4)),
        jnp.ones((7, 7, 4, 4)),
    )  # no kernel adds behind `large`
    said = {
        "several calls": str(jaxconv.explain(lambda: jaxconv.conv2d(x, large, residual=x))()),
        "T instead of N": str(jaxconv.explain(jax.grad(lambda w: jaxconv.dense(x[0, 0], w).sum()))(w[0, 0])),
        "": str(jaxconv.explain(jaxconv.conv2d)(x, w)),
    }
    assert ("calls[" in said["several calls"]) and (" TN " in said["T instead of N"])
    for name, text in said.items():
        assert [words in text for words in said if words] == [words == name for words in said if words]


EXPLAINED = """
    import gc
    import jax, jax.numpy as jnp
    import jaxconv
    w, v, x = jnp.ones((3, 3, 4, 4)), jnp.ones(4), jnp.ones((2, 6, 6, 4))
    def f(x):
        x = jaxconv.conv2d(x, w, v, activation="gelu")
        return jaxconv.conv_batchnorm(x, w, v, v, v, v, training=True)[0].sum()
    gradient = jax.jit(jax.grad(f))
    def kept():
        for _ in range(3):
            jaxconv.explain(gradient)(x), jaxconv.explain(jax.grad(f))(x)
        gc.collect()
        return sum(type(each).__name__ == "JaxprEqn" for each in gc.get_objects())
    kept()
    before = kept()
    print("more", kept() - before)
    # What is accelerated for the first time while it is explained is reported all the same.
    print(len(jaxconv.explain(lambda x: jaxconv.accelerate(lambda x: jax.nn.relu(x @ w[0, 0]))(x))(x).accelerated))
"""


X, W = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 4, 8))
NOBODYS = {
    "conv tile": lambda: jaxconv.conv2d(X, W, algorithm="direct 12x12"),
    "conv space": lambda: jaxconv.conv2d(X, W, algorithm="im2col "),
    "depthwise tile": lambda: jaxconv.conv2d(X, W[:, :, :1, :4], groups=4, algorithm="depthwise 3"),
    "dense space": lambda: jaxconv.dense(X[0, 0], W[0, 0], algorithm="gemm "),
    "squeeze_excite tile": lambda: jaxconv.squeeze_excite(
        X, jnp.ones((4, 2)), None, jnp.ones((2, 4)), None, algorithm="one_pass 5"
    ),
}


@pytest.mark.parametrize("name", NOBODYS)
def test_a_kernel_that_nobody_has_is_refused(name):
    """Before the program runs: a family at once, a kernel or tile when the program is lowered."""
    message = r"algorithm='.*' (is unknown, expected|cannot run .*: (there is no such kernel|it ))"
    with pytest.raises(ValueError, match=message):
        jax.jit(NOBODYS[name]).lower()


def test_static_arguments_of_a_jitted_function():
    """explain, cost and launches take it as it is."""

    @functools.partial(jax.jit, static_argnames="train")
    def f(x, train):
        return jaxconv.conv2d(x, W, stride=2 if train else 1).sum()

    ((one,), (two,)) = (jaxconv.explain(f)(X, train=train) for train in (False, True))
    assert "s2" not in str(one.problem) and "s2" in str(two.problem)
    assert jaxconv.cost(f)(X, train=False)["flops"] > 3 * jaxconv.cost(f)(X, train=True)["flops"]
    for tool in (jaxconv.explain, jaxconv.cost):
        with pytest.raises(jax.errors.TracerBoolConversionError):
            tool(f.__wrapped__)(X, train=True)

    @functools.partial(jax.jit, static_argnames="mode", static_argnums=1)
    def g(x, n, mode):
        return n * jaxconv.conv2d(x, W, stride=2 if mode == "half" else 1)

    for h in (g, jaxconv.accelerate(g)):
        assert jaxconv.cost(h)(X, 2, mode="all")["flops"] > 3 * jaxconv.cost(h)(X, 2, mode="half")["flops"]
        assert "s2" in str(jaxconv.explain(h)(X, 2, mode="half")[0].problem)
        assert jaxconv.launches(h)(X, 2, mode="half").total


def test_explain_keeps_nothing():
    """In a program that accelerates nothing: what accelerated functions find asks for traces that JAX keeps."""
    done = python("-c", textwrap.dedent(EXPLAINED))
    assert done.stdout.split() == ["more", "0", "1"], done.stdout + done.stderr


@pytest.mark.parametrize(("given", "says"), [("abc", "got str$"), (b"abc", "got bytes; jax.export.deserialize makes")])
@pytest.mark.parametrize("name", ["check_exported", "portable_exported"])
def test_what_takes_an_exported_program_says_so(name, given, says):
    with pytest.raises(TypeError, match=f"{name}: expected a jax.export.Exported, {says}"):
        getattr(jaxconv, name)(given)


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


# ----------------------------------------------------------------------------------------------------------------------
# What the build refuses


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        ("90", "has 90, expected 90a: Hopper's tensor cores need the a"),
        ("80;90-real", "has 90-real, expected 90a"),
        ("native", "has native, expected compute capabilities as in 80;90a-real"),
        ("8.0", "has 8.0, expected compute capabilities"),
        ("sm_90a", "has sm_90a, expected compute capabilities"),
    ],
)
def test_the_build_says_which_architecture_it_cannot_have(architectures, expected, tmp_path):
    """Without the a, kernels for Hopper would be empty, and their results whatever the memory held."""
    folders = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=folders)
    if cmake is None:
        pytest.skip("cmake is not installed, which only a build needs")
    root = pathlib.Path(__file__).parent.parent
    asked = f"-DJAXCONV_CUDA_ARCHS={architectures}"
    run = subprocess.run([cmake, "-S", root, "-B", tmp_path, asked], capture_output=True, text=True, check=False)
    assert run.returncode
    assert expected in " ".join(run.stderr.split())


@pytest.mark.parametrize(
    ("asked", "gpu", "nvcc", "expected"),
    [
        (None, True, False, True),
        (None, True, True, False),
        (None, False, False, False),
        ("AUTO", True, False, True),
        ("ON", False, False, True),
        ("ON", True, True, False),
        ("OFF", True, False, False),
    ],
)
def test_the_build_fetches_nvcc_where_it_needs_one(asked, gpu, nvcc, expected, monkeypatch):
    pytest.importorskip("scikit_build_core")
    root = pathlib.Path(__file__).parent.parent
    monkeypatch.chdir(root)  # as pip calls a backend
    monkeypatch.syspath_prepend(root / ".ci")
    backend = importlib.import_module("backend")
    monkeypatch.setattr(backend, "has_gpu", lambda: gpu)
    monkeypatch.setattr(backend, "has_nvcc", lambda: nvcc)
    monkeypatch.delenv("JAXCONV_CUDA", raising=False)
    if asked is not None:
        monkeypatch.setenv("JAXCONV_CUDA", asked)
    for hook in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        assert any(line.startswith("nvidia-cuda-nvcc==13.0") for line in hook()) == expected
        assert any(line.startswith("nvidia-cuda-cccl") for line in hook()) == expected  # has nv/target
    assert not any("nvidia" in line for line in backend.get_requires_for_build_sdist())


def test_an_nvcc_is_looked_for_where_cmake_does(tmp_path, monkeypatch):
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / ".ci")
    backend = importlib.import_module("backend")
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path: which(name, path=path.replace("/usr/local/cuda/bin", "")))
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not backend.has_nvcc()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert not backend.has_nvcc()
    (tmp_path / "home" / "bin").mkdir(parents=True)
    (tmp_path / "home" / "bin" / "nvcc").touch(mode=0o755)
    assert backend.has_nvcc()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("CUDACXX", "/somewhere/nvcc")
    assert backend.has_nvcc()
