"""Sixty-one small defects, each of which the tests must find.

    make mutants                         # all, one after the other
    make mutants ARGS="gemm batchnorm"   # those whose name or file has one of these words
    make mutants ARGS="--resume"         # go on with those that were not tried or survived (build/mutants/results.json)
    make mutants ARGS="--list"

Each is one replacement in one file. The runner copies the tree into build/mutants, applies one defect, compiles what
it touches, and runs the tests that are named beside it; if these pass, all tests but slow ones. A defect that passes
that too has survived: a test is missing. tests/test_mutants.py, in `make test`, asks that each replacement still fits
exactly once, so that the list ages with the code.

Where indexing goes wrong for every problem, any test finds it. These sit where few look: behind a size at which work is
cut up, at the boundary of a refusal, in the check of an operand, in a case that is rare.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
SITE = "build/mutants"
CPP = (".h", ".cc")


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str  # what is wrong, in words
    file: str
    old: str  # occurs once
    new: str
    tests: str  # arguments of pytest: the tests that look there

    @property
    def key(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"

    @property
    def compiled(self) -> bool:
        return self.file.endswith(CPP)

    def applied(self, text: str) -> str:
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} has the text to replace {count} times, expected once")
        return text.replace(self.old, self.new)


THRESHOLDS = "tests/test_cpu_thresholds.py"

MUTANTS = [
    # ---- cpu/
    Mutant(
        "im2col leaves out the dilation of the depth axis",
        "cpu/conv_im2col.cc",
        "const int64_t d = InputAt(p, 0, row / p.out[1], t),",
        "const int64_t d = row / p.out[1] * p.stride[0] - p.pad[0] + t,",
        f"{THRESHOLDS} -k each_axis",
    ),
    Mutant(
        "im2col's weight gradient is cut into as many parts as there are threads",
        "cpu/conv_im2col.cc",
        "const int64_t splits = std::clamp<int64_t>(CeilDiv(kItems, p.groups * tiling.blocks), 1,",
        "const int64_t splits = std::clamp<int64_t>(CeilDiv(kItems / 8 * ctx.threads, p.groups * tiling.blocks), 1,",
        f"{THRESHOLDS} -k threads",
    ),
    Mutant(
        "im2col's second block of input channels takes the first one's place",
        "cpu/conv_im2col.cc",
        "rows, ld, /*accumulate=*/block > 0);",
        "rows, ld, /*accumulate=*/block > 1);",
        "tests/test_conv.py -k 'integers and reduction_297 and im2col and float32'",
    ),
    Mutant(
        "gemm's later parts of a split sum begin at multiples of the rounded share",
        "cpu/gemm.cc",
        "const int64_t k_begin = k * split / splits;",
        "const int64_t k_begin = k / splits * split;",
        f"{THRESHOLDS} -k long_sum",
    ),
    Mutant(
        "gemm adds up all but the last part of a split sum",
        "cpu/gemm.cc",
        "for (int64_t split = 1; split < splits; ++split) {",
        "for (int64_t split = 1; split < splits - (splits > 2); ++split) {",
        f"{THRESHOLDS} -k 'long_sum or few_tiles'",
    ),
    Mutant(
        "gemm reads C where beta is 0",
        "cpu/gemm.cc",
        "if (beta == T(0)) {",
        "if (false) {",
        "tests/test_dense.py -k 'integers and native and float32'",
    ),
    Mutant(
        "batch-norm backward reads the first channels' parameters past a buffer's end",
        "cpu/batchnorm.cc",
        "const int64_t channel = channels_last ? run_channel + i : run_channel;",
        "const int64_t channel = run_channel;",
        "tests/test_cpu_thresholds.py -k 'both_sides_of_its_buffers and channels-257'",
    ),
    Mutant(
        "batch-norm leaves out the channels of the last, partial step",
        "cpu/batchnorm.cc",
        "channel_blocks = CeilDiv(p.channels, channel_step);",
        "channel_blocks = std::max<int64_t>(p.channels / channel_step, std::min<int64_t>(p.channels, 1));",
        "tests/test_cpu_thresholds.py -k 'both_sides_of_its_buffers and channels-1025'",
    ),
    Mutant(
        "batch-norm finishes no totals past a whole number of 256 channels",
        "cpu/batchnorm.cc",
        "ParallelFor(ctx, CeilDiv(rows, step), [&](int64_t index) {",
        "ParallelFor(ctx, std::max<int64_t>(rows / step, rows > 0), [&](int64_t index) {",
        "tests/test_cpu_thresholds.py -k 'both_sides_of_its_buffers and channels-257'",
    ),
    Mutant(
        "batch-norm forgets what rounding takes from a large mean",
        "cpu/batchnorm.cc",
        "offset[row] = static_cast<T>(beta - (exact_mean - mean[row]) * gamma * rstd);",
        "offset[row] = static_cast<T>(beta);",
        f"{THRESHOLDS} -k whole",
    ),
    Mutant(
        "depthwise, channels first: a row's last vector is left out where one pixel is missing",
        "cpu/conv_depthwise.cc",
        "if (j < end) SumRowVectors<T, 1>(terms, term, end - kLanes, out);",
        "if (j + 1 < end) SumRowVectors<T, 1>(terms, term, end - kLanes, out);",
        "tests/test_conv.py -k 'integers and depthwise and float32'",
    ),
    Mutant(
        "depthwise wgrad with several outputs a channel counts a block's pixels from the row's begin",
        "cpu/conv_depthwise.cc",
        "dy_block + (begin - q0) * p.c, sum + tap * p.c, end - begin};",
        "dy_block + begin * p.c, sum + tap * p.c, end - begin};",
        "tests/test_cpu_thresholds.py -k rows_end",
    ),
    Mutant(
        "direct wgrad, channels first: blocks of a wide row step without the stride",
        "cpu/conv_direct.cc",
        "x_row + g * cg * xs.c + i * p.stride[2], p.stride[2], dy_row + k * ys.c + i,",
        "x_row + g * cg * xs.c + i, p.stride[2], dy_row + k * ys.c + i,",
        "tests/test_cpu_thresholds.py -k rows_end",
    ),
    Mutant(
        "a 1x1 convolution that pads in front and crops behind is taken for a plain product",
        "cpu/conv.h",
        "if (p.filter[dim] != 1 || p.stride[dim] != 1 || p.pad[dim] != 0 || p.in[dim] != p.out[dim]) {",
        "if (p.filter[dim] != 1 || p.stride[dim] != 1 || p.in[dim] != p.out[dim]) {",
        "tests/test_cpu_thresholds.py -k 1x1",
    ),
    Mutant(
        "dense: a bias of rows, one for each instance, steps by one element",
        "cpu/dense.cc",
        "const T* values = bias + (p.bias_batched ? instance * bias_size : 0);",
        "const T* values = bias + (p.bias_batched ? instance : 0);",
        "tests/test_transforms.py -k 'vmap_is_one_call and dense'",
    ),
    # ---- common/
    Mutant(
        "leaky_relu'(0) is the slope",
        "common/activation.h",
        "return z >= F(0) ? F(1) : slope;",
        "return z > F(0) ? F(1) : slope;",
        "tests/test_activation_tails.py -k kinks",
    ),
    Mutant(
        "relu makes 0 of NaN",
        "common/activation.h",
        "return z > F(0) || z != z ? z : F(0);",
        "return z > F(0) ? z : F(0);",
        "tests/test_activation_tails.py -k 'infinities and relu and float32'",
    ),
    Mutant(
        "an overflow is forgotten by the next product",
        "common/checked.h",
        "result.overflow_ = overflow_ || b.overflow_ || over;",
        "result.overflow_ = b.overflow_ || over;",
        "tests/test_hostile_calls.py -k wraps_to_a_small",
    ),
    Mutant(
        "a pad as large as the dilated filter counts as below it",
        "common/problem.h",
        "return pad[d] >= 0 && pad[d] < reach && (out[d] - 1) * stride[d] - pad[d] < in[d] &&",
        "return pad[d] >= 0 && pad[d] <= reach && (out[d] - 1) * stride[d] - pad[d] < in[d] &&",
        "tests/test_domain_grouped.py -k padded_by_less",
    ),
    # ---- ffi/
    Mutant(
        "a convolution does not look at the batch of y",
        "ffi/problems.h",
        'if (yd[0] != p.n) return disagree("the batches");',
        "",
        "tests/test_operand_checks.py -k off_by_one",
    ),
    Mutant(
        "a convolution does not look at the shape of its bias",
        "ffi/problems.h",
        "if (rule == kBias) return {p.dtype, {p.k}, -1, kY};",
        "",
        "tests/test_operand_checks.py -k off_by_one",
    ),
    Mutant(
        "batch-norm does not look at the variance",
        "ffi/problems.h",
        '{"signs", kSignsOfX},\n                                      {"", kPerChannel}};',
        '{"signs", kSignsOfX}, {"var", kStatistic}, {"", kPerChannel}};',
        "tests/test_operand_checks.py -k off_by_one",
    ),
    Mutant(
        "dense does not look at c",
        "ffi/problems.h",
        "if (rule == kAddend) return matrix(p.c_batched, false, p.m, p.n);",
        "if (rule == kAddend) return {};",
        "tests/test_operand_checks.py -k off_by_one",
    ),
    Mutant(
        "batch-norm's gradients do not look at dy",
        "ffi/problems.h",
        '{"y dy r c residual dx dresidual dr", kLikeX},',
        '{"dy", kStatistic}, {"y r c residual dx dresidual dr", kLikeX},',
        "tests/test_operand_checks.py -k off_by_one",
    ),
    Mutant(
        "a filter without elements may have any number of taps",
        "ffi/problems.h",
        'if (w.element_count() == 0) return disagree(call.Name(kW) + " is empty");',
        "",
        "tests/test_hostile_calls.py -k empty_filter",
    ),
    Mutant(
        "a negative count of splits is taken",
        "ffi/problems.h",
        "if (count < 0 || count > kMaxStep) {",
        "if (count > kMaxStep) {",
        "tests/test_hostile_calls.py -k out_of_bounds",
    ),
    # ---- jaxconv/
    Mutant(
        "accelerate takes mean - x for x - mean",
        "jaxconv/_core/graph.py",
        'if name in ("add", "mul", "max"):',
        'if name in ("add", "mul", "max", "sub"):',
        "tests/test_accelerate.py -k mean_minus",
    ),
    Mutant(
        "accelerate takes maximum(z, slope * z) for leaky_relu with a negative slope",
        "jaxconv/accelerate/activations.py",
        'return slope is None or self.result.made_by != "max" or 0 < slope <= 1',
        'return slope is None or self.result.made_by != "max" or slope <= 1',
        "tests/test_accelerate.py -k slope_below",
    ),
    Mutant(
        "convolutions that are chosen together are so whatever they have become",
        "jaxconv/_plan/together.py",
        "    if mark is not None and (mark.op, mark.problem) == (op, tuned.key_of(problem)):\n",
        "    if mark is not None:\n",
        "tests/test_together.py -k examples",
    ),
    Mutant(
        "short convolutions are native where CUDA graphs hold cuDNN's too",
        "jaxconv/_plan/together.py",
        "        if captured and within is not None:\n",
        "        if False and within is not None:\n",
        "tests/test_together.py -k frozen",
    ),
    Mutant(
        "what names devices may be in a region",
        "jaxconv/joints/region.py",
        "    return alone or names_devices(node.eqn)",
        "    return alone",
        "tests/test_regions.py -k names_devices",
    ),
    Mutant(
        "equal convolutions count as independent where many are chosen together",
        "jaxconv/_plan/together.py",
        "            prediction = measured.features(*within), plan.nearest.plan.kernel\n",
        "            prediction = op, problem\n",
        "tests/test_together.py -k behind",
    ),
    Mutant(
        "an argument whose tangent reaches no result is differentiated",
        "jaxconv/joints/region.py",
        "        reaches and type(t) is not ad.Zero",
        "        type(t) is not ad.Zero",
        "tests/test_regions.py -k without_a_gradient",
    ),
    Mutant(
        "accelerate replaces a batch-norm whose gradient is taken inside",
        "jaxconv/accelerate/norms.py",
        "if training and _is_compared(n.var):",
        "if False:",
        "tests/test_accelerate.py -k 'gradient_inside or taken_inside'",
    ),
    Mutant(
        "a quantised filter's scales leave out the scale of what it reads",
        "jaxconv/quantize/program.py",
        "units.append(own * step)\n",
        "units.append(own)\n",
        "tests/test_quantize.py -k bit_for_bit",
    ),
    Mutant(
        "an 8-bit residual is added with the scale of what the convolution reads",
        "jaxconv/quantize/program.py",
        "residual_scale=None if residual_scale is None else np.float32(residual_scale.step) * factor,",
        "residual_scale=None if residual_scale is None else x_step * factor,",
        "tests/test_quantize.py -k bit_for_bit",
    ),
    Mutant(
        "a filter beside a shortcut's keeps its own scale",
        "jaxconv/quantize/program.py",
        "filters.append(filter_of(w, axis, dtype, unit / step))",
        "filters.append(filter_scales(w, axis, dtype, least / step)[0])",
        "tests/test_quantize.py -k near_the_wide_ones",
    ),
    Mutant(
        "a result that others read too is summed as a shortcut",
        "jaxconv/quantize/program.py",
        "v.users == [reader] else None",
        "reader in v.users else None",
        "tests/test_quantize.py -k shortcuts",
    ),
    Mutant(
        "a shortcut's bias is lost where the other convolution has none",
        "jaxconv/joints/rules.py",
        "replace(main, bias=p.bias or q.bias, activation=p.activation)",
        "replace(main, bias=p.bias, activation=p.activation)",
        "tests/test_joints.py -k added",
    ),
    Mutant(
        "a bias of int32 leaves no room for what a filter of almost nothing adds",
        "jaxconv/quantize/program.py",
        "filter_scales(w, axis, dtype, least / step)",
        "filter_scales(w, axis, dtype, np.float32(LEAST) / step)",
        "tests/test_quantize.py -k almost_nothing",
    ),
    Mutant(
        "any function of one array to 8 bits is a pooling's conversion",
        "jaxconv/joints/rules.py",
        "return float(factors[0]) if str(like) == str(closed) else None",
        "return float(factors[0])",
        "tests/test_conv_pooled.py -k other_conversion",
    ),
    Mutant(
        "what the batches have as never negative is unsigned whatever the program says",
        "jaxconv/quantize/calibrate.py",
        'unsigned = dtype == "int8" and histogram.least >= 0 and never_negative(v)',
        'unsigned = dtype == "int8" and histogram.least >= 0',
        "tests/test_quantize.py -k by_chance",
    ),
    Mutant(
        "a tensor's scale clips nothing",
        "jaxconv/quantize/scales.py",
        "return Scale(dtype, float(np.float32(steps[np.argmin(errors)])))",
        "return Scale(dtype, float(np.float32(steps[0])))",
        "tests/test_quantize.py -k least_squared_error",
    ),
    Mutant(
        "accelerate takes a conversion to int8 that rounds to zero for one that rounds to even",
        "jaxconv/accelerate/eight_bits.py",
        "if not rounded or not whole or",
        "if not whole or",
        "tests/test_accelerate_integers.py -k no_saturation",
    ),
    Mutant(
        "on a mesh, groups are split by their channels: fewer groups than devices are taken apart",
        "jaxconv/_core/sharding.py",
        "extent = 0 if name in uneven else rule.sizes.get(name, shape[axis])",
        "extent = 0 if name in uneven else shape[axis]",
        "tests/test_sharding.py -k fewer_groups",
    ),
    Mutant(
        "the variance of several devices leaves out the spread of their means",
        "jaxconv/_ops/sharded_moments.py",
        "variances * t**2 + ((shift - middle) * t) ** 2",
        "variances * t**2",
        "tests/test_sharding.py -k test_batchnorm",
    ),
    Mutant(
        "the cotangent of a batch-norm's new running variance has the momentum of the old one",
        "jaxconv/_ops/batchnorm.py",
        "ct_var = _total((1 - p.momentum, d_new_var), (-0.5 * rstd * rstd * rstd, d_rstd))",
        "ct_var = _total((p.momentum, d_new_var), (-0.5 * rstd * rstd * rstd, d_rstd))",
        "tests/test_gradients.py -k batchnorm_training",
    ),
    Mutant(
        "a shard asks one row too few of the neighbour behind it",
        "jaxconv/_core/halo.py",
        "return Rows(p.in_spatial[axis], size, _of_busy(first, busy), (out - 1) * s + (f - 1) * d + 1, busy)",
        "return Rows(p.in_spatial[axis], size, _of_busy(first, busy), (out - 1) * s + (f - 1) * d, busy)",
        "tests/test_halo.py -k 'every_shard or test_forward'",
    ),
    Mutant(
        "a batch of no examples is folded",
        "jaxconv/_core/primitives.py",
        "if batch_size(args, dims) == 0:  # folding divides by it",
        "if False:",
        "tests/test_transforms.py -k empty_batch",
    ),
    Mutant(
        "the largest step that native code takes is refused",
        "jaxconv/_problem/conv.py",
        "if max(map(abs, values)) > MAX_STEP:",
        "if max(map(abs, values)) >= MAX_STEP:",
        "tests/test_limits.py",
    ),
    Mutant(
        "CAUSAL padding forgets the dilation",
        "jaxconv/_problem/parse.py",
        "return (((filter[0] - 1) * dilation[0], 0),)",
        "return ((filter[0] - 1, 0),)",
        "tests/test_problem.py -k causal_padding",
    ),
    Mutant(
        "a half-wide tile is taken where the whole of it fits exactly",
        "jaxconv/_plan/plan.py",
        "if n > 64 and m > 64 and ctas(128, 128) >= enough:",
        "if n > 64 and m > 64 and ctas(128, 128) > enough:",
        "tests/test_plan.py -k products_tile",
    ),
    Mutant(
        "a measurement of much more work speaks for a device that is not full",
        "jaxconv/_plan/measured.py",
        "if max(work / more_of_it if work > 0 else -work, gap) <= REACH and distance < least:",
        "if max(abs(work) / more_of_it, gap) <= REACH and distance < least:",
        "tests/test_plan.py -k speaks",
    ),
    Mutant(
        "a scan's convolutions are counted once, however long it is",
        "jaxconv/_tools/cost.py",
        'parts *= equation.params["length"]',
        'parts *= min(equation.params["length"], 1)',
        "tests/test_export.py -k cost",
    ),
    Mutant(
        "of tied readings of lax's convolution the reversed filter is taken",
        "jaxconv/_enable/forms.py",
        'swap = len(possible) > 1 and possible[0][0].w == "rhs" and _transposed_filter(specs["rhs"])',
        "swap = False",
        "tests/test_enable.py -k fprop_dgrad_and_wgrad",
    ),
    Mutant(
        "accelerate multiplies a layer scale into the filter and not into the bias in front of it",
        "jaxconv/accelerate/linear.py",
        "bias = bias if bias is None or self.shifted else _scaled(bias, scale, 0)",
        "bias = bias",
        "tests/test_accelerate.py -k numbers_per_channel",
    ),
    Mutant(
        "accelerate takes a layer scale in float16, where it vanishes",
        "jaxconv/accelerate/linear.py",
        'found = _along_after(z, axis, "mul") if z.dtype != jnp.float16 else None',
        'found = _along_after(z, axis, "mul")',
        "tests/test_accelerate.py -k no_scale",
    ),
    Mutant(
        "accelerate takes a batch-norm's scale for a layer's",
        "jaxconv/accelerate/linear.py",
        "return found if found is not None and free(found[0]) else None",
        "return found",
        "tests/test_accelerate.py -k stays_its",
    ),
    Mutant(
        "a rule takes away what somebody else reads",
        "jaxconv/joints/program.py",
        "if v not in kept and any(user not in gone for user in v.users):",
        "if v not in kept and False:",
        "tests/test_cut.py -k does_not_fit",
    ),
    Mutant(
        "what a rewritten program dropped is found again",
        "jaxconv/joints/program.py",
        "node.dead = node.dead or node not in needed",
        "pass",
        "tests/test_cut.py -k dropped",
    ),
    Mutant(
        "what may be made again is kept as if all values were of one size",
        "jaxconv/joints/cut.py",
        "0 if v in given else 1 + size_of(v)",
        "0 if v in given else 1",
        "tests/test_cut.py",
    ),
    Mutant(
        "every depthwise kernel is said to add to its dgrad",
        "cuda/conv/depthwise/domain.h",
        'inline bool AddsToDgrad(std::string_view kernel) { return kernel == "rows_mma"; }',
        "inline bool AddsToDgrad(std::string_view) { return true; }",
        "tests/test_domain_edges.py -k 'adds and dgrad'",
    ),
    Mutant(
        "patches are folded where a dgrad sums up for channels",
        "cuda/conv/domain.cc",
        "if (op == ConvOp::kDgradSums || op == ConvOp::kGradient || op == ConvOp::kNormGradient) return p;",
        "",
        "tests/test_conv_dgrad.py -k patches",
    ),
    Mutant(
        "a pooled convolution is taken whatever kernel makes it alone",
        "jaxconv/_plan/conv_pooled.py",
        "if alone.kernel == ALONE:",
        "if alone.kernel:",
        "tests/test_conv_pooled.py -k plans",
    ),
]


# ----------------------------------------------------------------------------------------------------------------------
# The runner

# An editable installation's finder comes before every path: it is taken away, in the tests' own subprocesses too.
HOOK = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""


class Tree:
    """A copy of the checkout with a build of its own, in which one file at a time is wrong."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.source, self.cmake = folder, folder / "tree", folder / "cmake"
        self.source.mkdir(parents=True, exist_ok=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            self._copy(name)
        (folder / "hook").mkdir(exist_ok=True)
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        self.env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(map(str, (folder / "hook", self.source))),
            "PYTHONDONTWRITEBYTECODE": "1",  # a file that is changed and restored within a second has one date
        }

    def _copy(self, name: str) -> None:
        """Of what did not change the date stays, and nothing is compiled again."""
        ours, theirs = self.source / name, ROOT / name
        if not theirs.is_file():
            return
        if not ours.exists() or ours.read_bytes() != theirs.read_bytes():
            ours.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(theirs, ours)

    def build(self) -> None:
        configure = ["cmake", "-G", "Ninja", "-S", self.source, "-B", self.cmake, "-DCMAKE_BUILD_TYPE=Release"]
        configure += ["-DJAXCONV_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
        commands = [["ninja", "-C", self.cmake]]
        if not (self.cmake / "build.ninja").exists():
            commands.insert(0, configure)
        tools = pathlib.Path(sys.executable).parent  # cmake and ninja are the environment's
        env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        with (self.folder / "build.log").open("w") as log:
            for command in commands:
                subprocess.run(command, check=True, stdout=log, stderr=log, env=env)
        for made in (*self.cmake.glob("_cpu*.so"), self.cmake / "_build.py"):
            shutil.copyfile(made, self.source / "jaxconv" / made.name)

    def test(self, arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        command += _words(arguments)
        return subprocess.run(command, cwd=self.source, env=self.env, capture_output=True, text=True)

    def confirm(self) -> None:
        """That it is this tree's package that the tests import, and that its native code is found."""
        code = "import jaxconv, pathlib; print(pathlib.Path(jaxconv.__file__).parent); jaxconv.info()"
        where = subprocess.run(
            [sys.executable, "-c", code], cwd=self.folder, env=self.env, capture_output=True, text=True
        )
        assert pathlib.Path(where.stdout.strip()) == self.source / "jaxconv", where.stdout + where.stderr


def _words(arguments: str) -> list[str]:
    return [a or b for a, b in re.findall(r"'([^']*)'|(\S+)", arguments)]


def _first_failure(output: str) -> str:
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failed[0] if failed else (output.strip().splitlines() or ["no output"])[-1]


def _try(tree: Tree, mutant: Mutant, whole: bool) -> tuple[str | None, str]:
    """(what found it or None, remarks)."""
    path = tree.source / mutant.file
    right = path.read_text()
    path.write_text(mutant.applied(right))
    try:
        if mutant.compiled:
            try:
                tree.build()
            except subprocess.CalledProcessError:
                return None, f"DOES NOT COMPILE, see {tree.folder / 'build.log'}"
        for arguments, remark in ((mutant.tests, ""), ("-n 2", "by no test of its hint"))[: 1 + whole]:
            done = tree.test(arguments)
            if (
                done.returncode in (1, 2) or done.returncode < 0
            ):  # a failed test; one that is no longer collected; a crash
                return _first_failure(done.stdout), remark
            if done.returncode not in (0, 5):
                return None, f"pytest did not run: {_first_failure(done.stdout + done.stderr)}"
            if done.returncode == 5:
                remark = "the hint names no test"
        return None, ""
    finally:
        path.write_text(right)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of names or files; none: all")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run found of unchanged defects")
    parser.add_argument("--list", action="store_true", help="print them and stop")
    parser.add_argument(
        "--hints-only", action="store_true", help="do not run the whole suite where the hint finds none"
    )
    parser.add_argument("--page", type=pathlib.Path, help="write the outcome there, as Markdown")
    options = parser.parse_args(arguments)
    words = [word.lower() for word in options.words]
    chosen = [m for m in MUTANTS if not words or any(w in f"{m.name} {m.file}".lower() for w in words)]
    if options.list:
        print("\n".join(f"{m.file}: {m.name}" for m in chosen))
        return 0
    tree = Tree(ROOT / SITE)
    print(f"{len(chosen)} defects in {tree.folder}", flush=True)
    tree.build()
    tree.confirm()
    results = tree.folder / "results.json"
    known = json.loads(results.read_text()) if options.resume and results.exists() else {}
    rows = []
    for i, mutant in enumerate(chosen):
        if known.get(mutant.key):
            rows.append((mutant, known[mutant.key]))
            continue
        begin = time.monotonic()
        found, remark = _try(tree, mutant, not options.hints_only)
        if mutant.compiled:
            (tree.source / mutant.file).touch()  # the right text again, with a later date than the wrong object
        rows.append((mutant, found))
        known[mutant.key] = found
        results.write_text(json.dumps(known, indent=1))
        seconds = f"{time.monotonic() - begin:.0f} s"
        outcome = f"found by {found}" if found else "SURVIVED"
        print(f"{i + 1}/{len(chosen)} {mutant.file}: {mutant.name}: {outcome} {remark} ({seconds})", flush=True)
    tree.build()
    survived = [mutant for mutant, found in rows if not found]
    print(f"{len(rows) - len(survived)} of {len(rows)} found")
    if options.page:
        options.page.write_text(_page(rows))
    return 1 if survived else 0


def _page(rows: Sequence[tuple[Mutant, str | None]]) -> str:
    found = sum(bool(by) for _, by in rows)
    lines = [
        "# Defects that the tests find",
        "",
        "`make mutants` writes this page. It puts small defects (tests/mutants.py) into the code, one at a time, and",
        f"lists the first test that failed. Slow tests do not run. At the last run {found} of {len(rows)} were found.",
        "",
        "| file | defect | found by |",
        "| --- | --- | --- |",
    ]
    for mutant, by in rows:
        test = "nothing" if by is None else f"`{by.partition('[')[0]}`"
        lines.append(f"| {mutant.file} | {mutant.name} | {test} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
