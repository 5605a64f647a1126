"""The plan: an answer for every problem on every device, the same each time, and one that native code can carry out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, CONV_CASES, edge
from helpers import A100, DEVICE, H100, H200, PLATFORM, calls, label
from jax import lax

import jaxconv
from benchmarks.cases import select
from jaxconv import _plan
from jaxconv._core import native as _native
from jaxconv._core.activations import NAMES, Activation
from jaxconv._plan import Device, implicit_gemm, measured, plan, supports
from jaxconv._plan.plan import product_tile
from jaxconv._problem import (
    BATCHNORM_ALGORITHMS,
    CONV_ALGORITHMS,
    DENSE_ALGORITHMS,
    GROUPNORM_ALGORITHMS,
    SQUEEZE_EXCITE_ALGORITHMS,
    BatchNormProblem,
    ConvProblem,
    DenseProblem,
    GroupNormProblem,
    SqueezeExciteProblem,
)
from jaxconv._tools import explain

DEVICES = {
    "cpu": Device("cpu", "cpu"),
    "h200": H200,
    "a100": Device("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108),
    "rtx4090": Device("cuda", "NVIDIA GeForce RTX 4090", (8, 9), 128),
    "v100": Device("cuda", "Tesla V100", (7, 0), 80),
    "unknown_cuda": Device("cuda"),
    "tpu": Device("tpu", "TPU v5e"),
}
PAIR = (lax.Precision.DEFAULT,) * 2
CONV_OPS = ("conv", "conv_fprop", "conv_dgrad", "conv_wgrad")
DENSE_OPS = ("dense", "matmul")
GROUP_OPS = ("groupnorm", "groupnorm_backward")
SQUEEZE_OPS = ("squeeze_excite", "squeeze_excite_backward")
NORM_OPS = ("batchnorm_train", "batchnorm_infer", "batchnorm_backward", "batchnorm_dx", "batchnorm_moments")
ALGORITHMS = {**dict.fromkeys(CONV_OPS, CONV_ALGORITHMS), **dict.fromkeys(DENSE_OPS, DENSE_ALGORITHMS)}
ALGORITHMS |= {**dict.fromkeys(NORM_OPS, BATCHNORM_ALGORITHMS), **dict.fromkeys(GROUP_OPS, GROUPNORM_ALGORITHMS)}
ALGORITHMS |= dict.fromkeys(SQUEEZE_OPS, SQUEEZE_EXCITE_ALGORITHMS)
DTYPES = ("float32", "bfloat16", "float16", "float64")


pytestmark = pytest.mark.usefixtures("code_for_gpus")


def conv_problems(dtype: str, channels_last: bool) -> list[ConvProblem]:
    """Every case of the benchmarks in full size, and every boundary case of the tests."""
    made = []
    for case in select("conv"):
        if not case.transposed:
            out, window = case.out_spatial, case.filter
            made.append(
                ConvProblem(
                    "conv", dtype, case.batch, case.in_channels, case.out_channels, case.groups, case.spatial, window,
                    out, case.stride, case.padding, case.dilation, channels_last, PAIR,
                )
            )  # fmt: skip
    return made + [dataclasses.replace(case.problem(dtype), channels_last=channels_last) for case in CONV_CASES]


def problems() -> list[tuple[str, object]]:
    made: list[tuple[str, object]] = []
    for dtype in DTYPES:
        for last in (True, False):
            made += itertools.product(CONV_OPS, conv_problems(dtype, last))
            for case in select("batchnorm"):
                axis = 3 if last else 1
                shape = case.x_shape(last)
                norm = BatchNormProblem("batchnorm", dtype, shape, axis, True, 0.9, 1e-5, Activation("relu"))
                made += itertools.product(NORM_OPS, [norm, dataclasses.replace(norm, batch=3)])
        for shape, groups in (((64, 64, 64, 128), 32), ((2, 9, 7, 6), 3), ((8, 1000, 320), 32), ((5, 2048), 1)):
            group = GroupNormProblem("groupnorm", dtype, shape, groups, 1e-5, Activation("silu"))
            bare = dataclasses.replace(group, activation=Activation())
            made += itertools.product(GROUP_OPS, [group, bare, dataclasses.replace(group, batch=3)])
        for shape, hidden in (((256, 56, 56, 96), 4), ((1, 7, 7, 1152), 48), ((3, 5, 7), 2), ((8, 28, 28, 512), 3000)):
            squeeze = SqueezeExciteProblem("squeeze_excite", dtype, shape, hidden, Activation("silu"), "sigmoid")
            made += itertools.product(SQUEEZE_OPS, [squeeze, dataclasses.replace(squeeze, save=True, want_dx=False)])
        for case in select("dense"):
            product = DenseProblem("dense", dtype, case.m, case.k, case.n, PAIR, bias="column")
            many = dataclasses.replace(product, batch=4, batched=("x",), trans_w=True)
            made += itertools.product(DENSE_OPS, [product, many, dataclasses.replace(product, m=1)])
    return made


# The devices that differ in what a plan asks of them. The others, of which the plan knows as little, cost as much.
OVER_DEVICES = pytest.mark.parametrize(
    "device", [pytest.param(d, marks=[] if d in ("cpu", "h200") else pytest.mark.slow) for d in DEVICES]
)


@OVER_DEVICES
def test_every_problem_has_a_plan_with_a_reason_and_the_same_one_each_time(device):
    for i, (op, problem) in enumerate(problems()):
        first = plan(op, problem, DEVICES[device])
        if i % 3 == 0:  # each op and dtype has its turn
            assert first == plan(op, problem, DEVICES[device])
        assert first.implementation in ("native", "xla")
        assert first.reason
        if first.implementation == "native":
            assert first.algorithm in ALGORITHMS[op]
            assert supports(op, first.algorithm, problem, DEVICES[device]) is None
        else:
            assert first.algorithm == "" and first.workspace_bytes == 0


@OVER_DEVICES
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_forced_implementation_is_carried_out_or_refused_with_the_reason(implementation, device):
    for op, problem in problems():
        forced = dataclasses.replace(problem, implementation=implementation)
        try:
            made = plan(op, forced, DEVICES[device])
        except ValueError as error:
            assert implementation == "native"
            assert re.match(rf"{problem.name}: implementation='native' cannot run.*: .+", str(error))
            # An excitation has one kernel, which does not take all.
            why = supports(op, "one_pass", problem, DEVICES[device]) if op in SQUEEZE_OPS else None
            if why is not None and why in str(error):
                continue
            unfit = DEVICES[device].platform == "tpu" or device == "v100" or problem.dtype == "float64"
            assert unfit and device != "cpu"
            continue
        if made.implementation == implementation:
            assert implementation == "xla" or supports(op, made.algorithm, forced, DEVICES[device]) is None
        else:
            assert problem.batch == 0 and made.reason == "there is nothing to compute"


@OVER_DEVICES
def test_a_forced_algorithm_is_the_one_planned_or_is_refused_with_the_reason(device):
    refused = set()
    for op, problem in problems():
        for algorithm in ALGORITHMS[op]:
            forced = dataclasses.replace(problem, algorithm=algorithm)
            reason = supports(op, algorithm, problem, DEVICES[device])
            try:
                made = plan(op, forced, DEVICES[device])
            except ValueError as error:
                assert re.match(rf"{problem.name}: algorithm='{algorithm}' cannot run", str(error))
                if device in ("cpu", "h200", "a100", "rtx4090") and not (
                    problem.dtype == "float64" and device != "cpu"
                ):
                    assert reason and reason in str(error)
                    refused.add(algorithm)
                continue
            if made.implementation == "xla":
                assert problem.batch == 0
                continue
            assert made.algorithm == algorithm and reason is None
    if device in ("cpu", "h200"):
        assert "depthwise" in refused  # the check above was not empty


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "none"])
def test_both_passes_of_a_batchnorm_make_one_choice(activation, dtype):
    """Half native is slower than either: what XLA would have fused into its own backward pass is written out."""
    extents = ((256, 7, 7, 2048), (256, 56, 56, 256), (256, 112, 112, 64), (32, 28, 28, 64))
    for shape, residual in itertools.product(extents, (False, True)):
        problem = BatchNormProblem("batchnorm", dtype, shape, 3, True, 0.9, 1e-5, Activation(activation), residual)
        train, backward = (plan(f"batchnorm_{op}", problem, H200) for op in ("train", "backward"))
        assert (train.implementation, train.algorithm) == (backward.implementation, backward.algorithm)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_accumulator_of_a_weight_gradient_is_kept_for_long(dtype):
    """Tensor cores cut sums off: of few outputs and many pixels more parts are made than fill the device."""
    longest = implicit_gemm.LONGEST[dtype]
    for images in (1, longest // 49 - 1, longest // 49 + 1, 20 * longest // 49):
        p = ConvProblem(
            "conv", dtype, images, 64, 64, 64, (7, 7), (3, 3), (7, 7), (1, 1), ((1, 1),) * 2, (1, 1), True, PAIR
        )
        for made in implicit_gemm.wants("conv_wgrad", p, H200):
            assert made.splits * longest >= images * 49
            assert made.splits * 9 * 64 * 4 <= implicit_gemm.FOR_THAT_BYTES


@pytest.mark.parametrize("implementation", [None, "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_walk_of_a_batchnorm_alone_is_native_where_the_whole_is_and_by_two_read(dtype, implementation):
    """Statistics, backward's sums, and dx by sums that are given, of dz too: a team has nothing to keep."""
    walks = (
        ("moments", {}),
        ("backward", {"want_dx": False}),
        ("dx", {"count": 10**7}),
        ("dx", {"count": 10**7, "dz": True}),
    )
    whole = collections.Counter()
    for shape, activation in itertools.product(((256, 7, 7, 2048), (256, 56, 56, 256), (5, 7, 7, 3)), ("relu", "none")):
        problem = BatchNormProblem(
            "batchnorm", dtype, shape, 3, True, 0.9, 1e-5, Activation(activation), activation == "relu",
            implementation=implementation,
        )  # fmt: skip
        both = {op: plan(f"batchnorm_{op}", problem, H200) for op in ("train", "backward")}
        whole[both["backward"].algorithm] += 1
        for op, change in walks:
            found = both["train" if op == "moments" else "backward"]
            made = plan(f"batchnorm_{op}", dataclasses.replace(problem, **change), H200)
            assert made.implementation == found.implementation
            assert made.algorithm == ("two_read" if found.implementation == "native" else "")
            assert found.reason in made.reason
            cpu = plan(f"batchnorm_{op}", dataclasses.replace(problem, **change), DEVICES["cpu"])
            assert cpu.implementation == (implementation or "xla")
    assert whole["resident_team"] and len(whole) > 1  # both choices of a whole were seen
    forced = dataclasses.replace(problem, implementation=None, want_dx=False, algorithm="resident_block")
    assert plan("batchnorm_backward", forced, H200).algorithm == "resident_block"


def test_the_input_gradient_of_patches_is_a_product_in_memory():
    vit = next(p for p in conv_problems("bfloat16", True) if p.filter == (16, 16) and p.in_channels == 3)
    stem = dataclasses.replace(vit, implementation="native", algorithm="stem")
    made = plan("conv_dgrad", stem, H200)
    assert (made.algorithm, made.tile) == ("stem", "128x128")
    assert made.workspace_bytes == math.prod(vit.x_shape) * 2
    padded = {"padding": ((1, 1), (0, 0)), "in_spatial": (222, 224)}
    for change in (padded, {"dtype": "float32"}, {"in_spatial": (225, 224)}):
        with pytest.raises(ValueError, match="strides times channels of at most 64"):
            plan("conv_dgrad", dataclasses.replace(stem, **change), H200)


def test_workspaces_fit_into_the_gpu_beside_the_arrays():
    """256 MiB of columns or partial sums and as much again for alignment and packed filters; one image's columns of the
    largest case are more than that."""
    for op, problem in problems():
        for algorithm in ALGORITHMS[op]:
            if problem.dtype == "float64" or supports(op, algorithm, problem, H200):
                continue
            made = plan(op, dataclasses.replace(problem, algorithm=algorithm), H200)
            if made.kernel == "im2col" and made.chunk == 1:  # an image's columns are not cut: a volume's are 54 GiB
                continue
            assert 0 <= made.workspace_bytes <= 4 * 2**30, (op, str(problem), made)
            assert made.splits >= 1 and made.chunk >= 0


def test_the_cpu_owns_its_scratch():
    for op, problem in problems():
        assert plan(op, problem, DEVICES["cpu"]).workspace_bytes == 0


def cpu_choice(
    op: str, dtype: str, c: int, k: int, filter: tuple[int, int] = (3, 3), groups: int = 1, large: bool = False
) -> tuple[str, str]:
    case = edge("made", 8 if large else 2, (56, 56) if large else (6, 5), c, k, filter, "for a rule", groups=groups)
    made = plan(op, case.problem(dtype), DEVICES["cpu"])
    return made.kernel or made.implementation, made.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_depthwise_and_grouped_convolutions_are_native_in_every_type(dtype):
    for op in CONV_OPS:
        kernel, reason = cpu_choice(op, dtype, 16, 16, groups=16)
        assert kernel == "depthwise" and "10 times slower" in reason
        kernel, reason = cpu_choice(op, dtype, 16, 16, groups=4)
        assert kernel == "im2col" and "XLA's grouped convolutions are" in reason
        of_two = cpu_choice(op, dtype, 16, 16, groups=2)[0]
        assert of_two == ("xla" if dtype in ("bfloat16", "float16") and op != "conv_wgrad" else "im2col")
    assert cpu_choice("conv_fprop", dtype, 16, 16) == (
        "xla",
        "XLA's convolutions without groups are as fast as the CPU allows",
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_weight_gradients_are_native_where_the_product_was_faster(dtype):
    """Of large images, few taps and, in 16 bits, which are converted, few channels; of one tap and many pixels."""
    narrow = dtype in ("bfloat16", "float16")
    for c, k, filter, native in (
        (31, 31, (3, 3), True),
        (32, 8, (3, 3), not narrow),
        (8, 32, (3, 3), not narrow),
        (64, 64, (1, 1), True),
        (8, 8, (5, 5), False),
    ):
        kernel, reason = cpu_choice("conv_wgrad", dtype, c, k, filter, large=True)
        assert kernel == ("im2col" if native else "xla"), (c, k, filter)
        assert ("so it may lose" in reason) == (kernel == "xla") and "times XLA's speed" in reason
        kernel, reason = cpu_choice("conv_wgrad", dtype, c, k, filter)
        assert kernel == "xla" and "so it may lose" in reason, (c, k, filter)


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_weight_gradients_of_volumes_are_native(dtype):
    """Small or large: XLA's code for three axes is a plain loop."""
    for size, filter in ((4, (3, 3, 3)), (12, (1, 1, 1))):
        case = edge("made", 1, (size,) * 3, 4, 8, filter, "for a rule")
        made = plan("conv_wgrad", case.problem(dtype), DEVICES["cpu"])
        assert made.kernel == "im2col" and "XLA's speed" in made.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_a_depthwise_filter_of_one_tap_is_xlas(dtype):
    for op in CONV_OPS:
        kernel, reason = cpu_choice(op, dtype, 16, 16, (1, 1), groups=16)
        assert kernel == "xla" and "an elementwise product" in reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_no_exponentials_are_computed_behind_a_convolution(dtype):
    """Exponentials are XLA's, behind native code and behind its own convolutions."""
    for groups in (16, 4, 1):
        problem = edge("made", 2, (6, 5), 16, 16, (3, 3), "for a rule", groups=groups).problem(dtype)
        for name in NAMES[1:]:
            slope = {"slope": 0.1} if name == "leaky_relu" else {}
            behind = dataclasses.replace(problem, bias=True, activation=Activation(name, **slope))
            made = plan("conv", behind, DEVICES["cpu"])
            cheap = name in ("relu", "relu6", "leaky_relu", "hard_swish")
            assert made.implementation == ("xla" if groups == 1 else "native" if cheap else "calls"), (groups, name)
            assert (f"XLA's {name} is" in made.reason) == (made.implementation == "calls")
            forced = dataclasses.replace(behind, implementation="native")
            assert plan("conv", forced, DEVICES["cpu"]).implementation == "native"
            added = plan("conv_add", behind, DEVICES["cpu"])
            assert added.implementation == ("native" if groups > 1 and cheap else "calls"), (groups, name)


@pytest.mark.skipif(PLATFORM != "cpu", reason="a rule for CPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_on_a_cpu_an_activation_behind_native_code_is_the_formula(dtype):
    """Two calls give what the one call gives, z too; in 16 bits neither rounds before the end."""
    with jax.enable_x64(dtype == "float64"):
        x, w, b = (
            jax.random.normal(jax.random.key(i), s).astype(dtype)
            for i, s in enumerate(((2, 6, 5, 8), (3, 3, 1, 8), (8,)))
        )

        def run(implementation, x, w, b):
            options = dict(groups=8, activation="silu", return_preactivation=True, implementation=implementation)
            return jaxconv.conv2d(x, w, b, **options)

        two, one = (jax.jit(functools.partial(run, i)) for i in (None, "native"))
        assert calls(functools.partial(run, None), x, w, b) == {"conv_fprop": 1}
        assert calls(functools.partial(run, "native"), x, w, b) == {"conv": 1}
        for ours, native in zip(two(x, w, b), one(x, w, b), strict=True):
            assert ours.dtype == dtype
            rtol = {"float32": 1e-5, "bfloat16": 1e-2, "float64": 1e-12}[dtype]
            np.testing.assert_allclose(np.float64(ours), np.float64(native), rtol=rtol, atol=rtol)


@pytest.mark.skipif(PLATFORM != "cpu", reason="a rule for CPUs")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_cpu_16_bit_gradients_run_natively_and_are_right(dtype):
    """Through float32, and exact where XLA's are: sums of integers."""
    x, w = jnp.ones((2, 6, 6, 8), dtype), jnp.ones((3, 3, 1, 8), dtype)

    def gradients(implementation, x, w):
        conv = functools.partial(jaxconv.conv2d, groups=8, implementation=implementation)
        y, pull = jax.vjp(conv, x, w)
        return y, *pull(y)

    ours, theirs = (jax.jit(functools.partial(gradients, i)) for i in (None, "xla"))
    assert calls(functools.partial(gradients, None), x, w) == {"conv_fprop": 1, "conv_dgrad": 1, "conv_wgrad": 1}
    for a, b in zip(ours(x, w), theirs(x, w), strict=True):
        assert a.dtype == b.dtype == dtype and (a == b).all()


def test_float64_on_cuda_goes_to_xla_and_cannot_be_forced():
    for op, problem in problems():
        if problem.dtype != "float64":
            continue
        assert plan(op, problem, H200).implementation == "xla"
        if problem.batch != 0:
            with pytest.raises(ValueError, match="cannot run: float64 has no native CUDA kernels"):
                plan(op, dataclasses.replace(problem, implementation="native"), H200)


@pytest.mark.parametrize("device", ["tpu", "v100"])
def test_devices_without_kernels_get_xla(device):
    assert all(plan(op, problem, DEVICES[device]).implementation == "xla" for op, problem in problems())


def test_without_cuda_code_a_gpu_gets_xla_and_the_reason(monkeypatch):
    monkeypatch.setattr(_native, "cuda_missing", "jaxconv was built without CUDA: no nvcc was found")
    problem = CONV_CASES[1].problem()
    assert plan("conv_fprop", problem, H200).reason == "jaxconv was built without CUDA: no nvcc was found"
    with pytest.raises(ValueError, match="implementation='native' cannot run: jaxconv was built without CUDA"):
        plan("conv_fprop", dataclasses.replace(problem, implementation="native"), H200)


@pytest.mark.parametrize(
    ("value", "off"),
    [
        ("conv", {"conv", "conv_fprop", "conv_dgrad", "conv_wgrad"}),
        ("dense", {"dense", "matmul"}),
        ("batchnorm", set(NORM_OPS)),
        ("groupnorm", set(GROUP_OPS)),
        ("squeeze_excite", set(SQUEEZE_OPS)),
        ("conv_wgrad", {"conv_wgrad"}),
        (" dense , batchnorm", {"dense", "matmul", *NORM_OPS}),
        ("all", set(_plan.OPS)),
        ("", set()),
        ("convolution", set()),
    ],
)
def test_jaxconv_disable_sends_the_ops_it_names_to_xla(value, off, monkeypatch):
    monkeypatch.setenv("JAXCONV_DISABLE", value)
    for op, problem in problems():
        if problem.dtype == "float32" and problem.batch != 0:
            made = plan(op, dataclasses.replace(problem, implementation="native"), DEVICES["cpu"])
            assert (made.implementation == "xla") == (op in off)
            assert op not in off or made.reason == f"JAXCONV_DISABLE={value}"


def test_jaxconv_disable_reaches_the_compiled_program(monkeypatch):
    x, w = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2))
    assert calls(functools.partial(jaxconv.conv2d, implementation="native"), x, w)
    jax.clear_caches()
    monkeypatch.setenv("JAXCONV_DISABLE", "conv")
    assert not calls(functools.partial(jaxconv.conv2d, implementation="native"), x, w)


def test_attributes_of_a_plan_carry_all_of_it():
    made = _plan.Plan("native", "why", "im2col", "128x64", 4, 2, 512)
    assert made.attrs() == {"kernel": "im2col", "tile": "128x64", "splits": 4, "chunk": 2}
    assert str(made) == "native[im2col 128x64 splits=4]"
    assert str(_plan.Plan("xla", "why")) == "xla"


@pytest.mark.skipif(jax.device_count() < 3, reason="several devices: JAX_NUM_CPU_DEVICES=4")
@pytest.mark.parametrize("way", ("call", "pair", "enabled", "shard_map"))
def test_a_plan_is_made_for_the_device_that_the_program_is_lowered_for(way, monkeypatch):
    """A host may have GPUs of several kinds."""
    x, w, v = jnp.ones((3, 9, 9, 8)), jnp.ones((3, 3, 8, 8)), jnp.ones(8)
    numbers = jax.lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
    functions = {
        "call": lambda x: jaxconv.conv2d(x, w + 0 * x[0, 0, 0, 0]),
        "pair": lambda x: jaxconv.conv_batchnorm(x, w, v, v, v, v, training=True)[0],
        "enabled": lambda x: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers),
    }
    seen = []
    monkeypatch.setattr(Device, "of", lambda platform, device: seen.append(device) or Device.current(platform))
    jax.clear_caches()
    for device in (jax.devices()[2], jax.devices()[1]):
        seen.clear()
        if way == "shard_map":
            mesh = jax.sharding.Mesh(np.array([device]), ("a",))
            spec = jax.sharding.PartitionSpec()
            f = jax.shard_map(lambda x: jaxconv.conv2d(x, w), mesh=mesh, in_specs=spec, out_specs=spec)
        else:
            f = functions[way]
        with jaxconv.enabled(auto_meshes=True) if way == "enabled" else contextlib.nullcontext():
            jax.jit(f)(jax.device_put(x, device))
        assert seen and set(seen) == {device}


def test_devices_of_several_kinds(monkeypatch):
    monkeypatch.setattr(_native, "cuda", types.SimpleNamespace(architectures=lambda: ["80-virtual", "90a-real"]))
    Gpu = collections.namedtuple("Gpu", "device_kind compute_capability core_count")
    found = [Device.of("cuda", Gpu(*one)) for one in (("NVIDIA H200", "9.0", 132), ("NVIDIA A10", "8.6", 72))]
    assert found[0] == Device("cuda", "NVIDIA H200", (9, 0), 132) and found[1] == Device(
        "cuda", "NVIDIA A10", (8, 6), 72
    )
    assert Device.of("cuda", None) == Device.current("cuda") and Device.of("cpu", jax.devices("cpu")[0]).kind == "cpu"


def test_the_current_device_is_the_default_backends():
    assert Device.current(PLATFORM) == DEVICE
    assert Device.current("no such platform").compute_capability is None
    if PLATFORM == "cuda":
        assert DEVICE.kind == jax.devices()[0].device_kind
        assert DEVICE.compute_capability and DEVICE.sm_count > 0


def test_another_device_may_be_assumed():
    there = Device("cuda", "a GPU", (9, 0), 7)
    with Device.assumed(there):
        assert Device.default() is there is Device.current("cuda") is Device.of("cuda", None)
        assert Device.current("cpu").kind == "cpu"
        with Device.assumed(Device("cpu", "cpu")):
            assert Device.default().platform == "cpu" and Device.current("cuda") != there
    assert Device.default() == DEVICE


@pytest.mark.parametrize(
    ("case", "h200", "a100"),
    [
        ("depthwise_strips", "rows", "mma"),
        ("depthwise_x2_strips", "rows", "fma"),
        ("depthwise_x4", "rows", "fma"),
        ("depthwise_bands", "rows_mma", "mma"),
        ("depthwise_bands_wide", "rows_mma", "mma"),
        ("depthwise_images", "rows_mma", "mma"),
        ("depthwise_32", "rows_mma", "mma"),
        ("depthwise_x2", "fma", "fma"),
        ("depthwise_causal", "conv1d", "conv1d"),
        ("depthwise_causal_d3", "conv1d", "conv1d"),
        ("depthwise_column", "conv1d", "conv1d"),
        ("depthwise_d2", "fma", "fma"),
        ("depthwise_d2_rows", "rows", "fma"),
        ("depthwise_d2x5", "rows", "fma"),
        ("depthwise_d3", "rows", "fma"),
        ("depthwise_7x7_d3", "rows", "fma"),
        ("depthwise_5x5_d2", "rows", "mma"),
        ("depthwise_s2", "rows_strided", "fma"),
        ("depthwise_5x5_s2", "rows_strided", "fma"),
        ("depthwise_5x5_s2_images", "rows_strided", "fma"),
        ("depthwise_7x7_s2", "rows_strided", "fma"),
        ("depthwise_7x7_s2_wide", "rows_strided", "fma"),
    ],
)
def test_which_depthwise_kernel_a_shape_gets(case, h200, a100):
    for kernel, device in ((h200, H200), (a100, DEVICES["a100"])):
        problem = dataclasses.replace(BY_NAME[case].problem("bfloat16"), algorithm="depthwise")
        for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
            made = plan(op, problem, device)
            assert made.kernel == f"depthwise/{kernel}"
            assert op == "conv_wgrad" or made.splits == 1


@pytest.mark.parametrize(
    ("few", "many", "extent", "kernel"),
    [
        (24, 144, 56, "sm90/resident 64x256"),
        (32, 192, 28, "sm90/resident 64x256"),
        (96, 576, 14, "sm90/resident 64x256"),
        (128, 576, 14, "sm90/product 128x128"),  # its own products hide the epilogue
        (64, 128, 28, "sm90/product 128x128"),  # half of 256 columns would be nothing
    ],
)
def test_1x1_of_few_channels_keep_their_filter_where_its_last_tile_is_not_too_empty(few, many, extent, kernel):
    x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((256, extent, extent, few), (1, 1, few, many)))
    options = dict.fromkeys(("activation", "precision", "algorithm", "implementation"))
    options |= dict(stride=1, padding=0, dilation=1, groups=1, layout="NHWC", return_preactivation=False)
    problem = ConvProblem.infer("conv2d", 2, x, w, None, **options)
    back = dataclasses.replace(problem, in_channels=many, out_channels=few)
    for op, p in (("conv_fprop", problem), ("conv_dgrad", back)):
        made = plan(op, dataclasses.replace(p, algorithm="sm90"), H200)
        assert f"{made.kernel} {made.tile}" == kernel


def test_which_grouped_convolutions_of_16_bit_are_in_rows():
    for case, stride, kernel in (
        ("grouped_4", 1, "rows"),
        ("grouped_16", 1, "rows"),
        ("grouped_4_s2", 2, "rows"),
        ("grouped_8_s2_column", 2, "rows"),
        ("grouped_16_s2", 2, "rows"),
        ("grouped_32", 1, "mma"),
        ("grouped_16_s2", (2, 1), "mma"),
    ):
        strides = {"stride": (stride, stride) if isinstance(stride, int) else stride}
        for dtype in ("bfloat16", "float16"):
            problem = dataclasses.replace(BY_NAME[case].problem(dtype), algorithm="grouped", **strides)
            for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
                assert plan(op, problem, H200).kernel == f"grouped/{kernel}"
                assert plan(op, problem, DEVICES["a100"]).kernel == "grouped/mma"


def test_grouped_convolutions_of_float32_are_hoppers_3x3_of_few_channels():
    """By FMAs, of stride 1 and 2; a part of the weight gradient has a block for each 32 channels."""
    for case, h200 in (
        ("grouped_4", True),
        ("grouped_4_wide", True),
        ("grouped_16_s2", True),
        ("grouped_32", False),
    ):
        problem = dataclasses.replace(BY_NAME[case].problem("float32"), algorithm="grouped")
        for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
            assert "in float32 it needs" in supports(op, "grouped", problem, DEVICES["a100"])
            if h200:
                made = plan(op, problem, H200)
                assert (made.kernel, made.workspace_bytes > 0) == ("grouped/rows_float32", made.splits > 1)
            else:
                assert "in float32 it needs" in supports(op, "grouped", problem, H200)
    many = dataclasses.replace(problem, batch=128, in_spatial=(28, 28), out_spatial=(28, 28), groups=4)
    assert plan("conv_wgrad", many, H200).splits == 132 // 2


@pytest.mark.parametrize(
    ("extent", "c", "k", "filter", "stride", "kernel", "splits"),
    [
        (14, 256, 1024, 1, 1, "wgrad_pair 128x256", 64),
        (14, 1024, 256, 1, 1, "wgrad_pair 128x256", 64),
        (28, 128, 512, 1, 1, "wgrad_pair 128x256", 66),
        (28, 512, 128, 1, 1, "wgrad_pair 256x128", 66),
        (56, 64, 256, 1, 1, "wgrad_pair 64x256", 66),
        (56, 256, 64, 1, 1, "wgrad_pair 256x64", 66),
        (56, 256, 512, 1, 2, "wgrad_pair 256x256", 66),
        (56, 64, 64, 1, 1, "wgrad 256x64", 132),  # one tile of two would be empty
        (56, 24, 144, 1, 1, "wgrad 64x256", 132),
        (28, 512, 1024, 1, 2, "wgrad_swapped 256x128", 128),  # few parts
        (7, 512, 2048, 1, 1, "wgrad_swapped 256x128", 128),
        (14, 512, 512, 3, 2, "wgrad 128x256", 132),  # 72 tiles would leave half of the multiprocessors idle
        (71, 128, 256, 3, 2, "wgrad 128x256", 126),  # x and dy do not stay in the L2 cache
    ],
)
def test_which_tile_a_weight_gradient_on_hopper_gets(extent, c, k, filter, stride, kernel, splits):
    pad = filter // 2
    out = (extent + 2 * pad - filter) // stride + 1
    problem = ConvProblem(
        "conv", "bfloat16", 256, c, k, 1, (extent,) * 2, (filter,) * 2, (out,) * 2, (stride,) * 2, ((pad, pad),) * 2,
        (1, 1), True, PAIR, algorithm="sm90",
    )  # fmt: skip
    made = plan("conv_wgrad", problem, H200)
    assert (f"{made.kernel} {made.tile}", made.splits) == (f"sm90/{kernel}", splits)
    rows, columns = map(int, made.tile.split("x"))
    assert made.workspace_bytes == 2 * splits * rows * columns * 4


@pytest.mark.parametrize(
    ("size", "channels", "filters", "window", "kernel", "copied"),
    [
        (14, 256, 256, 3, "wgrad 128x128", True),
        (56, 64, 64, 3, "wgrad 128x64", True),
        (56, 64, 256, 1, "wgrad_terms_swapped 256x64", False),
        (56, 64, 64, 1, "wgrad_terms 256x64", False),
        (14, 256, 1024, 1, "wgrad_terms 256x128", False),
    ],
)
def test_weight_gradients_at_highest_make_terms_in_memory_where_operations_are_many(
    size, channels, filters, window, kernel, copied
):
    case = edge("highest", 256, (size, size), channels, filters, (window, window), "", padding=window // 2)
    problem = dataclasses.replace(case.problem("float32"), precision=(lax.Precision.HIGHEST,) * 2)
    problem = dataclasses.replace(problem, algorithm="sm90")
    made = plan("conv_wgrad", problem, H200)
    assert f"{made.kernel} {made.tile}" == f"sm90/{kernel}"
    partials = 2 * made.splits * math.prod(map(int, made.tile.split("x"))) * 4 if made.splits > 1 else 0
    elements = math.prod(problem.x_shape) + math.prod(problem.y_shape)
    assert made.workspace_bytes == partials + 6 * elements * copied
    made = plan("conv_fprop", problem, H200)
    assert (made.kernel, made.tile) == ("sm90/product", "128x64" if filters <= 64 else "128x128")
    assert made.workspace_bytes == 6 * math.prod(problem.w_shape)


# ----------------------------------------------------------------------------------------------------------------------
# explain and info


def test_explain_says_what_every_call_gets_and_why():
    x, w, v = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 1, 8)), jnp.ones(8)

    @jax.jit
    def f(x, w):
        for _ in range(2):  # equal calls are one row
            y = jaxconv.conv2d(x, w, groups=4, implementation="native")
        y = jaxconv.batchnorm(y, v, v, v, v, training=True, implementation="xla")[0]
        return jaxconv.dense(y, jnp.ones((8, 3)), implementation="native").sum()

    explained = jaxconv.explain(f)(x, w)
    assert [(call.op, call.count, call.plan.implementation) for call in explained] == [
        ("conv_fprop", 2, "native"),
        ("batchnorm_train", 1, "xla"),
        ("matmul", 1, "native"),
    ]
    text = str(explained)
    head, *rows = text.splitlines()
    assert head.split() == ["calls", "op", "problem", "plan", "workspace", "why"]
    assert "2x6x6 4->8 3x3 g4 float32 NHWC" in rows[0] and "native[depthwise" in rows[0]
    assert "implementation='xla' was asked for" in rows[1]
    assert "72x8x3 NN float32" in rows[2] and "native[gemm" in rows[2]


def test_explain_of_a_gradient_shows_the_backward_calls():
    x, w = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 4, 8))
    loss = functools.partial(jaxconv.conv2d, activation="relu", implementation="native")
    explained = jaxconv.explain(jax.grad(lambda x, w: loss(x, w).sum(), (0, 1)))(x, w)
    assert {call.op for call in explained} == {"conv", "conv_dgrad", "conv_wgrad"}


@pytest.mark.parametrize("implementation", [None, "native", "xla"], ids=label)
def test_explain_agrees_with_the_compiled_program(implementation):
    x, w = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 1, 8))

    def f(x, w):
        loss = functools.partial(jaxconv.conv2d, groups=4, implementation=implementation)
        return jax.grad(lambda x, w: loss(x, w).sum(), (0, 1))(x, w)

    native = {call.op: call.count for call in jaxconv.explain(f)(x, w) if call.plan.implementation == "native"}
    compiled = calls(f, x, w)
    assert {op: native[op] for op in native if op != "conv_fprop"} == compiled  # y itself is unused and removed


def test_explain_runs_and_compiles_nothing_and_raises_as_the_call_would():
    x, w = jax.ShapeDtypeStruct((256, 224, 224, 3), "float32"), jax.ShapeDtypeStruct((7, 7, 3, 64), "float32")
    (call,) = jaxconv.explain(functools.partial(jaxconv.conv2d, stride=2))(x, w)
    assert call.problem.out_spatial == (112, 112)
    with pytest.raises(ValueError, match="algorithm='depthwise' cannot run"):
        jaxconv.explain(functools.partial(jaxconv.conv2d, algorithm="depthwise"))(x, w)
    assert str(jaxconv.explain(jnp.sin)(1.0)) == "no jaxconv calls"


def test_a_product_of_elements_is_xlas_on_a_gpu():
    """Which fuses it with its neighbours; alone ours took twice as long."""
    base = BY_NAME["depthwise_32"].problem("bfloat16")
    base = dataclasses.replace(base, batch=64, filter=(1, 1), padding=((0, 0),) * 2)
    base = dataclasses.replace(base, out_spatial=base.in_spatial)
    for op in ("conv", "conv_fprop", "conv_dgrad"):
        for device in (H100, A100):
            plan = _plan.plan(op, base, device)
            assert plan.implementation == "xla" and "elementwise product" in plan.reason
        forced = dataclasses.replace(base, implementation="native")
        assert _plan.plan(op, forced, H100).kernel.startswith("depthwise/")
    assert "elementwise" not in _plan.plan("conv_wgrad", base, H100).reason


@pytest.mark.parametrize("short", ["", "xla", "kernel"])
def test_how_far_a_measurement_speaks(short, monkeypatch):
    """For 2^REACH times fewer images, 2^(REACH * MORE) times as many, 2^REACH times the channels, either way. Of a
    device that XLA or the kernel did not fill for no more images than others."""
    base = dataclasses.replace(BY_NAME["aligned"].problem("bfloat16"), batch=64, in_channels=64, out_channels=64)
    op, kind, coordinates = measured.features("conv_fprop", base)
    entry = dict(case="base", op=op, kind=kind, coordinates=coordinates, xla_ms=2.0, native_ms={"sm90/product": 1.0})
    if short == "xla":
        entry["xla_ms"] = measured.FULL_MS / 1.01
    if short == "kernel":
        entry["native_ms"] = {"sm90/product": measured.FULL_MS / 1.01}
    monkeypatch.setattr(measured, "_learned", {"NVIDIA X": (measured._measurement(entry),)})

    def speaks(kernel="sm90/product", **other):
        return (
            measured.nearest("conv_fprop", dataclasses.replace(base, **other), Device("cuda", "NVIDIA X"), kernel)
            is not None
        )

    near = 2**measured.REACH
    fewest, most = math.ceil(64 / near), math.floor(64 * near ** (1 if short else measured.MORE))
    assert speaks() and not speaks("stem") and not speaks(stride=(2, 2))
    assert speaks(batch=fewest) and not speaks(batch=fewest - 1)
    assert speaks(batch=most) and not speaks(batch=most + 1)
    for channels in ("in_channels", "out_channels"):
        least, largest = math.ceil(64 / near / 8) * 8, math.floor(64 * near / 8) * 8
        assert speaks(**{channels: least}) and not speaks(**{channels: least - 8})
        assert speaks(**{channels: largest}) and not speaks(**{channels: largest + 8})


def test_a_products_tile_is_the_largest_that_fills_a_device():
    """96 tiles are enough; 64 rows or columns have the smallest one or half of one."""
    assert product_tile(96 * 128, 128, 1, True) == product_tile(48 * 128, 128, 2, True) == "128x128"
    assert product_tile(95 * 128, 128, 1, True) == product_tile(48 * 128, 128, 1, True) == "128x64"
    assert product_tile(47 * 128, 128, 1, True) == "64x64"
    assert product_tile(96 * 128, 65, 1, True) == "128x128"  # half of each is filled
    assert product_tile(96 * 128, 64, 1, True) == "128x64"
    assert product_tile(65, 96 * 128, 1, True) == "128x128" and product_tile(64, 96 * 128, 1, True) == "64x64"
    assert product_tile(96 * 128, 128, 1, False) == "64x64"


def test_explain_for_another_platform():
    x, w = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 4, 8))
    for platform in ("cpu", "cuda", "tpu"):
        (call,) = jaxconv.explain(jaxconv.conv2d, platform=platform)(x, w)
        assert call.plan.reason


def test_info_says_what_was_found_and_what_is_missing(monkeypatch):
    monkeypatch.undo()  # the fixture's pretence that there is CUDA code
    text = jaxconv.info()
    for part in (
        f"jax {jax.__version__}",
        "XLA FFI: built against 0.",
        "CPU code: loaded",
        "GPUs: ",
        "default backend",
    ):
        assert part in text
    assert f"default backend: {jax.default_backend()}" in text
    if _native.cuda is None:
        assert "CUDA code: none. jaxconv was built without CUDA" in text or "cannot be loaded" in text


@pytest.mark.parametrize(
    ("version", "newer"), [("0.11.2", False), ("0.11.9", False), ("0.10.9", False), ("0.12.0", True), ("1.0", True)]
)
def test_info_says_when_jaxlib_is_newer_than_the_recorded_times(version, newer, monkeypatch):
    monkeypatch.setattr(explain.jaxlib, "__version__", version)
    line = explain._tables(H200)
    assert line.startswith("recorded times: of NVIDIA H200, with jaxlib 0.11.2, driver 580")
    assert (f"jaxlib {version} is newer" in line) == newer
    assert "none of NVIDIA A100" in explain._tables(DEVICES["a100"])


@pytest.mark.parametrize(
    ("architecture", "runs", "not_on"),
    [
        ("80-real", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (10, 0)]),
        ("80", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], [(7, 5)]),
        ("90a-real", [(9, 0)], [(8, 9), (10, 0)]),
        ("120-virtual", [(12, 0), (12, 1)], [(9, 0), (10, 0)]),
        ("100f-real", [(10, 0)], [(9, 0), (12, 0)]),
    ],
)
def test_which_devices_an_architecture_has_code_for(architecture, runs, not_on):
    assert all(_native._covers(architecture, capability) for capability in runs)
    assert not any(_native._covers(architecture, capability) for capability in not_on)


@dataclasses.dataclass(eq=False)
class _Gpu:
    compute_capability: str
    device_kind: str = "NVIDIA X1"


@pytest.mark.parametrize(
    ("architectures", "capability", "runs_as"),
    [
        (["80-virtual"], (9, 0), (8, 0)),
        (["80", "90a-real"], (9, 0), (9, 0)),
        (["90-virtual"], (9, 0), (9, 0)),
        (["80-virtual"], (10, 0), (10, 0)),
        (["80-virtual"], (8, 9), (8, 9)),
    ],
)
def test_hopper_runs_amperes_kernels_where_the_module_has_none_for_it(architectures, capability, runs_as, monkeypatch):
    """Those for Hopper are empty in what is compiled from PTX for 8.0."""
    monkeypatch.setattr(_native, "cuda", types.SimpleNamespace(architectures=lambda: architectures))
    assert _native.code_for(capability) == runs_as
    gpu = _Gpu(".".join(map(str, capability)))
    device = _plan.Device.of("cuda", gpu)
    assert device.compute_capability == runs_as
    kernels = {p.kernel for p in _plan.every("conv_fprop", BY_NAME["depthwise_strips"].problem("bfloat16"), device)}
    assert any(kernel.startswith("depthwise/rows") for kernel in kernels) == (runs_as == (9, 0))


def test_a_device_without_code_gets_xla_or_a_sentence(monkeypatch):
    monkeypatch.setattr(_native, "runs_on", lambda capability: capability[0] == 9)
    problem = BY_NAME["depthwise_strips"].problem("bfloat16")
    made = plan("conv_fprop", problem, DEVICES["a100"])
    assert made.implementation == "xla" and "holds no code for NVIDIA A100" in made.reason
    with pytest.raises(ValueError, match="holds no code for NVIDIA A100"):
        plan("conv_fprop", dataclasses.replace(problem, algorithm="depthwise"), DEVICES["a100"])
    assert plan("conv_fprop", dataclasses.replace(problem, algorithm="depthwise"), H200).implementation == "native"
