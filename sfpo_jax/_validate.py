"""Checks of arguments at build time.

Optax's ``inject_hyperparams`` turns numbers into traced arrays; a value that is not
known yet passes, since it was checked when it was a number.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A number; what `inject_hyperparams` traces arrives as an array.
Scalar = float | jax.Array


def is_known(value: Any) -> bool:
    """True for a Python or NumPy number, False for arrays that JAX traces or holds."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def check_number(name: str, value: Any) -> None:
    """Refuses what is neither a number nor an array."""
    if not (is_known(value) or isinstance(value, (jax.Array, np.ndarray))):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")


def check_range(
    name: str,
    value: Any,
    low: float,
    high: float,
    meaning: str,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raises ValueError unless low <= value <= high (strictly where open)."""
    check_number(name, value)
    if not is_known(value):
        return
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}"
        interval += ")" if open_high else "]"
        raise ValueError(
            f"`{name}` must lie in {interval}, got {value!r}: it is {meaning}."
        )


def check_at_least(name: str, value: Any, low: float, meaning: str) -> None:
    """Raises ValueError unless value >= low (NaN fails)."""
    check_number(name, value)
    if is_known(value) and not value >= low:
        raise ValueError(
            f"`{name}` must be at least {low:g}, got {value!r}: it is {meaning}."
        )


def check_positive(name: str, value: Any, meaning: str) -> None:
    """Raises ValueError unless 0 < value < infinity."""
    check_range(name, value, 0, float("inf"), meaning, open_low=True, open_high=True)


def check_learning_rate(learning_rate: Any) -> None:
    """A schedule, or a number that is not negative."""
    if not callable(learning_rate):
        check_at_least(
            "learning_rate",
            learning_rate,
            0.0,
            "the step size, and a negative one would climb; pass it positive",
        )


def check_real(tree: Any) -> None:
    """Raises TypeError for a tree with a complex leaf, which nothing here is for."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"leaf {jax.tree_util.keystr(path)} is {jnp.result_type(leaf)}: "
                "gradients of complex numbers are neither compressed nor averaged "
                "here; keep real and imaginary parts as two leaves."
            )
