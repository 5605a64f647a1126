"""Native code looks at each operand and each result before it touches one: a wrong extent, rank or type is an error
that names the array."""

from __future__ import annotations

import re

import direct_calls
import jax
import numpy as np
import pytest
from helpers import DEVICE, PLATFORM

# On a GPU some plans need one architecture; the checks come before it matters, but the plans are Hopper's.
if PLATFORM == "cuda" and DEVICE.compute_capability != (9, 0):
    pytest.skip(
        "a GPU's kernels with statistics and with an addend need compute capability 9.0", allow_module_level=True
    )

# No other array shares its pixels and its type: with others it is another right call.
ALONE = ("batchnorm_moments", "operands", "x")
ARRAYS = [
    (name, side, array)
    for name in direct_calls.NAMES
    for side in ("operands", "results")
    for array in getattr(direct_calls.example(name), side)
    if (name, side, array) != ALONE
]


def names(text: str, array: str) -> bool:
    return re.search(rf"(?<!\w){array}(?!\w)", text) is not None


def refusal(call: direct_calls.Call) -> str:
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        call.run()
    return str(error.value)


@pytest.mark.parametrize("name", direct_calls.NAMES)
def test_the_call_itself_is_taken(name):
    call = direct_calls.example(name)
    got = [(a.shape, a.dtype.name) for a in call.run()]
    assert got == list(call.results.values())


def test_every_target_is_called():
    here = [name for name in direct_calls.KERNELS if PLATFORM == "cuda" or name not in direct_calls.ON_GPUS]
    called = {direct_calls.example(name).target for name in direct_calls.NAMES}
    assert called == {direct_calls.KERNELS[name].target for name in here}


# Axes of which another extent is another right call: two windows that step, or one tap that does, round its result down
# to the same.
ROUNDED = {("conv_pooled", "operands", "x"): (1, 2), ("conv_pooled", "operands", "w"): (0, 1)}
ROUNDED |= {(op, "operands", "x2"): (1, 2) for op in ("conv_scaled", "conv_shortcut")}


# Each is a program of its own to compile. `make test` has one type and one rank of each array, and of each axis the
# extent that is one too large or the one that is too small, in turn: of the arrays that a kernel takes some meet each.
# `make test-all` has all.
SIGNS = [pytest.param(0, id="in_turn"), pytest.param(1, id="the_other", marks=pytest.mark.slow)]
# Sums of integers may be of any integer type.
SUMS = ("conv_integer", "results", "y")
# Operands of a convolution of 8-bit numbers have several types, too.
SEVERAL = {("conv_scaled", *array): ("int8", "uint8") for array in (("operands", "x"), ("operands", "w"))}
SEVERAL |= {("conv_scaled", *array): ("float16", "uint8") for array in (("operands", "residual"), ("results", "y"))}
SEVERAL[("conv_scaled", "operands", "b")] = ("int32",)
TYPES = [
    pytest.param(
        *array, dtype, marks=[] if i % 3 == j or array == SUMS else pytest.mark.slow, id="-".join((dtype, *array))
    )
    for j, dtype in enumerate(("float16", "int32", "uint8"))
    for i, array in enumerate(ARRAYS)
    if (array != SUMS or dtype == "float16") and dtype not in SEVERAL.get(array, ())
]


@pytest.mark.parametrize("turn", SIGNS)
@pytest.mark.parametrize(("name", "side", "array"), ARRAYS)
def test_an_extent_that_is_off_by_one_is_refused_by_name(name, side, array, turn):
    shape, _ = getattr(direct_calls.example(name), side)[array]
    for axis in range(len(shape)):
        by = (1, -1)[(ARRAYS.index((name, side, array)) + axis + turn) % 2]
        if side == "results" and shape[axis] + by == 0:
            continue  # XLA makes no call for a result without elements
        if axis in ROUNDED.get((name, side, array), ()):
            continue
        call = direct_calls.example(name)
        arrays = getattr(call, side)
        shape, dtype = arrays[array]
        arrays[array] = ((*shape[:axis], shape[axis] + by, *shape[axis + 1 :]), dtype)
        text = refusal(call)
        assert names(text, array), (axis, by, text)


@pytest.mark.parametrize(("name", "side", "array", "dtype"), TYPES)
def test_another_type_is_refused_by_name(name, side, array, dtype):
    call = direct_calls.example(name)
    arrays = getattr(call, side)
    shape, own = arrays[array]
    arrays[array] = (shape, "int8" if own == dtype else dtype)
    text = refusal(call)
    assert names(text, array), text


RANKS = {
    "axis_before": lambda shape: (1, *shape),
    "axis_behind": lambda shape: (*shape, 1),
    "without_the_first": lambda shape: shape[1:],
    "flat": lambda shape: (int(np.prod(shape)),) if len(shape) > 1 else (),
}


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, len(RANKS)))])
@pytest.mark.parametrize(("name", "side", "array"), ARRAYS)
def test_another_rank_is_refused_by_name(name, side, array, turn):
    shape, _ = getattr(direct_calls.example(name), side)[array]
    other = list(RANKS.values())[(ARRAYS.index((name, side, array)) + turn) % len(RANKS)](shape)
    if other == shape:
        pytest.skip("a number has no other rank of this kind")
    call = direct_calls.example(name)
    arrays = getattr(call, side)
    arrays[array] = (other, arrays[array][1])
    text = refusal(call)
    assert names(text, array), (other, text)


@pytest.mark.parametrize("name", direct_calls.NAMES)
def test_one_operand_or_result_more_or_less_is_refused(name):
    for side in ("operands", "results"):
        call = direct_calls.example(name)
        call.workspace += 1  # XLA drops a call without any byte of results
        arrays = getattr(call, side)
        arrays["more"] = next(iter(arrays.values()))
        assert "expected" in refusal(call)
        del arrays["more"], arrays[list(arrays)[-1]]
        assert "expected" in refusal(call)


@pytest.mark.parametrize("count", [-(2**63), -1, 0, 59])
def test_sums_over_fewer_elements_than_a_channel_has_are_refused(count):
    call = direct_calls.example("batchnorm_dx")  # of (2, 5, 6, 4)
    call.attrs["count"] = np.int64(60)
    call.run()
    call.attrs["count"] = np.int64(count)
    assert f"count={count}, expected at least 1 and the 60 elements" in refusal(call)


def test_an_array_that_stands_alone_may_have_other_pixels_and_must_have_the_results_channels():
    for shape, runs in (((3, 5, 7, 4), True), ((1, 1, 1, 4), True), ((2, 5, 6, 3), False), ((2, 5, 6, 5), False)):
        call = direct_calls.example(ALONE[0])
        call.operands["x"] = (shape, "float32")
        if PLATFORM == "cuda":
            call.workspace = 2**20  # of more parts than the plan's
        if runs:
            assert [a.tolist() for a in call.run()] == [[1] * 4, [0] * 4, [0] * 4]
        else:
            assert names(refusal(call), "x")
    for dtype in ("int32", "uint8", "bool"):
        call = direct_calls.example(ALONE[0])
        call.operands["x"] = ((2, 5, 6, 4), dtype)
        assert names(refusal(call), "x")
