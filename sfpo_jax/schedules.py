"""Schedules: functions from the step to a float32 scalar."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax._validate import Scalar, check_at_least, check_range, is_known

Schedule = Callable[[Any], jax.Array]


def cosine_sparsity(
    base: Scalar, total_steps: Scalar, final: Scalar = 0.0, begin: Scalar = 0
) -> Schedule:
    r"""Sparsity annealed from `base` to `final` along half a cosine.

    .. math::
        s(t) = s_\text{final}
               + (s_\text{base} - s_\text{final})\,\frac{1 + \cos(\pi t / T)}{2}

    with t counted from step 0 of the run, s(t) = 0 before `begin`, and s(t) = `final`
    from T on. `final=0` is the published formula of SFPO, `final=0.3` its published
    cure for a loss that oscillates late. 1-bit Adam wants `begin` at the end of its
    warm-up: the variance it freezes must come from dense gradients.

    Args:
      base: share of entries dropped at step 0, in [0, 1].
      total_steps: T, the steps of the run.
      final: share of entries dropped at step T and after it, in [0, 1].
      begin: first step that drops anything, at most `total_steps`.

    Returns:
      A function from the step (int scalar, Python or traced) to a float32 scalar.

    Raises:
      ValueError: an argument outside its range.

    Example:
      >>> import sfpo_jax as sfpo
      >>> schedule = sfpo.cosine_sparsity(0.7, total_steps=100, final=0.3, begin=10)
      >>> [round(float(schedule(t)), 3) for t in (0, 9, 10, 50, 100, 1000)]
      [0.0, 0.0, 0.69, 0.5, 0.3, 0.3]
    """
    check_range("base", base, 0.0, 1.0, "the share of entries dropped at first")
    check_range("final", final, 0.0, 1.0, "the share of entries dropped at the end")
    check_at_least("total_steps", total_steps, 1, "the number of steps of the run")
    if is_known(total_steps):
        limit = float(np.asarray(total_steps))
        check_range("begin", begin, 0, limit, "the first step that drops entries")

    def schedule(step: Any) -> jax.Array:
        step = jnp.asarray(step)
        high, low = _float32(base), _float32(final)
        progress = jnp.minimum(step.astype(jnp.float32) / _float32(total_steps), 1.0)
        cosine = 0.5 * (1.0 + jnp.cos(np.float32(np.pi) * progress))
        value = low + (high - low) * cosine
        # Rounding may leave [0, 1] by an ulp.
        value = jnp.clip(value, 0.0, 1.0).astype(jnp.float32)
        return jnp.where(step < begin, jnp.float32(0.0), value)

    return schedule


def _float32(value: Scalar) -> jax.Array:
    return jnp.asarray(value, jnp.float32)
