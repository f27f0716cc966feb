r"""An exponential moving average of the parameters, for evaluation.

    m_t = d m_(t-1) + (1 - d) p_t,   m_0 = 0,   average_t = m_t / (1 - d^t)

Without the division the first 1 / (1 - d) steps would pull the average to zero; started
at the parameters instead, it would remember the random ones for as long.

It is a small program of its own beside the training step. As part of the optimizer
state it would go through the step's `shard_map`, count among what a skipped step
restores, and have to see the parameters after the update, which a gradient
transformation does not. The step donates its state, and the parameters are read
before the next step may write over them: JAX orders the two.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax._validate import check_range
from sfpo_jax.collectives import is_float


class EmaState(NamedTuple):
    """The average so far; saved with a checkpoint."""

    # int32[], steps averaged
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mean: Any  # float32 like the floating parameters; of others the latest


class Ema:
    """Averages parameters over the steps of a run.

    Args:
      decay: d, in (0, 1); the average reaches back about 1 / (1 - d) steps.

    Raises:
      ValueError: `decay` outside of (0, 1).

    Example:
      >>> import jax.numpy as jnp
      >>> ema = Ema(0.5)
      >>> state = ema.init({"w": jnp.zeros(2)})
      >>> for value in (1.0, 4.0):
      ...     state = ema.update(state, {"w": jnp.full(2, value)})
      >>> ema.average(state, {"w": jnp.zeros(2)})["w"].tolist()
      [3.0, 3.0]
    """

    def __init__(self, decay: float) -> None:
        check_range(
            "decay",
            decay,
            0.0,
            1.0,
            "the share of the average that a step keeps, e.g. 0.999",
            open_low=True,
            open_high=True,
        )
        self._decay = decay
        self._update = jax.jit(self._next, donate_argnums=0)
        self._average = jax.jit(self._unbiased)

    def init(self, params: Any) -> EmaState:
        """The average of no parameters, sharded as they are."""
        # None: where the program's devices are, replicated.
        count: Any = None
        shardings = EmaState(count, jax.tree.map(lambda p: p.sharding, params))
        return jax.jit(self._zeros, out_shardings=shardings)(params)

    def update(self, state: EmaState, params: Any) -> EmaState:
        """The average with one more; `state` is donated, `params` are only read."""
        return self._update(state, params)

    def average(self, state: EmaState, params: Any) -> Any:
        """The average, of the dtypes of `params`; zeros where nothing was averaged."""
        return self._average(state, params)

    def _zeros(self, params: Any) -> EmaState:
        return EmaState(
            jnp.int32(0),
            jax.tree.map(
                lambda p: jnp.zeros(p.shape, jnp.float32 if is_float(p) else p.dtype),
                params,
            ),
        )

    def _next(self, state: EmaState, params: Any) -> EmaState:
        def blend(mean: jax.Array, p: jax.Array) -> jax.Array:
            if not is_float(p):
                return p
            return mean + (p.astype(jnp.float32) - mean) * jnp.float32(1 - self._decay)

        return EmaState(state.count + 1, jax.tree.map(blend, state.mean, params))

    def _unbiased(self, state: EmaState, params: Any) -> Any:
        # 1 - d^t, exact where d is close to 1.
        count = jnp.maximum(state.count, 1).astype(jnp.float32)
        weight = -jnp.expm1(count * jnp.log1p(jnp.float32(self._decay - 1)))

        def divide(mean: jax.Array, p: jax.Array) -> jax.Array:
            return (mean / weight).astype(p.dtype) if is_float(p) else mean

        return jax.tree.map(divide, state.mean, params)
