"""`python -m jaxconv`: what jaxconv found on this machine, for people and for bug reports.

`tune`: see jaxconv.tune. `bench`: a function of the user's, with and without jaxconv.
"""

from __future__ import annotations

import argparse
import sys

import jaxconv
from jaxconv import _bench
from jaxconv.tune import add_arguments
from jaxconv.tune import main as tune


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxconv", description="Prints what jaxconv found on this machine, what is missing, and why."
    )
    parser.add_argument("--version", action="version", version=f"jaxconv {jaxconv.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="info | tune | bench")
    commands.add_parser("info", help="the same (the default)")
    says = "times XLA and the native kernels at a function's problems on this device, and remembers the fastest"
    add_arguments(commands.add_parser("tune", help=says, description=says))
    says = "times a function of yours as it is, with jaxconv.enable, and with jaxconv.accelerate"
    _bench.add_arguments(commands.add_parser("bench", help=says, description=says))
    args = parser.parse_args(arguments)
    if args.command == "tune":
        return tune(args)
    if args.command == "bench":
        return _bench.main(args)
    print(jaxconv.info())
    return 0


if __name__ == "__main__":
    sys.exit(main())
