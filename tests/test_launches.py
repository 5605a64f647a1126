"""jaxconv.launches: what a compiled function launches, read off XLA's texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers import PLATFORM

import jaxconv
from jaxconv._tools import launches

# Compiled HLO as XLA prints it for a GPU, where graphs are computations: one graph of three, and a loop outside of it.
HLO = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8,8]{1,0})->f32[8,8]{1,0}}

%fused_add (param_0: f32[8,8]) -> f32[8,8] {
  %param_0 = f32[8,8]{1,0} parameter(0)
  ROOT %add.1 = f32[8,8]{1,0} add(%param_0, %param_0)
}

%command_buffer (p: f32[8,8], p.1: f32[8,8]) -> (f32[8,8], f32[8,8]) {
  %p = f32[8,8]{1,0} parameter(0)
  %p.1 = f32[8,8]{1,0} parameter(1)
  %fusion.2 = f32[8,8]{1,0} fusion(%p), kind=kLoop, calls=%fused_add
  %jaxconv_dense.1 = (f32[8,8]{1,0}, u8[256]{0}) custom-call(%fusion.2, %p.1), custom_call_target="jaxconv_dense_v2"
  %get-tuple-element.3 = f32[8,8]{1,0} get-tuple-element(%jaxconv_dense.1), index=0
  %fusion.3 = f32[8,8]{1,0} fusion(%get-tuple-element.3), kind=kLoop, calls=%fused_add
  ROOT %tuple.2 = (f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%get-tuple-element.3, %fusion.3)
}

%body (arg: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %arg = (s32[], f32[8,8]{1,0}) parameter(0)
  %get-tuple-element.5 = s32[] get-tuple-element(%arg), index=0
  %get-tuple-element.6 = f32[8,8]{1,0} get-tuple-element(%arg), index=1
  %fusion.5 = f32[8,8]{1,0} fusion(%get-tuple-element.6), kind=kLoop, calls=%fused_add
  ROOT %tuple.5 = (s32[], f32[8,8]{1,0}) tuple(%get-tuple-element.5, %fusion.5)
}

%condition (arg.1: (s32[], f32[8,8])) -> pred[] {
  %arg.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  %get-tuple-element.7 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %wrapped_compare = pred[] fusion(%get-tuple-element.7), kind=kLoop, calls=%fused_add
}

ENTRY %main.9 (Arg_0.1: f32[8,8]) -> f32[8,8] {
  %Arg_0.1 = f32[8,8]{1,0} parameter(0), metadata={op_name="x (y) call("}
  %constant.1 = s32[] constant(0)
  %call = (f32[8,8]{1,0}, f32[8,8]{1,0}) call(%Arg_0.1, %Arg_0.1), to_apply=%command_buffer
  %get-tuple-element = f32[8,8]{1,0} get-tuple-element(%call), index=0
  %cudnn-conv.1 = (f32[8,8]{1,0}, u8[0]{0}) custom-call(%get-tuple-element), custom_call_target="__cudnn$convForward"
  %get-tuple-element.8 = f32[8,8]{1,0} get-tuple-element(%cudnn-conv.1), index=0
  %copy-start.1 = (f32[8,8]{1,0}, f32[8,8]{1,0}, u32[]) copy-start(%get-tuple-element.8)
  %copy-done.1 = f32[8,8]{1,0} copy-done(%copy-start.1)
  %tuple.9 = (s32[], /*index=1*/f32[8,8]{1,0}) tuple(%constant.1, %copy-done.1)
  %while.1 = (s32[], f32[8,8]{1,0}) while(%tuple.9), condition=%condition, body=%body
  ROOT %get-tuple-element.9 = f32[8,8]{1,0} get-tuple-element(%while.1), index=1
}
"""

THUNKS = """\
000: kCommandBuffer  command_buffer
  001: kKernel          fusion.2
  002: kCustomCall      jaxconv_dense.1
  003: kWhile           while.1
    004: kKernel          fusion.5
005: kConvolution    cudnn-conv.1
006: kSequential     sequential
  007: kCopy            copy.1
008: kCommandBuffer  command_buffer.1
  009: kCustomCall      jaxconv_conv_fprop.3
010: kWaitForStreams
"""


def test_launches_and_graphs_of_compiled_hlo():
    found = launches.of_hlo(HLO)
    assert found.by_kind == {
        "fusion": 4,
        "custom-call jaxconv_dense_v2": 1,
        "custom-call __cudnn$convForward": 1,
        "copy": 1,
    }
    assert (found.total, found.graphs, found.captured, found.by_host) == (7, 1, 3, 5)
    without = launches.of_hlo(HLO.replace("command_buffer", "another_computation"))
    assert without.by_kind == found.by_kind and (without.graphs, without.captured, without.by_host) == (0, 0, 7)


def test_xla_knows_the_options_for_graphs():
    x = jnp.ones((1, 6, 6, 4))
    f = jax.jit(lambda x: 2 * x, compiler_options=jaxconv.graph_options())
    assert jaxconv.launches(f)(x).total >= 1
    with pytest.raises(Exception, match="not a valid enum value"):  # what a jaxlib without one of them would say
        jax.jit(lambda x: 2 * x, compiler_options={"xla_gpu_enable_command_buffer": "WISHES"})(x)
    if PLATFORM == "cuda":
        found = jaxconv.launches(f)(x)
        assert found.graphs == 1 and found.captured == found.total


def test_launches_and_graphs_of_thunks():
    found = launches.of_thunks(THUNKS)
    assert found.by_kind == {
        "Kernel": 2,
        "CustomCall jaxconv_dense": 1,
        "CustomCall jaxconv_conv_fprop": 1,
        "Convolution": 1,
        "Copy": 1,
    }
    assert (found.graphs, found.captured, found.by_host) == (2, 4, 4)
    assert str(found).startswith("6 launches, 4 of them in 2 CUDA graphs: 2 Kernel, 1 Convolution")


def test_custom_calls_without_a_name_get_those_of_the_program():
    """What jaxlib 0.11.2 writes, of two calls and a third that is not ours."""
    thunks = "".join(f"00{i}: kCustomCall [prev=00{i - 1} (1) | sink        ] kCustomCall\n" for i in (1, 2, 3))
    hlo = 'custom-call(%x), custom_call_target="jaxconv_conv_v2"\n' * 2 + 'custom_call_target="other"\n'
    found = launches._with_targets(launches.of_thunks(thunks), hlo)
    assert found.by_kind == {"CustomCall jaxconv_conv_v2": 2, "CustomCall": 1} and found.total == 3


def test_launches_of_a_function():
    def f(x, w):
        y = jaxconv.conv2d(x, w, groups=4, activation="relu", implementation="native")
        return jaxconv.conv2d(y, w, groups=4, implementation="native")

    x, w = jnp.ones((1, 6, 6, 4)), jnp.ones((3, 3, 1, 4))
    for g in (f, jax.jit(f)):
        found = jaxconv.launches(g)(x, jax.ShapeDtypeStruct(w.shape, w.dtype))
        assert sum(n for kind, n in found.by_kind.items() if "jaxconv_conv" in kind) == 2
        assert found.total >= 2
    assert found.captured <= found.total and found.graphs <= found.captured
    assert jaxconv.launches(lambda x: x)(x).total <= 1  # at most a copy


@pytest.mark.skipif(PLATFORM != "cuda", reason="command buffers are CUDA graphs")
def test_graphs_of_a_function_are_those_that_xla_was_told_to_make():
    def f(x, w):
        for _ in range(4):
            x = jaxconv.conv2d(x, w, groups=4, activation="relu", implementation="native")
        return x

    x, w = jnp.ones((1, 6, 6, 4)), jnp.ones((3, 3, 1, 4))
    for level, graphs in (("", 0), ("FUSION,CUSTOM_CALL", 1)):
        options = {"xla_gpu_enable_command_buffer": level, "xla_gpu_graph_min_graph_size": 1}
        found = jaxconv.launches(jax.jit(f, compiler_options=options))(x, w)
        assert found.graphs == graphs and found.captured == (found.total if graphs else 0)
