"""jax.export: what jaxconv's custom calls need to be exported, and to be loaded again."""

from __future__ import annotations

import dataclasses
import re

from jax import export

from jaxconv._core import compat, primitives


def export_checks() -> list[export.DisabledSafetyCheck]:
    """The value of `disabled_checks` with which `jax.export.export` accepts jaxconv's custom calls.

    jax.export refuses custom calls that are not declared stable. jaxconv's are stable: the operands and attributes of a
    name never change, and a changed call gets a name with another version at its end::

        exported = jax.export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(*args)
        blob = exported.serialize(vjp_order=1)

    A process that loads the program must `import jaxconv` before it runs it, because the import registers the calls
    with XLA. Otherwise XLA says "No FFI handler registered for jaxconv_conv_v2"::

        import jaxconv

        f = jaxconv.check_exported(jax.export.deserialize(blob)).call

    Returns:
      One check per target, and one for XLA's own "LayoutConstraint", which its 8-bit products have on GPUs.

    Exporting fixes each call's plan. Platforms need not be present: a program that a laptop exports with
    platforms=("cpu", "cuda") holds CUDA calls if its jaxconv was built with CUDA, and XLA's own operations otherwise.
    XLA runs calls with symbolic extents (a batch, or the space of a convolution), and programs over an Auto mesh of
    several devices.

    jax 0.10 cannot read a program with custom calls that jax 0.11 or newer exported. `portable_exported` makes one that
    it can read.
    """
    return [export.DisabledSafetyCheck.custom_call(target) for target in (*_targets(), "LayoutConstraint")]


def check_exported(exported: export.Exported) -> export.Exported:
    """Returns `exported` itself, if this version of jaxconv has all of jaxconv's targets that it calls.

    Example::

        f = jax.jit(lambda x: jaxconv.layernorm(x))
        exported = jax.export.export(f, disabled_checks=jaxconv.export_checks())(jnp.ones((4, 8)))
        loaded = jaxconv.check_exported(jax.export.deserialize(exported.serialize()))
        y = loaded.call(jnp.ones((4, 8)))

    The check is optional: importing jaxconv is enough to run the program.

    Raises:
      ValueError: with the names of missing targets. XLA would find them only when it compiles the program.
      TypeError: if `exported` is no `jax.export.Exported`.
    """
    _expect_exported("check_exported", exported)
    # After "custom_call" alone: the module's text also names files and functions, which may be called anything.
    called = set(re.findall(r"\bcustom_call @(jaxconv_\w+_v\d+)\b", str(exported.mlir_module())))
    unknown = sorted(called - set(_targets()))
    if unknown:
        raise ValueError(
            f"the exported program {exported.fun_name!r} calls {', '.join(unknown)}, which this jaxconv does not have: "
            f"another version exported it. Export it again with this one, or load it with that one. "
            f"Known: {', '.join(_targets())}"
        )
    return exported


def portable_exported(exported: export.Exported) -> export.Exported:
    """Returns `exported` and its gradients in the StableHLO of the oldest JAX that this jaxconv supports.

    jax.export writes the version of StableHLO of about a month before. JAX of that age and newer can read it. jax 0.10
    cannot read the custom calls that jax 0.11 and newer write ("Failed to deserialize StableHLO"). For jax 0.10,
    convert the program with this function::

        exported = jax.export.export(jax.jit(f), disabled_checks=jaxconv.export_checks())(*args)
        blob = jaxconv.portable_exported(exported).serialize(vjp_order=1)

    The program is the same, and newer versions of JAX load it too.

    Raises:
      ValueError: if the older StableHLO cannot express the program, with StableHLO's reason.
      TypeError: if `exported` is no `jax.export.Exported`.
    """
    _expect_exported("portable_exported", exported)
    gradient = exported._get_vjp
    try:
        serialized = compat.in_stablehlo(exported.mlir_module_serialized, OLDEST_STABLEHLO)
    except Exception as error:  # MLIRError, and whatever another version calls it
        raise ValueError(
            f"portable_exported: {exported.fun_name!r} cannot be written in StableHLO {OLDEST_STABLEHLO}: {error}"
        ) from error
    return dataclasses.replace(
        exported,
        mlir_module_serialized=serialized,
        _get_vjp=gradient and (lambda _: portable_exported(gradient(exported))),
    )


OLDEST_STABLEHLO = "1.16.0"  # that of jaxlib 0.10.0


def _expect_exported(name: str, exported: object) -> None:
    if not isinstance(exported, export.Exported):
        hint = "; jax.export.deserialize makes one of bytes" if isinstance(exported, (bytes, bytearray)) else ""
        raise TypeError(f"{name}: expected a jax.export.Exported, got {type(exported).__name__}{hint}")


def _targets() -> list[str]:
    return sorted({made.target for made in primitives.KERNELS.values()})
