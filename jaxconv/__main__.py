"""`python -m jaxconv`: what jaxconv found on this machine, for people and for bug reports.

Of a function of the user's: `explain`: what each call in it gets, and why. `tune`: see jaxconv.tune. `bench`: its time,
with and without jaxconv.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

import jaxconv
from jaxconv._tools import bench
from jaxconv.tune import Refused, add_arguments, add_ways, target_of, ways
from jaxconv.tune import main as tune


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxconv", description="Prints what jaxconv found on this machine, what is missing, and why."
    )
    parser.add_argument("--version", action="version", version=f"jaxconv {jaxconv.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="info | explain | tune | bench")
    commands.add_parser("info", help="the same (the default)")
    says = "prints which implementation each jaxconv call in your function gets, and why, and what enable would do"
    _add_arguments(commands.add_parser("explain", help=says, description=says))
    says = "times XLA and the native kernels for your function's problems on this device, and remembers the fastest"
    add_arguments(commands.add_parser("tune", help=says, description=says))
    says = "times your function as it is, with jaxconv.enable, and with jaxconv.accelerate"
    bench.add_arguments(commands.add_parser("bench", help=says, description=says))
    args = parser.parse_args(arguments)
    if args.command == "tune":
        return tune(args)
    if args.command == "explain":
        return _explain(args)
    if args.command == "bench":
        return bench.main(args)
    print(jaxconv.info())
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    says = "a function without arguments that returns a tuple: the function f to explain, and its arguments"
    parser.add_argument("target", metavar="module:function", help=says)
    add_ways(parser)
    says = "the platform to explain; its device need not be present (default: the default backend)"
    parser.add_argument("--platform", choices=("cpu", "cuda", "gpu", "rocm", "tpu"), help=says)


def _explain(args: argparse.Namespace) -> int:
    """`python -m jaxconv explain`: 0, or 2 where the command line cannot be followed, with what is wrong on stderr."""
    try:
        f, *arguments = target_of(args.target)
        f, on = ways(f, arguments, args.grad)[args.way]
        explained = jaxconv.explain(f, platform=args.platform)
    except Refused as error:
        print(f"python -m jaxconv explain: {error}", file=sys.stderr)
        return 2
    with jaxconv.enabled() if on else contextlib.nullcontext():
        print(explained(*arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
