"""`python -m jaxconv`: what jaxconv found on this machine, for people and for bug reports."""

from __future__ import annotations

import argparse
import sys

import jaxconv


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxconv", description="Prints what jaxconv found on this machine, what is missing, and why."
    )
    parser.add_argument("command", nargs="?", choices=["info"], default="info")
    parser.add_argument("--version", action="version", version=f"jaxconv {jaxconv.__version__}")
    parser.parse_args(arguments)
    print(jaxconv.info())
    return 0


if __name__ == "__main__":
    sys.exit(main())
