"""JAXCONV_ENABLE=1 for programs that never import jaxconv.

JAX imports what packages have registered under "jax_plugins" when it starts its first backend, and calls `initialize`.
A package of its own, so that without the variable nothing of jaxconv is imported.
"""

import os


def initialize() -> None:
    """Called by JAX."""
    if os.environ.get("JAXCONV_ENABLE", "") not in ("", "0"):
        from jaxconv import _enable

        _enable.from_environment(in_startup=True)
