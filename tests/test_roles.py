"""Native code's table of custom calls and Python's records of kernels say the same: targets, and the roles of operands
and results in the order of the wire."""

from __future__ import annotations

import direct_calls
import jax
import pytest
from helpers import DEVICE, PLATFORM

from jaxconv import _plan
from jaxconv._core import native, primitives

ROLES = (native.cpu if PLATFORM == "cpu" else native.cuda).roles()
HERE = [name for name in direct_calls.KERNELS if PLATFORM == "cuda" or name not in direct_calls.ON_GPUS]
# Without bias, addend and activation: in Python kernels of their own, in native code the fused ones.
BARE = {"conv_fprop": "conv", "matmul": "dense"}


def target(name: str) -> str:
    return direct_calls.KERNELS[name].target


def test_every_kernel_has_a_row_and_every_row_a_kernel():
    assert set(ROLES) == set(map(target, HERE))


def test_every_kernel_is_planned():
    """And all that JAXCONV_DISABLE may name is a kernel."""
    assert set(_plan.OPS) == set(direct_calls.KERNELS)


@pytest.mark.parametrize("name", HERE)
def test_roles_have_the_names_and_the_order_of_the_record(name):
    kernel = direct_calls.KERNELS[name]
    of_wire = " ".join(role for role in kernel.operand_roles.split() if role not in kernel.unread.split())
    whole = direct_calls.KERNELS[BARE.get(name, name)]
    assert ROLES[target(name)] == (of_wire if whole is kernel else whole.operand_roles, whole.result_roles)
    if name in BARE:
        required = [" ".join(role for role in side.split() if not role.endswith("?")) for side in ROLES[target(name)]]
        assert required == [kernel.operand_roles, kernel.result_roles]


@pytest.mark.parametrize("name", direct_calls.NAMES)
def test_a_call_has_the_operands_and_results_of_its_row(name):
    """A kernel's own numbers of them, as it is bound, and as its wire passes them on."""
    kernel_name, f, args = direct_calls._programs()[name]
    kernel = direct_calls.KERNELS[kernel_name]
    with jax.enable_x64(False):
        bound = [
            e for e in primitives.equations(jax.make_jaxpr(f)(*args).jaxpr, DEVICE) if e.primitive is kernel.primitive
        ]
    (equation,) = bound
    problem = equation.params["problem"]
    call = direct_calls.example(name)
    operands, results = ([role.rstrip("?") for role in side.split()] for side in ROLES[kernel.target])
    assert [role for role in operands if role in call.operands] == list(call.operands)
    assert [role for role in results if role in call.results] == list(call.results)
    assert len(equation.outvars) == len(kernel.results(problem)) == len(call.results)
    given = kernel.wire(problem, _plan.plan(kernel_name, problem, DEVICE)).operands
    assert (len(equation.invars) if given is None else len(given)) == len(call.operands)
    for side, there in zip(ROLES[kernel.target], (call.operands, call.results), strict=True):
        assert all(role in there for role in side.split() if not role.endswith("?"))
