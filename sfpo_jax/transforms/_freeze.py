"""When 1-bit Adam freezes its variance: at a step, or when the variance is stable."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax._validate import Scalar, check_at_least, is_known

WarmupSteps = Scalar | str

# Tang et al. 2021, section 7.1: the variance is stable when its norm is within 4 % of
# what it was 1 / (1 - b2) steps before.
_STABLE_RATIO = 0.96
# A later freeze would leave less than four fifths of the run to save anything in.
_LATEST_SHARE = 5
_NEVER = int(np.iinfo(np.int32).max)


class FreezeState(NamedTuple):
    """When the variance freezes."""

    step: jax.Array  # int32[], W; 2**31 - 1 until the rule has decided
    history: Any  # float32[lag], past norms of the variance as a ring; () if not auto


class FreezeRule(NamedTuple):
    """A pair of pure functions.

    Attributes:
      init: () -> FreezeState.
      observe: (state, steps done, sum of v / (1 - b2^t)) -> FreezeState, called
        after each step of the warm-up.
    """

    init: Callable[[], FreezeState]
    observe: Callable[[FreezeState, jax.Array, jax.Array], FreezeState]


def freeze_rule(
    warmup_steps: WarmupSteps, total_steps: Scalar | None, b2: Scalar
) -> FreezeRule:
    """The rule for `warmup_steps`.

    Args:
      warmup_steps: W, the number of dense steps, or "auto".
      total_steps: steps of the run; needed by "auto", checked against W otherwise.
      b2: decay of the variance.

    Raises:
      ValueError: W below 1, W above the run, or "auto" without `total_steps`.
    """
    if isinstance(warmup_steps, str):
        if warmup_steps != "auto":
            raise ValueError(
                f'`warmup_steps` must be a number or "auto", got {warmup_steps!r}.'
            )
        if not is_known(total_steps) or not is_known(b2):
            raise ValueError(
                '`warmup_steps="auto"` needs `total_steps`, the steps of the run, and '
                "a constant `b2`: the freeze comes at 20 % of the run at the latest. "
                'With inject_hyperparams, static_args=("total_steps", "b2").'
            )
        steps, decay = _whole("total_steps", total_steps), float(np.asarray(b2))
        check_at_least("total_steps", steps, 2, "the number of steps of the run")
        return _when_stable(steps, decay)
    check_at_least(
        "warmup_steps",
        warmup_steps,
        1,
        "the number of dense steps, without which there is no variance to divide by",
    )
    if is_known(warmup_steps):
        warmup_steps = _whole("warmup_steps", warmup_steps)
        if is_known(total_steps) and warmup_steps > _whole("total_steps", total_steps):
            raise ValueError(
                f"`warmup_steps` must be at most `total_steps`, got {warmup_steps} and "
                f"{total_steps}: the run would end before anything is compressed; 10 "
                "to 20 % of the run is usual."
            )
    return _at_step(warmup_steps)


def _whole(name: str, value: Any) -> int:
    if int(value) != value:
        raise ValueError(f"`{name}` must be a whole number of steps, got {value}.")
    return int(value)


def _at_step(warmup_steps: Scalar) -> FreezeRule:
    def init() -> FreezeState:
        return FreezeState(jnp.asarray(warmup_steps).astype(jnp.int32), ())

    def observe(state: FreezeState, count: jax.Array, norm: jax.Array) -> FreezeState:
        del count, norm
        return state

    return FreezeRule(init, observe)


def _when_stable(total_steps: int, b2: float) -> FreezeRule:
    latest = max(1, total_steps // _LATEST_SHARE)
    lag = max(1, round(1 / (1 - b2))) if b2 < 1 else latest

    def init() -> FreezeState:
        history = jnp.zeros([lag], jnp.float32) if lag < latest else ()
        return FreezeState(jnp.int32(_NEVER), history)

    def observe(state: FreezeState, count: jax.Array, norm: jax.Array) -> FreezeState:
        is_due = count >= latest
        history = state.history
        if lag < latest:
            norm = norm.astype(jnp.float32)
            place = count % lag
            past = history[place]
            ratio = jnp.minimum(norm, past) / jnp.maximum(norm, past)
            # A variance that is zero everywhere gives 0 / 0, which is not stable.
            is_due |= (count > lag) & (ratio >= _STABLE_RATIO)
            history = history.at[place].set(norm)
        return FreezeState(jnp.where(is_due, count, state.step), history)

    return FreezeRule(init, observe)
