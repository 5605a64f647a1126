"""`python -m benchmarks passes`: what is said of a program's passes; and, where JAX's CUDA plugin is, of a step."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("flax", reason="the models are Flax's")

from benchmarks import passes, steps
from jaxconv._core import native

# As XLA writes a GPU's program. 1 MB is 2^20 bytes of bf16[512,1024].
PROGRAM = """
HloModule jit_step, is_scheduled=true

%fused_add (p0: bf16[512,1024], p1: bf16[1024]) -> bf16[512,1024] {
  %p0 = bf16[512,1024]{1,0} parameter(0)
  %p1 = bf16[1024]{0} parameter(1)
  %b.1 = bf16[512,1024]{1,0} broadcast(%p1), dimensions={1}
  ROOT %a.1 = bf16[512,1024]{1,0} add(%p0, %b.1), metadata={op_name="jit(step)/Block_0/add"}
}

%fused_slice (q0: bf16[512,4096]) -> (f32[1024], bf16[512,1024]) {
  %q0 = bf16[512,4096]{1,0} parameter(0)
  %s.1 = bf16[512,1024]{1,0} slice(%q0), slice={[0:512], [0:1024]}
  %r.1 = f32[1024]{0} reduce(%s.1, %s.1), dimensions={0}, to_apply=%sum
  ROOT %t.1 = (f32[1024]{0}, bf16[512,1024]{1,0}) tuple(%r.1, %s.1)
}

%fused_update (u0: bf16[8,512,1024], u1: bf16[1,512,1024]) -> bf16[8,512,1024] {
  %u0 = bf16[8,512,1024]{2,1,0} parameter(0)
  %u1 = bf16[1,512,1024]{2,1,0} parameter(1)
  %z = s32[] constant(0)
  %n.1 = bf16[1,512,1024]{2,1,0} negate(%u1)
  ROOT %d.1 = bf16[8,512,1024]{2,1,0} dynamic-update-slice(%u0, %n.1, %z, %z, %z)
}

%body (p: (s32[], bf16[512,1024])) -> (s32[], bf16[512,1024]) {
  %p = (s32[], bf16[512,1024]{1,0}) parameter(0)
  %g.1 = bf16[512,1024]{1,0} get-tuple-element(%p), index=1
  %inner.1 = bf16[512,1024]{1,0} copy(%g.1)
  ROOT %t.2 = (s32[], bf16[512,1024]{1,0}) tuple(%p, %inner.1)
}

ENTRY %main.1 (x: bf16[512,1024], b: bf16[1024], wide: bf16[512,4096], many: bf16[8,512,1024]) -> bf16[512,1024] {
  %x = bf16[512,1024]{1,0} parameter(0)
  %b = bf16[1024]{0} parameter(1)
  %wide = bf16[512,4096]{1,0} parameter(2)
  %many = bf16[8,512,1024]{2,1,0} parameter(3)
  %conv.1 = (bf16[512,1024]{1,0}, u8[4096]{0}) custom-call(%x, %b), custom_call_target="jaxconv_conv_v2"
  %y.1 = bf16[512,1024]{1,0} get-tuple-element(%conv.1), index=0
  %loop_add_fusion = bf16[512,1024]{1,0} fusion(%y.1, %b), kind=kLoop, calls=%fused_add, metadata={op_name="a/add"}
  %loop_add_fusion.1 = bf16[512,1024]{1,0} fusion(%loop_add_fusion, %b), kind=kLoop, calls=%fused_add
  %slice_fusion = (f32[1024]{0}, bf16[512,1024]{1,0}) fusion(%wide), kind=kInput, calls=%fused_slice
  %slice.3 = bf16[512,1024]{1,0} slice(%wide), slice={[0:512], [1024:2048]}
  %one = bf16[1,512,1024]{2,1,0} bitcast(%x)
  %update_fusion = bf16[8,512,1024]{2,1,0} fusion(%many, %one), kind=kLoop, calls=%fused_update
  %while.1 = (s32[], bf16[512,1024]) while(%x), condition=%cond, body=%body
  ROOT %copy.3 = bf16[512,1024]{1,0} copy(%loop_add_fusion.1)
}
"""
MB = 2**20
BYTES = {
    "conv.1": 2 * MB + 4096 + 2048,
    "loop_add_fusion": 2 * MB + 2048,
    "loop_add_fusion.1": 2 * MB + 2048,
    "slice_fusion": 2 * MB + 4096,  # what is sliced out is read, not all of it
    "slice.3": 2 * MB,
    "update_fusion": 2 * MB,  # in place
    "copy.3": 2 * MB,
    "inner.1": 2 * MB,
}


def test_what_each_instruction_reads_and_writes():
    text = steps.Text(PROGRAM)
    assert {name: text.traffic(name) for name in text.launched()} == BYTES


def test_equal_passes_are_one_and_calls_are_none():
    found = passes.passes(steps.Text(PROGRAM))
    (added,) = [one for one in found if one.count == 2 and one.kind == "elementwise"]
    assert added == found[0] and added.scope == "a/add"
    assert added.text == "bf16[512,1024] <- bf16[512,1024]"
    total = sum(one.bytes * one.count for one in found)
    assert total == sum(size for name, size in BYTES.items() if name != "conv.1")
    assert {one.kind for one in found} == {"elementwise", "copies"}


def test_the_lines_are_sums_and_the_largest():
    target = passes.TARGETS["NVIDIA H200"]
    first, kinds, *listed = passes.lines("accelerate", steps.Text(PROGRAM), target, least=2.2)
    assert first.startswith("accelerate: 7 passes, 0.01 GB, 0.00 ms at 4.3 TB/s; beside 1 calls of 0.0 GB")
    assert "elementwise 0.01 GB" in kinds and "copies 0.0" in kinds
    assert len(listed) == 2 and all("2 x 2.1 MB" in line for line in listed)  # two adds, two copies


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        ("", ["--ways", "flax,tensorflow"], "expected some of flax"),
        ("", ["--gpu", "a GPU"], "invalid choice"),
        ("", ["--model", "nobody"], "expected one of resnet50"),
        ("", ["--fleet", "--model", "nobody"], "expected one of resnet18_32"),
        ("", ["--fleet", "--model", "vgg16", "--ways", "flax"], "the fleet has plain, enable, accelerate"),
        ("built without CUDA", [], "it takes jaxconv's CUDA module, to know its kernels: built without CUDA"),
    ],
)
def test_bad_options_are_refused(missing, options, message, capsys, monkeypatch):
    monkeypatch.setattr(native, "cuda_missing", missing)
    with pytest.raises(SystemExit):
        passes.main(options)
    assert message in capsys.readouterr().err


needs_the_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="it takes JAX's CUDA plugin"
)


@needs_the_plugin
@pytest.mark.skipif(native.cuda is None, reason="it takes jaxconv's CUDA module")
def test_a_step_is_compiled_for_a_gpu_that_need_not_be_here(capsys):
    assert passes.main(["--small", "--model", "resnet50", "--batch", "64"]) == 0
    flax, accelerated = (line for line in capsys.readouterr().out.splitlines() if " passes, " in line)
    assert flax.startswith("flax: ") and accelerated.startswith("accelerate: ")

    def count(line: str, what: str) -> int:
        return int(line.partition(f" {what}")[0].rpartition(" ")[2])

    assert count(accelerated, "passes") < count(flax, "passes")


@needs_the_plugin
@pytest.mark.skipif(native.cuda is None, reason="it takes jaxconv's CUDA module")
@pytest.mark.parametrize("model", ["vgg16", "unet_serve"])
def test_programs_of_the_fleet_are_compiled_too(model, capsys):
    assert passes.main(["--small", "--fleet", "--model", model, "--batch", "3"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{model}, f32, 3 x ")
    assert [line.partition(":")[0] for line in lines if " passes, " in line] == ["plain", "accelerate"]
