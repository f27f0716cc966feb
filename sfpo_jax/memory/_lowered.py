"""What JAX knows about a lowered program and has no public name for.

Read here and nowhere else, and only where it is there: without it a plan tells less.
"""

from typing import Any, TypeVar

import jax

T = TypeVar("T")


def program_devices(lowered: Any) -> tuple[Any, ...]:
    """The devices a program was lowered for; JAX's default one when not known."""
    lowering = getattr(lowered, "_lowering", None)
    found = getattr(lowering, "_device_list", None)
    return tuple(found) if found is not None else tuple(jax.devices()[:1])


def compiler_options(lowered: Any) -> str:
    """The options that `jax.jit` was given for the compiler; "" when not known."""
    found = getattr(getattr(lowered, "_lowering", None), "_compiler_options_kvs", None)
    return repr(sorted(found)) if found else ""


def keep_used(classes: list[T], lowered: Any) -> list[T]:
    """Of a list as long as the arguments, what stands for those the program uses.

    `jax.jit` drops the others; the compiled program's parameters are the rest.
    """
    lowering = getattr(lowered, "_lowering", None)
    used = (getattr(lowering, "compile_args", None) or {}).get("kept_var_idx")
    if used is None:
        return classes
    return [classes[place] for place in sorted(used) if place < len(classes)]
