"""Numbers that a loss function reports beside its loss, and how they are averaged."""

from typing import Any

import jax
import jax.numpy as jnp

from sfpo_jax.parallel._leafwise import average

# What a step reports by itself.
_OWN = ("loss", "grad_norm", "skipped")


def as_metrics(loss: jax.Array, aux: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its aux as numbers that a mean is right of, float32 at least.

    A count or a yes or no is averaged, too: over ranks and microbatches alike.

    Raises:
      ValueError: a name that the step itself gives.
    """
    taken = sorted(set(aux) & set(_OWN))
    if taken:
        raise ValueError(
            f"aux of the loss function has {', '.join(map(repr, taken))}, which the "
            "step reports by itself: give it another name."
        )
    return _wide(loss), {name: _wide(x) for name, x in aux.items()}


def mean_metrics(loss: jax.Array, aux: dict[str, jax.Array], axes: Any) -> Any:
    """What a step reports of this batch, means over the ranks."""
    return average({**aux, "loss": loss}, axes)


def _wide(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    is_wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4
    return x if is_wide else x.astype(jnp.float32)
