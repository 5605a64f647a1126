"""jax.export, the compilation cache, cost, and everything else a JAX function may meet besides a mesh."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM, calls, same_bits
from jax import export
from jax.experimental import checkify

import jaxconv
from jaxconv._core import primitives
from jaxconv._tools import export as _export


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(helpers.normal(seed, shape), jnp.float32)


X, W, B = normal(0, 2, 6, 6, 4), 0.2 * normal(1, 3, 3, 4, 4), normal(2, 4)
ARGS = (X, W, B)
conv = functools.partial(jaxconv.conv2d, implementation="native")


def model(x: Any, w: Any, b: Any, implementation: str | None = "native") -> Any:
    """Every kernel in one function."""
    x = jaxconv.conv2d(x, w, b, activation="gelu", implementation=implementation)
    zeros, ones = jnp.zeros_like(b), jnp.ones_like(b)
    x, mean, var = jaxconv.batchnorm(
        x, ones, b, zeros, ones, training=True, activation="relu", implementation=implementation
    )
    x, _, _ = jaxconv.batchnorm(x, ones, b, mean, var, training=False, implementation=implementation)
    return jaxconv.dense(x, w[0, 0], b, activation="tanh", implementation=implementation)


def loss(*args: Any, **options: Any) -> Any:
    return jnp.sum(model(*args, **options) ** 2)


def assert_close(a: Any, b: Any) -> None:
    """The same kernels on the same numbers; the elementwise steps between them may be contracted otherwise."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=50 * 2.0**-23 * max(float(jnp.abs(y).max(initial=0)), 1.0))


# ----------------------------------------------------------------------------------------------------------------------
# Export


@pytest.mark.promise
def test_export_with_gradients():
    exported = export.export(jax.jit(model), disabled_checks=jaxconv.export_checks())(*ARGS)
    loaded = jaxconv.check_exported(export.deserialize(exported.serialize(vjp_order=1)))
    assert_close(loaded.call(*ARGS), model(*ARGS))
    gradients = jax.grad(lambda *args: jnp.sum(loaded.call(*args) ** 2), (0, 1, 2))(*ARGS)
    assert_close(gradients, jax.grad(loss, (0, 1, 2))(*ARGS))


def test_a_portable_program_is_the_same_in_older_words():
    """tests/matrix.py loads it with other versions of JAX."""
    exported = export.export(jax.jit(model), disabled_checks=jaxconv.export_checks())(*ARGS)
    portable = jaxconv.portable_exported(exported)
    for program in (portable, portable.vjp()):
        version = re.search(rb"StableHLO_v(\d+)\.(\d+)\.(\d+)", program.mlir_module_serialized)
        assert version and tuple(map(int, version.groups())) <= (1, 16, 0)
    loaded = jaxconv.check_exported(export.deserialize(portable.serialize(vjp_order=2)))
    assert same_bits(loaded.call(*ARGS), exported.call(*ARGS))
    gradients = [jax.grad(lambda *args, f=f: jnp.sum(f.call(*args) ** 2), (0, 1, 2))(*ARGS) for f in (loaded, exported)]
    assert same_bits(*gradients)
    assert jaxconv.portable_exported(loaded).mlir_module_serialized == portable.mlir_module_serialized
    # Without gradients: as it was made
    bare = export.deserialize(exported.serialize())
    assert jaxconv.portable_exported(bare)._get_vjp is None


def test_a_program_that_older_words_cannot_say_is_refused(monkeypatch):
    exported = export.export(jax.jit(model), disabled_checks=jaxconv.export_checks())(*ARGS)
    monkeypatch.setattr(_export, "OLDEST_STABLEHLO", "0.1.0")
    with pytest.raises(ValueError, match=r"portable_exported: 'model' cannot be written in StableHLO 0\.1\.0: "):
        jaxconv.portable_exported(exported)


def test_export_needs_the_checks_and_they_are_complete():
    with pytest.raises(ValueError, match="jaxconv_conv_v2"):
        export.export(jax.jit(model))(*ARGS)
    assert len(jaxconv.export_checks()) == len({made.target for made in primitives.KERNELS.values()}) + 1


def test_export_with_symbolic_batch():
    """XLA's own convolutions, which on a GPU round float32 as XLA's library of the day does unless told otherwise."""
    f = jax.default_matmul_precision("highest")(functools.partial(model, implementation=None))
    (n,) = export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((n, *X.shape[1:]), X.dtype), W, B
    exported = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(*shapes)
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    for batch in (1, 3):
        args = normal(batch, batch, *X.shape[1:]), W, B
        assert_close(loaded.call(*args), f(*args))
        gradients = jax.grad(lambda *a: jnp.sum(loaded.call(*a) ** 2), (0, 1))(*args)
        assert_close(gradients, jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1))(*args))


def test_native_code_needs_a_batch_that_is_a_number():
    (n,) = export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((n, *X.shape[1:]), X.dtype)
    with pytest.raises(ValueError, match="conv2d: implementation='native' cannot run: the batch extent is symbolic"):
        export.export(jax.jit(conv))(shape, W)


def test_export_for_platforms_that_are_not_here():
    f = functools.partial(model, implementation=None)
    platforms = ("cpu", "cuda", "tpu")
    exported = export.export(jax.jit(f), platforms=platforms, disabled_checks=jaxconv.export_checks())(*ARGS)
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    assert loaded.platforms == platforms
    assert_close(loaded.call(*ARGS), f(*ARGS))


def test_program_of_another_version():
    """An old or a newer program is refused with its reason, not by XLA when it compiles."""
    call = jax.ffi.ffi_call("jaxconv_conv_v999", jax.ShapeDtypeStruct(X.shape, X.dtype))
    checks = [export.DisabledSafetyCheck.custom_call("jaxconv_conv_v999")]
    platform = {"cuda": "cuda"}.get(PLATFORM, "cpu")
    exported = export.export(jax.jit(call), platforms=(platform,), disabled_checks=checks)(X)
    with pytest.raises(ValueError, match="jaxconv_conv_v999, which this jaxconv does not have: another version"):
        jaxconv.check_exported(export.deserialize(exported.serialize()))


def test_names_of_files_and_functions_are_no_calls(tmp_path):
    """The text of an exported program holds them: a user's own may look like a target of ours."""
    folder = tmp_path / "a jaxconv_conv_v998 folder"
    folder.mkdir()
    file = folder / "jaxconv_conv_v999.py"
    file.write_text("def jaxconv_conv_v997(f, x, w):\n    return f(x, w) + 1\n")
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    f = functools.partial(scope["jaxconv_conv_v997"], conv)
    exported = export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(X, W)
    text = exported.mlir_module()
    assert str(file) in text and "jaxconv_conv_v997" in text
    loaded = jaxconv.check_exported(export.deserialize(exported.serialize()))
    assert same_bits(loaded.call(X, W), f(X, W))


# ----------------------------------------------------------------------------------------------------------------------
# Compiling once


CACHED = """
    import os, sys
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if sys.argv[2] == "mesh":
        jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    import jax.numpy as jnp
    import jaxconv
    events = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
    x, w = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 4, 4))
    if sys.argv[2] == "mesh":
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    def run(activation):
        f = lambda x, w: jaxconv.conv2d(x, w, activation=activation, implementation="native")
        events.clear()
        y = jax.jit(f)(x, w)
        return sum("cache_hits" in e for e in events), float(y[0, 2, 2, 0])
    print("ran", *run("relu"), *run("tanh"))
"""


@pytest.mark.parametrize("devices", ["one", "mesh"])
def test_compilation_cache_hits_across_processes(devices, tmp_path):
    """On a mesh JAX asks for jax_remove_custom_partitioning_ptr_from_cache_key; problems stay apart with it too."""
    script = tmp_path / "cached.py"
    script.write_text(textwrap.dedent(CACHED))

    def run() -> list[float]:
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path / "cache"), devices],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [float(v) for v in done.stdout.split("ran")[1].split()]

    assert run() == [0, 36.0, 0, 1.0]
    assert run() == [1, 36.0, 1, 1.0]


# ----------------------------------------------------------------------------------------------------------------------
# Cost

CONV_FLOPS = 2 * X.size // 4 * 4 * 4 * 9  # 2 N P Q K C R S
CONV_BYTES = 4 * (X.size + W.size + X.size)


def test_cost_of_one_call():
    found = jaxconv.cost(conv)(X, W)
    assert set(found) == {"flops", "bytes accessed"}
    assert 0 <= found["flops"] - CONV_FLOPS <= 1 and 0 <= found["bytes accessed"] - CONV_BYTES <= 1
    # That is where XLA says -1 when the call is native, and the same whatever implements it.
    of_xla = jax.jit(conv).lower(X, W).cost_analysis()
    assert of_xla is None or of_xla["flops"] == -1  # a GPU has none before it compiles
    # (On a GPU XLA itself counts one more for what runs around the call.)
    assert 0 <= jaxconv.cost(functools.partial(conv, implementation="xla"))(X, W)["flops"] - CONV_FLOPS <= 1


def test_cost_of_a_training_step():
    def value(x: Any, w: Any) -> Any:
        return jnp.sum(conv(x, w))

    found = jaxconv.cost(jax.grad(value, (0, 1)))(X, W)
    # fprop, dgrad, wgrad, and what XLA counts for the sum and its cotangent.
    assert 3 * CONV_FLOPS <= found["flops"] <= 3 * CONV_FLOPS + 2 * X.size


def test_calls_of_forward_mode_are_seen():
    def tangent(x: Any, w: Any) -> Any:
        return jax.jvp(functools.partial(conv, activation="tanh"), (x, w), (x, w))

    assert jaxconv.cost(tangent)(X, W)["flops"] >= 3 * CONV_FLOPS
    assert {call.op: call.count for call in jaxconv.explain(tangent)(X, W)} == {"conv": 1, "conv_fprop": 2}


def test_cost_of_loops_and_branches():
    ws = jnp.stack([W] * 5)
    scanned = jaxconv.cost(lambda x, ws: jax.lax.scan(lambda h, w: (conv(h, w), None), x, ws)[0])(X, ws)
    assert 5 * CONV_FLOPS <= scanned["flops"] <= 5 * CONV_FLOPS + 100  # and a counter's additions
    branched = jaxconv.cost(lambda x, w, i: jax.lax.cond(i > 0, conv, lambda x, w: conv(conv(x, w), w), x, w))(X, W, 1)
    assert 2 * CONV_FLOPS <= branched["flops"] <= 2 * CONV_FLOPS + 100


# ----------------------------------------------------------------------------------------------------------------------
# Control flow, debugging, donation


def test_scan():
    ws = jnp.stack([W, 2 * W, -W])

    def scanned(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (conv(h, w, activation="tanh"), None), x, ws)[0]

    def unrolled(x: Any, ws: Any) -> Any:
        for w in ws:
            x = conv(x, w, activation="tanh")
        return x

    assert calls(scanned, X, ws) == {"conv": 1}
    both = [jax.value_and_grad(lambda *a, f=f: f(*a).sum(), (0, 1))(X, ws) for f in (scanned, unrolled)]
    assert_close(*both)


def test_while_and_cond():
    def body(state: Any) -> Any:
        i, x = state
        x = jax.lax.cond(i % 2 == 0, lambda x: conv(x, W, activation="tanh"), lambda x: conv(x, -W), x)
        return i + 1, x

    looped = jax.jit(lambda x: jax.lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1])(X)
    assert_close(looped, conv(conv(conv(X, W, activation="tanh"), -W), W, activation="tanh"))
    # fori_loop with a static trip count is a scan, and differentiable in reverse.
    step = jax.grad(lambda x: jax.lax.fori_loop(0, 3, lambda i, h: body((i, h))[1], x).sum())
    direct = jax.grad(lambda x: conv(conv(conv(x, W, activation="tanh"), -W), W, activation="tanh").sum())
    assert_close(step(X), direct(X))


def test_custom_vjp_around():
    @jax.custom_vjp
    def f(x: Any, w: Any) -> Any:
        return conv(x, w)

    f.defvjp(lambda x, w: jax.vjp(conv, x, w), lambda pull, ct: tuple(2 * g for g in pull(ct)))
    doubled = jax.grad(lambda *a: f(*a).sum(), (0, 1))(X, W)
    assert same_bits(doubled, jax.tree.map(lambda g: 2 * g, jax.grad(lambda *a: conv(*a).sum(), (0, 1))(X, W)))


def test_hessian_of_a_model():
    """Forward over reverse, through every kernel."""
    b = 0.1 * B
    hessian, reference = (
        jax.jit(jax.hessian(functools.partial(loss, X, W, implementation=i)))(b) for i in ("native", "xla")
    )
    # Second derivatives of sums of 288 float32 terms near 1: 288 roundings, a few times over.
    np.testing.assert_allclose(hessian, reference, atol=8 * 288 * 2.0**-23 * float(jnp.abs(reference).max()))


def test_debug_nans_names_the_op():
    bad = X.at[0, 0, 0, 0].set(jnp.nan)
    with jax.debug_nans(True):
        conv(X, W)
        for f in (conv, jax.jit(conv)):
            with pytest.raises(FloatingPointError, match="jaxconv_conv"):
                f(bad, W)


def test_checkify_around():
    def f(x: Any) -> Any:
        checkify.check(jnp.all(x > -100), "x is out of range")
        return conv(x, W, activation="relu").sum()

    checked = jax.jit(checkify.checkify(jax.value_and_grad(f)))
    error, result = checked(X)
    error.throw()
    assert_close(result, jax.value_and_grad(lambda x: conv(x, W, activation="relu").sum())(X))
    with pytest.raises(checkify.JaxRuntimeError, match="x is out of range"):
        checked(X - 1000)[0].throw()


def test_donation():
    """A donated input's memory is reused, and the result is right although a kernel read from it."""
    step = jax.jit(lambda x, w: conv(x, w, activation="relu"), donate_argnums=0)
    x = X + 0
    expected = conv(X, W, activation="relu")
    y = step(x, W)
    assert same_bits(y, expected)
    assert x.is_deleted()


@pytest.mark.usefixtures("full_locations")
def test_named_scopes_and_the_callers_line():
    """Profiles show the user's scope, our op's name and the line of the call, not ours."""

    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("stem"):
            return conv(x, w)

    text = jax.jit(f).lower(X, W).compile().as_text()
    (line,) = [line for line in text.splitlines() if 'custom_call_target="jaxconv_conv_fprop' in line]
    assert "stem/jaxconv_conv_fprop" in line
    assert os.path.dirname(jaxconv.__file__) + os.sep + "primitives.py" not in text


def test_a_program_of_the_first_wire_version_is_refused_with_what_to_do():
    old = jax.ffi.ffi_call("jaxconv_conv_v1", jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(Exception, match=r"exported with an older jaxconv.*export it again"):
        jax.block_until_ready(jax.jit(lambda x: old(x, plan={"algorithm": "direct"}))(jnp.ones(2)))


@pytest.mark.parametrize("platforms", [("cpu", "tpu"), ("cuda", "cpu", "tpu"), ("tpu", "rocm")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_for_several_platforms_in_one_program(platforms, dtype):
    """A depthwise layer, which a CPU gives to native code, in front of a norm and a dense layer."""
    x, w = helpers.integers(0, (2, 16, 16, 32)), helpers.integers(1, (3, 3, 1, 32))

    def loss(x, w):
        y = jaxconv.conv2d(x, w, groups=32, activation="relu")
        y = jaxconv.layernorm(y, jnp.ones(32, jnp.float32), jnp.zeros(32, jnp.float32))
        return jnp.sum(jaxconv.dense(y.reshape(-1, 32), jnp.ones((32, 8), dtype)).astype(jnp.float32))

    f, args = jax.grad(loss, (0, 1)), [jnp.asarray(a, dtype) for a in (x, w)]
    exported = export.export(jax.jit(f), platforms=platforms, disabled_checks=jaxconv.export_checks())(*args)
    assert ("jaxconv_conv" in exported.mlir_module()) == ("cpu" in platforms)
    if jax.default_backend() in platforms:
        for a, b in zip(exported.call(*args), jax.jit(f)(*args), strict=True):
            np.testing.assert_array_equal(a, b)
