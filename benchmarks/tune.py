"""`python -m benchmarks tune [--forget ...] RESULTS.json ...`: recorded runs -> jaxconv/tuning/<device>.json.

A recorded run of `--algorithm all --tune` holds XLA's time and each native algorithm's for a problem; this turns them
into the table that `jaxconv._plan` consults, problem by problem. Older entries for the same problem are replaced,
others stay, unless they are to be forgotten.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import cases, contenders, record
from benchmarks.contenders import Setting
from jaxconv._core import primitives
from jaxconv._plan import measured as tables
from jaxconv._plan import model
from jaxconv._problem import ConvProblem

# The kernel that a pass measures; the other kernels of the pass are not in its time. fwd+bwd and residual measure
# several: for a norm with its activation or residual and for a max-pooling they are one choice, for a dense layer each
# is its own.
KERNELS = {
    "fprop": ("conv_fprop", "conv_dgrad"),  # a transposed convolution's forward is a dgrad
    "dgrad": ("conv_dgrad", "conv_fprop", "matmul", "dense_gradient"),
    "wgrad": ("conv_wgrad", "matmul"),
    "fwd": ("dense", "batchnorm_train", "max_pool", "squeeze_excite"),
    "saved": ("dense",),
    "infer": ("batchnorm_infer",),
    "bwd": ("batchnorm_backward",),
    "fwd+bwd": ("batchnorm_train", "groupnorm", "max_pool", "squeeze_excite"),
    "residual": ("batchnorm_train",),
}


def kernel_of(case: cases.Case, pass_: str, setting: Setting) -> tuple[str, Any] | None:
    """(op, problem) that a row measured, or None where it measured several."""
    if isinstance(case, cases.BatchNormConvCase):
        op = {"pair": "conv_normalised", "bwd": "conv_normalised_gradient"}.get(pass_)
        return (op, contenders.normalised_problem(case, setting)) if op else None
    if isinstance(case, cases.DgradSumsCase):  # plans weigh it by its bytes
        return None
    if isinstance(case, cases.ShortcutCase):
        return "batchnorm_shortcut_backward", contenders.shortcut_problem(case, setting)
    if pass_ not in KERNELS:
        return None
    if isinstance(case, cases.ConvBatchNormCase):
        if pass_ != "fwd":
            return None
        _, found = kernel_of(cases.ConvCase(**dataclasses.asdict(case)), "fprop", setting)
        return "conv_statistics", found
    job = contenders.ours(case, pass_, setting)
    arrays = jax.eval_shape(lambda key: contenders.make_arrays(case, setting, key), jax.random.key(0))
    if pass_ == "bwd":  # its arguments are a vjp function, made by running the forward pass: trace both
        names = ("x", "scale", "bias", "mean", "var")
        forward = contenders.ours(case, "fwd", setting).explained

        def both(dy: jax.Array, *args: jax.Array) -> Any:
            return jax.vjp(lambda *a: forward(*a)[0], *args)[1](dy)

        jaxpr = jax.make_jaxpr(both)(arrays["dy"], *(arrays[n] for n in names))
    else:
        jaxpr = jax.make_jaxpr(job.explained)(*job.arguments(arrays))
    found = {
        (primitives.KERNELS[e.primitive].name, e.params["problem"])
        for e in primitives.equations(jaxpr.jaxpr)
        if e.primitive in primitives.KERNELS and primitives.KERNELS[e.primitive].name in KERNELS[pass_]
    }
    return next(iter(found)) if len(found) == 1 else None


def measurements(run: dict[str, Any], measured: Sequence[cases.Case] = ()) -> list[dict[str, Any]]:
    """The table's entries for a run's rows; `measured` are cases as they ran, where that is not as they are listed."""
    setting = Setting(
        run["dtype"], run["layout"] in (None, "NHWC"), None if run["precision"] == "default" else run["precision"]
    )
    by_name = {case.name: case for case in (*cases.BY_OP[run["op"]], *measured)}
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in run["rows"]:
        if row["status"] == "ok" and "ms" in row:
            rows.setdefault((row["case"], row["pass"]), {})[row["contender"]] = row
    made = []
    for (name, pass_), contenders_ in rows.items():
        forced = {c.partition(":")[2]: row for c, row in contenders_.items() if c.startswith("ours:")}
        # Of a kernel with several tiles that which its plan wants, where that ran: by its name alone.
        order = sorted(forced.items(), key=lambda item: (" " in item[0], item[1]["ms"]), reverse=True)
        native = {_kernel(algorithm, row): row["ms"] for algorithm, row in order}
        plans = {_kernel(algorithm, row): row["plan"] for algorithm, row in order}
        # The default choice, where it is one kernel, that no forced row measured.
        default = contenders_.get("ours")
        if native and default is not None and re.fullmatch(r"native\[[^]]+\]", default["plan"]):
            kernel = _kernel("", default)
            native.setdefault(kernel, default["ms"])
            plans.setdefault(kernel, default["plan"])
        # A pair's alternative is the faster of XLA's and of jaxconv's two calls by their own plans.
        two = native.pop("two", None)
        if two is not None and "xla" in contenders_:
            contenders_["xla"]["ms"] = min(two, contenders_["xla"]["ms"])
        kernel = kernel_of(by_name[name], pass_, setting) if native and "xla" in contenders_ else None
        if kernel is None:
            continue
        op, kind, coordinates = tables.features(*kernel)
        made.append(
            {
                "case": name,
                "problem": str(kernel[1]),
                "op": op,
                "kind": kind,
                "coordinates": [round(c, 4) for c in coordinates],
                **_copied(*kernel),
                "xla_ms": contenders_["xla"]["ms"],
                "native_ms": native,
                "plans": {kernel: plans[kernel] for kernel in native},
                "commit": run["commit"],
            }
        )
    return made


def _copied(op: str, problem: Any) -> dict[str, str]:
    """What the table says of an array that XLA copied because of its padding: nothing where there is none."""
    array = model.copied(op, problem) if isinstance(problem, ConvProblem) else ""
    return {"copied": array} if array else {}


def _key(m: dict[str, Any]) -> tuple[Any, ...]:
    """What a newer measurement of the same problem has in common with the older."""
    return m["op"], m["kind"], m["coordinates"], m.get("copied", "")


def _kernel(algorithm: str, row: dict[str, Any]) -> str:
    """The kernel that a row measured, as its plan names it: "depthwise/rows" of "native[depthwise/rows splits=4]"."""
    if algorithm == "two":  # which others it is of says nothing
        return algorithm
    found = re.match(r"native\[(\S+?)[ \]]", row["plan"])
    return found[1] if found else algorithm


def _write(target: pathlib.Path, device: str, versions: dict[str, str], measured: list[dict[str, Any]]) -> None:
    """One line a measurement, so that a difference between two tables can be read."""
    lines = ",\n".join("  " + json.dumps(m) for m in measured)
    target.parent.mkdir(exist_ok=True)
    head = f' "device": {json.dumps(device)},\n "versions": {json.dumps(versions)},\n'
    target.write_text(f'{{\n{head} "measurements": [\n{lines}\n ]\n}}\n')


def _versions(run: dict[str, Any]) -> dict[str, str]:
    """What a run's times depend on beside jaxconv."""
    found = {"jaxlib": run["versions"]["jaxlib"]}
    return found | ({"driver": run["driver"].splitlines()[0]} if run.get("driver") else {})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune", description=__doc__)
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="files that --algorithm all --json recorded")
    parser.add_argument(
        "--forget",
        nargs=3,
        metavar=("DEVICE", "CASE", "DTYPE"),
        help="drop a case, whose kernels have changed since it was run, from a device's table ('NVIDIA H200')",
    )
    args = parser.parse_args(argv)
    if not args.results and not args.forget:
        parser.error("neither results nor --forget were given")
    if args.forget:
        device, case, dtype = args.forget
        target = tables.FOLDER / f"{tables.slug(device)}.json"
        table = json.loads(target.read_text())
        known = table["measurements"]
        kept = [m for m in known if (m["case"], m["kind"][0]) != (case, dtype)]
        _write(target, device, table.get("versions", {}), kept)
        print(f"{len(known) - len(kept)} measurements of {case} in {dtype} are gone from {target}")
    recorded = [(path, run) for path in args.results for run in reversed(record.read(path))]
    for path, run in recorded:
        if run["op"] in record.WHOLE:
            print(f"{path}: skipped, tables are of layers, not of models")
            continue
        first = run["op"] == "conv" and run["layout"] == "NCHW"  # the channels-last measurements answer for these
        if run["small"] or run["batch"] or run["platform"] == "cpu" or first:
            print(f"{path}: skipped, tables are of full problems on GPUs, convolutions channels last")
            continue
        target = tables.FOLDER / f"{tables.slug(run['device'])}.json"
        table = json.loads(target.read_text()) if target.exists() else {"measurements": []}
        kept = table["measurements"]
        new = json.loads(json.dumps(measurements(run)))  # tuples become lists, as they are read back
        keys = [*map(_key, new)]
        kept = [m for m in kept if _key(m) not in keys]
        # Of the newest jaxlib: that it is older than a user's is what `info` says.
        versions = max(table.get("versions", {}), _versions(run), key=lambda v: tables.numbers(v.get("jaxlib", "")))
        _write(target, run["device"], versions, kept + new)
        print(f"{path}: {len(new)} measurements into {target}")
    return 0
