"""conv1d, conv2d and conv3d against numpy: every algorithm that the device has, in every layout and dtype."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as ref
import pytest
from cases import BY_NAME, CONV_CASES, NARROW_CASES, NETWORK_CASES, STEM_CASES, ConvCase, edge, filters, images
from helpers import (
    DEVICE,
    DTYPES,
    H200,
    NAMED_ACTIVATIONS,
    PLATFORM,
    calls,
    integers,
    label,
    normal,
    opcodes,
    same_bits,
    types_of,
)
from tolerance import assert_close, assert_exact, assert_within, eps, integers_for

import jaxconv
from jaxconv import _plan
from jaxconv._core.activations import Activation, activate
from jaxconv._ops import conv, reference
from jaxconv._plan import domain

GPU = PLATFORM == "cuda"
# (case, algorithm) for everything the device can run; "default" is what users get.
FORCED = [(case, algorithm) for case in CONV_CASES for algorithm in case.able()]
ALL = FORCED + [(case, "default") for case in CONV_CASES]
# Where sums are long, strided, grouped and depthwise. Numerics differ there; the rest is indexing.
LONG = [
    (BY_NAME[name], algorithm)
    for name in ("reduction_297", "prime", "grouped", "depthwise_32")
    for algorithm in BY_NAME[name].able()
]
# One small case for each algorithm to be forced on, for tests that are about something else and ask for full precision.
ONE_EACH = list(
    {
        algorithm: (case, algorithm)
        for case, algorithm in FORCED
        if case.batch and algorithm in case.able(precision="highest")
    }.values()
)
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}


def typed(pairs: list[tuple[ConvCase, str]]) -> Any:
    """Over the pairs in float32, and in the other dtypes.

    On the CPU float64 is float32's template, and 16-bit problems run as float32 ones between two conversions: one case
    for each algorithm shows it. On a GPU each dtype has kernels of its own.
    """
    others = [pair for pair in pairs if pair[1] not in ("default", "grouped")] if GPU else ONE_EACH
    if GPU:  # an algorithm whose domain is another in float32
        cases = dict.fromkeys(case for case, _ in pairs)
        others += [(case, "grouped") for case in cases if "grouped" in case.able(dtype="bfloat16")]
    triples = [(*pair, dtype) for dtype in DTYPES for pair in (pairs if dtype == "float32" else others)]
    return pytest.mark.parametrize(
        ("case", "algorithm", "dtype"), triples, ids=[f"{c.name}-{a}-{t}" for c, a, t in triples]
    )


over_layouts = pytest.mark.parametrize("side", ["channels_last", "channels_first"])


def over(pairs: list[tuple[ConvCase, str]]) -> Any:
    return pytest.mark.parametrize(("case", "algorithm"), pairs, ids=[f"{c.name}-{a}" for c, a in pairs])


def layout_of(case: ConvCase, side: str) -> str:
    return case.layout(side != "channels_first")


def choice(algorithm: str) -> dict[str, Any]:
    return {} if algorithm == "default" else {"algorithm": algorithm}


@functools.cache
def data(case: ConvCase, values: int | str) -> dict[str, np.ndarray]:
    """x, w, dy, b, channels last: integers up to `values`, or normal numbers of the dtype `values`."""
    shapes = {
        "x": case.x_shape(),
        "w": case.w_shape(),
        "dy": (case.batch, *ref.out_extents(case), case.out_channels),
        "b": (case.out_channels,),
    }
    make = integers if isinstance(values, int) else normal
    return {name: make(seed, shape, values) for seed, (name, shape) in enumerate(shapes.items())}


@functools.cache
def expected(op: str, case: ConvCase, values: int | str) -> np.ndarray:
    given = data(case, values)
    return getattr(ref, op)(case, *(given[name] for name in OPERANDS[op]))


def place(name: str, a: np.ndarray, layout: str) -> np.ndarray:
    """A channels-last array in `layout`; `name` says whether it is a filter."""
    return filters(a, layout) if name in ("w", "wgrad") else a if name == "b" else images(a, layout)


def arrays(case: ConvCase, values: int | str, names: str, layout: str, dtype: str) -> list[jax.Array]:
    given = data(case, values)
    return [jnp.asarray(np.ascontiguousarray(place(n, given[n], layout)), dtype) for n in names.split()]


def trio(case: ConvCase, layout: str, **options: Any) -> Any:
    """(x, w, dy) -> {"fprop": y, "dgrad": dx, "wgrad": dw}, compiled, made of the public function and jax.vjp."""

    def run(x: Any, w: Any, dy: Any) -> dict[str, Any]:
        y, back = jax.vjp(functools.partial(case.function, layout=layout, **case.options, **options), x, w)
        dx, dw = back(dy)
        return {"fprop": y, "dgrad": dx, "wgrad": dw}

    return jax.jit(run)


# ----------------------------------------------------------------------------------------------------------------------
# Exact


@over_layouts
@typed(ALL)
def test_integers_give_exactly_what_numpy_gives(case, algorithm, dtype, side):
    layout, largest = layout_of(case, side), integers_for(dtype)
    with types_of(dtype):
        actual = trio(case, layout, **choice(algorithm))(*arrays(case, largest, "x w dy", layout, dtype))
    for op, result in actual.items():
        assert result.dtype.name == dtype
        assert_exact(result, place(op, expected(op, case, largest), layout), f"{op} of {case.name} ({case.why})")


# On a GPU the default may be a cuDNN algorithm that is not exact (FFT, Winograd).
@pytest.mark.parametrize("implementation", ["native"] if GPU else ["native", None], ids=label)
@pytest.mark.parametrize("case", NETWORK_CASES, ids=lambda case: case.name)
def test_convolutions_of_networks_are_exact(case, implementation):
    """What the benchmarks measure, small: channels last, and the grouped ones channels first."""
    layout = case.layout(case.groups == 1)
    actual = trio(case, layout, implementation=implementation)(*arrays(case, 2, "x w dy", layout, "float32"))
    for op, result in actual.items():
        assert_exact(result, place(op, expected(op, case, 2), layout), f"{op} of {case.name}")


def _few(case: ConvCase, algorithm: str, dtype: str, last: bool) -> tuple[Any, list[str]]:
    """The problem, and the operators that the algorithm takes of it on the device under test."""
    p = dataclasses.replace(case.problem(dtype, algorithm=algorithm), channels_last=last)
    # 408,510 pixels: sums of as many products are no exact numbers of 16 bits.
    ops = [op for op in OPERANDS if dtype == "float32" or (case.name, op) != ("narrow_strips", "wgrad")]
    return p, [op for op in ops if _plan.supports(f"conv_{op}", algorithm, p, DEVICE) is None]


@pytest.mark.parametrize(
    ("case", "algorithm", "dtype", "side"),
    [
        pytest.param(case, algorithm, dtype, side, id=f"{case.name}-{algorithm}-{dtype}-{side}")
        for case in (*STEM_CASES, *NARROW_CASES)
        for algorithm in ("stem", "narrow", "sm90", "implicit_gemm")
        for dtype in ("float32", "bfloat16", "float16")
        for side in ("channels_last", "channels_first")
        if _few(case, algorithm, dtype, side == "channels_last")[1]
    ],
)
def test_few_channels_and_patches_are_exact(case, algorithm, dtype, side):
    """Each operator that the algorithm takes, alone; and fprop with what follows the sum."""
    layout, largest = layout_of(case, side), integers_for(dtype)
    problem, ops = _few(case, algorithm, dtype, side == "channels_last")
    for op in ops:
        run = jax.jit(functools.partial(getattr(conv, op), problem))
        actual = run(*arrays(case, largest, " ".join(OPERANDS[op]), layout, dtype))
        assert_exact(actual, place(op, expected(op, case, largest), layout), f"{op} of {case.name} ({case.why})")
    if "fprop" in ops:
        f = functools.partial(case.function, layout=layout, activation="relu6", **case.options, algorithm=algorithm)
        y, z = jax.jit(functools.partial(f, return_preactivation=True))(*arrays(case, largest, "x w b", layout, dtype))
        z_expected = expected("fprop", case, largest) + data(case, largest)["b"]
        assert_exact(z, images(z_expected, layout), "z")
        assert_exact(y, images(ref.activate("relu6", z_expected), layout), "y")


@pytest.mark.skipif(GPU, reason="it is about the problem's numbers, and cuDNN may take an algorithm that is not exact")
@pytest.mark.parametrize("case", STEM_CASES + CONV_CASES, ids=lambda case: case.name)
def test_a_folded_problem_is_the_same_convolution_of_the_same_memory(case):
    """As the matrix loops run patches: reshaped operands give the reshaped result, in all three operators."""
    p = case.problem()
    for op, (first, second) in OPERANDS.items():
        q = domain.folded(p, op == "dgrad")
        assert q.flops == p.flops
        assert (q is p) == (not case.name.startswith("patch") or case.name == "patch_ragged")
        if q is p:
            continue
        shapes = {"x": q.x_shape, "w": q.w_shape, "dy": q.y_shape}
        a, b = arrays(case, 2, f"{first} {second}", case.layout(), "float32")
        (actual,) = getattr(reference, f"conv_{op}")(q, a.reshape(shapes[first]), b.reshape(shapes[second]))
        assert_exact(actual.reshape(expected(op, case, 2).shape), expected(op, case, 2), op)


@over_layouts
@over(ALL)
def test_bias_activation_and_preactivation_are_exact(case, algorithm, side):
    """relu6 keeps integers exact, and these sums lie on both sides of both of its kinks."""
    layout = layout_of(case, side)
    f = functools.partial(case.function, layout=layout, activation="relu6", **case.options, **choice(algorithm))
    args = arrays(case, 2, "x w b", layout, "float32")
    alone, (y, z) = jax.jit(lambda *args: (f(*args), f(*args, return_preactivation=True)))(*args)
    z_expected = expected("fprop", case, 2) + data(case, 2)["b"]
    assert_exact(z, images(z_expected, layout), "z")
    assert_exact(y, images(ref.activate("relu6", z_expected), layout), "y")
    assert same_bits(y, alone), "saving z changes y"


@over_layouts
@over([pair for pair in ALL if pair[1] == "default"])
def test_bias_gradient_sums_the_cotangent(case, algorithm, side):
    layout = layout_of(case, side)
    x, w, b, dy = arrays(case, 2, "x w b dy", layout, "float32")
    f = functools.partial(case.function, x, w, layout=layout, **case.options, **choice(algorithm))
    db = jax.jit(lambda b, dy: jax.vjp(f, b)[1](dy)[0])(b, dy)
    assert_exact(db, data(case, 2)["dy"].sum(tuple(range(case.nd + 1))))


# ----------------------------------------------------------------------------------------------------------------------
# Filters whose result is known without a reference


@pytest.mark.parametrize("activation", NAMED_ACTIVATIONS, ids=label)
@over(ONE_EACH)
def test_zero_filter_leaves_the_activated_bias(case, algorithm, activation):
    x, b = (
        jnp.asarray(normal(6, case.x_shape()), "float32"),
        jnp.asarray(4 * normal(5, (case.out_channels,)), "float32"),
    )
    f = functools.partial(case.function, activation=activation, **case.options, algorithm=algorithm)
    y = jax.jit(f)(x, jnp.zeros(case.w_shape(), "float32"), b)
    b64 = np.asarray(b, np.float64)  # standard deviation 4, so both kinks of relu6 are within
    # tanh, exp, erf and expm1 in float32 err by a few ulp each, of at most max(|b|, 1).
    bound = 8 * eps("float32") * np.maximum(np.abs(b64), 1)
    assert_within(y, np.broadcast_to(ref.activate(activation, b64), y.shape), bound)


@over_layouts
@pytest.mark.parametrize("algorithm", BY_NAME["three_channels"].able())
def test_one_hot_filter_shifts_the_image(algorithm, side):
    """A single one at tap (r, s) of channel c copies that channel, moved by the tap; not a bit may change."""
    case = BY_NAME["three_channels"]
    layout = layout_of(case, side)
    x = normal(7, case.x_shape(), "float32")
    n, h, width, _ = x.shape
    padded = np.pad(x, [(0, 0), *case.padding, (0, 0)])
    w, y = np.zeros(case.w_shape()), np.zeros((n, h, width, case.out_channels))
    for k, (r, s, c) in enumerate([(0, 0, 0), (1, 1, 1), (2, 0, 2), (0, 2, 1), (2, 2, 0)]):
        w[r, s, c, k] = 1
        y[..., k] = padded[:, r : r + h, s : s + width, c]
    f = jax.jit(
        functools.partial(
            jaxconv.conv2d, precision="highest", padding=1, groups=case.groups, layout=layout, algorithm=algorithm
        )
    )
    actual = f(jnp.asarray(images(x, layout), "float32"), jnp.asarray(filters(w, layout), "float32"))
    np.testing.assert_array_equal(np.asarray(actual, np.float64), images(y, layout))


@over_layouts
@pytest.mark.parametrize("algorithm", BY_NAME["depthwise"].able())
def test_one_hot_depthwise_filter_shifts_each_channel_by_itself(algorithm, side):
    case = BY_NAME["depthwise"]
    layout = layout_of(case, side)
    x = normal(8, case.x_shape(), "float32")
    padded = np.pad(x, [(0, 0), *case.padding, (0, 0)])
    w, y = np.zeros(case.w_shape()), np.zeros(case.x_shape())
    for c in range(case.in_channels):
        r, s = c % 3, c // 3 % 3
        w[r, s, 0, c] = 1
        y[..., c] = padded[:, r : r + case.spatial[0], s : s + case.spatial[1], c]
    f = jax.jit(
        functools.partial(
            jaxconv.conv2d, precision="highest", padding=1, groups=case.groups, layout=layout, algorithm=algorithm
        )
    )
    actual = f(jnp.asarray(images(x, layout), "float32"), jnp.asarray(filters(w, layout), "float32"))
    np.testing.assert_array_equal(np.asarray(actual, np.float64), images(y, layout))


@pytest.mark.parametrize("algorithm", BY_NAME["holes"].able())
def test_dgrad_of_strided_conv_is_zero_where_no_output_looked(algorithm):
    case = BY_NAME["holes"]
    seen = np.zeros(case.spatial, bool)
    for _, _, i in ref.taps(case):
        seen[i] = True
    assert not seen.all()
    dy = jnp.ones((case.batch, *ref.out_extents(case), case.out_channels))
    dx = trio(case, "NHWC", algorithm=algorithm)(jnp.ones(case.x_shape()), jnp.ones(case.w_shape()), dy)["dgrad"]
    np.testing.assert_array_equal(np.asarray(dx) != 0, np.broadcast_to(seen[None, ..., None], dx.shape))


# ----------------------------------------------------------------------------------------------------------------------
# Close


@over_layouts
@typed(LONG)
def test_random_filters_err_no_more_than_twice_xla(case, algorithm, dtype, side):
    layout = layout_of(case, side)
    with types_of(dtype):
        args = arrays(case, dtype, "x w dy", layout, dtype)
        actual = trio(case, layout, algorithm=algorithm, precision="highest")(*args)
        xla = trio(case, layout, implementation="xla", precision="highest")(*args)
    for op, result in actual.items():
        reference64 = place(op, expected(op, case, dtype), layout)
        assert_close(result, xla[op], reference64, case.terms(op), f"{op} of {case.name}")


@pytest.mark.parametrize("precision", [None, "high", ("default", "highest")], ids=label)
@over(LONG)
def test_float32_may_round_products_to_tf32_and_no_further(case, algorithm, precision):
    """TF32 keeps 10 bits after the leading one: rounding two factors changes a product by 2^-10 of itself at most
    (2^-9 where the hardware truncates instead), and n float32 additions by n 2^-24 of the sum of magnitudes."""
    actual = trio(case, case.layout(), algorithm=algorithm, precision=precision)(
        *arrays(case, "float32", "x w dy", case.layout(), "float32")
    )
    given = data(case, "float32")
    product = 2.0**-9 if GPU else 0.0
    for op, result in actual.items():
        magnitudes = getattr(ref, op)(case, *(np.abs(given[name]) for name in OPERANDS[op]))
        bound = (product + case.terms(op) * 2.0**-24) * magnitudes
        assert_within(result, expected(op, case, "float32"), bound, f"{op} of {case.name}")


# A 16-bit y rounds to 6 where z is just below it, and relu6's slope is read off y: its exact test is above.
DTYPED_ACTIVATIONS = [
    (dtype, activation)
    for dtype in (DTYPES if GPU else ("float32",))
    for activation in NAMED_ACTIVATIONS
    if dtype == "float32" or activation != "relu6"
]


@pytest.mark.parametrize(("dtype", "activation"), DTYPED_ACTIVATIONS, ids=label)
@over(ONE_EACH)
def test_every_activation_forward_and_backward(case, algorithm, activation, dtype):
    """The fused forward, z, and the three gradients through the activation, against numpy and against the reference."""
    layout = case.layout()

    def outputs(f, x, w, b, dy, dz):
        (y, z), back = jax.vjp(f, x, w, b)
        return y, z, *back((dy, dz))

    f = functools.partial(
        case.function, layout=layout, activation=activation, return_preactivation=True, **case.options
    )
    with types_of(dtype):
        x, w, b, dy = arrays(case, dtype, "x w b dy", layout, dtype)
        dz = dy[..., ::-1]
        ours = functools.partial(f, precision="highest", algorithm=algorithm)
        lax_ = functools.partial(f, precision="highest", implementation="xla")
        actual = jax.jit(functools.partial(outputs, ours))(x, w, b, dy, dz)
        xla = jax.jit(functools.partial(outputs, lax_))(x, w, b, dy, dz)
    given = data(case, dtype)
    z = expected("fprop", case, dtype) + given["b"]
    slope = ref.slope(activation, z)
    total = given["dy"] * slope + given["dy"][..., ::-1]
    references = (
        ref.activate(activation, z),
        z,
        ref.dgrad(case, total, given["w"]),
        ref.wgrad(case, given["x"], total),
        total.sum(tuple(range(case.nd + 1))),
    )
    terms = (case.terms("fprop"),) * 2 + (case.terms("dgrad"),) + (case.terms("wgrad"),) * 2
    for what, a, t, r, n in zip(("y", "z", "dx", "dw", "db"), actual, xla, references, terms, strict=True):
        # dz is rounded to the dtype before the sums: their magnitude, not the result's, sets the floor.
        scale = np.abs(total).max() * np.sqrt(n) if what in ("dw", "db", "dx") else np.abs(z).max()
        assert_close(a, t, r, n, what, scale=scale)


@over(ONE_EACH)
def test_gradients_agree_with_numerical_derivatives(case, algorithm):
    """dX, dW and dB against central differences of the numpy forward, entry by entry; tanh and all."""
    names = {"depthwise": "depthwise_x2", "sm90": "aligned", "grouped": "grouped_8"}
    case = BY_NAME[names.get(algorithm, "one_d")]
    given = {name: a.astype(np.float32).astype(np.float64) * 0.5 for name, a in data(case, "float32").items()}
    dy = given.pop("dy")

    def loss(**changed):
        now = {**given, **changed}
        return float((dy * np.tanh(ref.fprop(case, now["x"], now["w"]) + now["b"])).sum())

    def ours(x, w, b):
        y = case.function(x, w, b, activation="tanh", precision="highest", algorithm=algorithm, **case.options)
        return (jnp.asarray(dy, "float32") * y).sum()

    grads = jax.jit(jax.grad(ours, (0, 1, 2)))(*(jnp.asarray(given[n], "float32") for n in "xwb"))
    for name, actual in zip("xwb", grads, strict=True):
        # 24 entries are enough to see a misplaced one; each costs two forward passes in Python.
        picked = np.random.default_rng(9).permutation(given[name].size)[:24]

        def of_picked(values, name=name, picked=picked):
            changed = given[name].copy()
            changed.flat[picked] = values
            return loss(**{name: changed})

        numerical = ref.numerical_gradient(of_picked, given[name].flat[picked])
        # float32 gradients: sums of fewer than 400 terms of size about 1, so a random walk of 2^-24 * 20 each way,
        # through tanh' and a second sum; 64 ulp leaves a factor of 3. A wrong entry is off by about 1.
        assert_within(np.asarray(actual).flat[picked], numerical, 64 * eps("float32") * max(1, np.abs(numerical).max()))


# ----------------------------------------------------------------------------------------------------------------------
# What runs


@over_layouts
@over(ONE_EACH)
def test_a_forced_algorithm_runs_its_custom_calls_and_nothing_of_xla(case, algorithm, side):
    layout = layout_of(case, side)
    f = trio(case, layout, algorithm=algorithm)
    args = arrays(case, 1, "x w dy", layout, "float32")
    assert calls(f, *args) == {"conv_fprop": 1, "conv_dgrad": 1, "conv_wgrad": 1}
    text = f.lower(*args).compile().as_text()
    assert not {"convolution", "dot"} & {*opcodes(text)}
    assert len(re.findall(rf'kernel = "{algorithm}["/]', text)) == 3


@over_layouts
@over(ONE_EACH)
def test_bias_and_activation_run_inside_the_custom_call(case, algorithm, side):
    layout = layout_of(case, side)
    f = functools.partial(case.function, layout=layout, activation="gelu", algorithm=algorithm, **case.options)
    args = arrays(case, 1, "x w b", layout, "float32")
    assert calls(f, *args) == {"conv": 1}
    text = jax.jit(f).lower(*args).compile().as_text()
    # A GPU copies between layouts in fusions; a fusion that computes would hold one of these.
    assert not any(f" {op}(" in text for op in ("tanh", "add", "multiply"))


@pytest.mark.parametrize("case", [case for case in CONV_CASES if case.batch], ids=lambda case: case.name)
def test_native_runs_its_own_code_for_every_case(case):
    args = arrays(case, 1, "x w dy", case.layout(), "float32")
    native = {"conv_fprop": 1, "conv_dgrad": 1, "conv_wgrad": 1}
    assert calls(trio(case, case.layout(), implementation="native"), *args) == native
    assert calls(trio(case, case.layout(), implementation="xla"), *args) == {}


@pytest.mark.parametrize("case", [case for case in CONV_CASES if case.batch], ids=lambda case: case.name)
def test_kernels_agree_with_the_reference_that_ships(case):
    """The primitives themselves, bound with a problem, against reference.py: integers, so to the last bit."""
    p = case.problem(implementation="native")
    x, w, dy = arrays(case, 2, "x w dy", case.layout(), "float32")
    for kernel, meaning, args in (
        (conv.fprop, reference.conv_fprop, (x, w)),
        (conv.dgrad, reference.conv_dgrad, (dy, w)),
        (conv.wgrad, reference.conv_wgrad, (x, dy)),
    ):
        assert same_bits(kernel(p, *args), meaning(p, *args)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@over(ONE_EACH)
def test_the_same_call_gives_the_same_bits_every_time(case, algorithm, dtype):
    with types_of(dtype):
        args = arrays(case, dtype, "x w dy", case.layout(), dtype)
        f = trio(case, case.layout(), algorithm=algorithm)
        first = f(*args)
        assert all(same_bits(first, f(*args)) for _ in range(3))


def test_no_activation_saves_y_as_its_preactivation():
    x, w = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2))
    y, z = jaxconv.conv2d(x, w, return_preactivation=True)
    assert same_bits(y, z)


# A GPU's memory holds this; offsets past 2^31 elements must not wrap.
if PLATFORM == "cuda":

    @pytest.mark.parametrize("algorithm", BY_NAME["aligned"].able())
    def test_tensors_past_2_to_the_31_elements_are_addressed(algorithm):
        """x and y have 2^31 + 2^20 elements (4.3 GB each); the last rows must equal those of the rows alone."""
        rows, width, c = 2**14 + 8, 2**14, 8
        x = jax.random.randint(jax.random.key(0), (1, rows, width, c), -1, 2, "int8").astype("bfloat16")
        w = jnp.asarray(integers(1, (1, 1, c, c), 1), "bfloat16")
        f = jax.jit(functools.partial(jaxconv.conv2d, algorithm=algorithm))
        y = f(x, w)
        last = jaxconv.conv2d(x[:, -16:], w, implementation="xla")
        assert same_bits(y[:, -16:], last)


@pytest.mark.parametrize("implementation", ["xla", None], ids=label)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("taps", [1, 2])
@pytest.mark.parametrize("pads", [((-1, 1), (0, 0)), ((-2, 2), (-1, 1)), ((3, -1), (2, 1)), ((2, 0), (0, 4))], ids=str)
def test_pads_that_xla_reads_beside_the_array(pads, taps, layout, implementation):
    """Cropped on one side and filled on the other; and pads longer than the filter's reach, which dgrad crops."""
    case = edge("pads", 2, (4, 5), 8, 3, (taps, taps), "for XLA's path", padding=pads)
    x, w = (integers(i, shape, 2) for i, shape in enumerate((case.x_shape(), case.w_shape())))
    dy = integers(2, (2, *ref.out_extents(case), 3), 2)
    f = functools.partial(jaxconv.conv2d, layout=layout, implementation=implementation, **case.options)
    arrays = [jnp.asarray(a, "float32") for a in (images(x, layout), filters(w, layout), images(dy, layout))]
    y, pull = jax.jit(lambda x, w, dy: (lambda y, pull: (y, pull(dy)))(*jax.vjp(f, x, w)))(*arrays)
    assert_exact(y, images(ref.fprop(case, x, w), layout), "y")
    assert_exact(pull[0], images(ref.dgrad(case, dy, w), layout), "dx")
    assert_exact(pull[1], filters(ref.wgrad(case, x, dy), layout), "dw")


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("name", ("none", "relu", "relu6", "silu"))
def test_a_residual_that_is_only_clipped_is_added_in_16_bits(name, dtype):
    """With the bits of a sum in float32, which XLA might keep in memory."""
    z, residual = (4 * normal(seed, (64, 64)).astype(dtype) for seed in (0, 1))
    add = functools.partial(reference.activated_sum, Activation(name))
    wide = z.astype(jnp.float32) + residual.astype(jnp.float32)
    for ours, expected in zip(add(z, residual), (activate(Activation(name), wide), wide), strict=True):
        np.testing.assert_array_equal(ours, expected.astype(dtype))
    assert ("f32" in str(jax.make_jaxpr(add)(z, residual))) == (name == "silu")


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("activation", ["relu", "relu6", "silu"])
def test_xla_does_not_see_on_a_gpu_that_a_convolution_ends_in_a_relu(
    activation, groups, residual, implementation, code_for_gpus
):
    """It would read z instead of y in the derivative, and cuDNN's convolution then has no relu in it. A sum behind a
    kernel's convolution is XLA's to fuse."""

    def f(x, w, b):
        options = dict(layout="NHWC", padding="SAME", activation=activation, groups=groups)
        y = jaxconv.conv2d(x, w, b, residual=x if residual else None, implementation=implementation, **options)
        return y.mean((1, 2))

    shapes = ((2, 8, 8, 16), (3, 3, 16 // groups, 16), (16,))
    x, w, b = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    for platform in ("cpu", "cuda"):
        with _plan.Device.assumed(H200):
            text = jax.jit(f).trace(x, w, b).lower(lowering_platforms=(platform,)).as_text()
        # A sum whose convolution has a plan of its own may be behind a kernel.
        by_xla = implementation == "xla" or not (residual or "@jaxconv_conv" in text)
        hidden = activation == "relu" and groups < 16 and platform == "cuda" and by_xla
        assert text.count("stablehlo.optimization_barrier") == hidden, platform
