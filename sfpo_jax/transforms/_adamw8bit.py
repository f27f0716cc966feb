r"""AdamW whose moments take one byte an entry, or less.

Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization",
https://arxiv.org/abs/1711.05101, with the states of Dettmers et al. 2022, "8-bit
Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861; see
`kernels._quantized` and `_factored` for how they are kept.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax._validate import Scalar, check_at_least, check_range
from sfpo_jax.collectives import all_finite, widen
from sfpo_jax.kernels import (
    AdamwNumbers,
    Quantized,
    Seed,
    adam_direction,
    adamw8bit_directions,
    adamw8bit_parameters,
    make_seed,
)
from sfpo_jax.transforms._factored import Factored
from sfpo_jax.transforms._in_place import (
    InPlaceTransformation,
    Target,
    step_rule,
)
from sfpo_jax.transforms._moments import (
    bias_correction,
    load,
    next_variance,
    resolve_kind,
    store,
    zeros_moment,
)
from sfpo_jax.transforms._state import MaskOrFn, Selection, increment, select

_FLOATS = ("float32", "bfloat16", "float64")


class Adamw8bitState(NamedTuple):
    """State of `adamw8bit`; a tree has `optax.MaskedNode()` for leaves without."""

    # Steps that were not skipped, int32[].
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Any  # tree, first moment: Quantized, or an array
    nu: Any  # tree, second moment: Quantized, Factored, or an array


def adamw8bit(
    learning_rate: Scalar | Callable[[jax.Array], Any],
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    mu_dtype: Any = "int8",
    nu_dtype: Any = "int8",
    mask: MaskOrFn = None,
) -> InPlaceTransformation:
    r"""AdamW with 8-bit moments: 2.03 bytes a parameter in place of 8.

    .. math::
        m = b_1 m + (1 - b_1) g \qquad v = b_2 v + (1 - b_2) g^2 \qquad
        p \leftarrow p - \eta \left( \frac{m / (1 - b_1^t)}
        {\sqrt{v / (1 - b_2^t)} + \epsilon} + \lambda p \right)

    An update uses m and v as they are before they are rounded; with a factored v it is
    at most the learning rate (before decay), for the mean of g^2 that v estimates is no
    less than m^2. Leaves of under 4,096
    entries, or of a last axis under 16, keep them as floats. The arithmetic is in
    float32, float64 for float64 leaves; updates have the dtype of the gradients.

    A step whose gradient is not finite is skipped: zero updates, all state as it was.
    Everything is local: inside `shard_map` reduce the gradients first, and agree on
    skipping where each device has a shard of them.

    Args:
      learning_rate: a number, or a schedule of the steps that were not skipped.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the denominator.
      weight_decay: decoupled decay.
      mu_dtype: of the first moment: "int8", float32, bfloat16; None = float32.
      nu_dtype: of the second moment: "int8", "factored" (means of rows and columns,
        next to nothing a parameter, of leaves of two axes), float32, bfloat16; None =
        float32.
      mask: leaves to decay, a tree of bools or a function of the parameters to one.

    Returns:
      The transformation. `jax.vmap(tx.init)` makes the state of stacked layers.

    Raises:
      ValueError: an argument outside its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> tx = sfpo.adamw8bit(0.1, weight_decay=0.01)
      >>> params = jnp.ones((64, 64))
      >>> state = tx.init(params)
      >>> state.mu
      Quantized(int8[64, 64], blocks of 64)
      >>> updates, state = tx.update(2 * params, state, params)
      >>> print(updates[0, 0].round(3))
      -0.101
    """
    rule = step_rule(learning_rate, weight_decay, mask)
    check_range("b1", b1, 0.0, 1.0, "a decay factor", open_high=True)
    check_range("b2", b2, 0.0, 1.0, "a decay factor", open_high=True)
    check_at_least("eps", eps, 0.0, "added to the denominator")
    mu_kind = resolve_kind("mu_dtype", mu_dtype, (*_FLOATS, "int8"))
    nu_kind = resolve_kind("nu_dtype", nu_dtype, (*_FLOATS, "int8", "factored"))

    def init_fn(params: optax.Params) -> Adamw8bitState:
        chosen = select(params)

        def zeros(kind: Any, signed: bool) -> Any:
            leaves = chosen.chosen()
            return chosen.state(
                [
                    zeros_moment(x.shape, kind, widen(x).dtype, signed=signed)
                    for x in leaves
                ]
            )

        return Adamw8bitState(
            count=jnp.zeros([], jnp.int32),
            mu=zeros(mu_kind, True),
            nu=zeros(nu_kind, False),
        )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Adamw8bitState]:
        del extra_args
        chosen, target = select(updates), rule.target(updates, params, state.count)
        found, new, taken = step(chosen, state, None)
        steps = [jnp.where(taken, x, 0) for x in target.steps(found)]
        return chosen.replace(steps), new

    def apply_fn(updates: Any, state: Any, params: Any) -> tuple[Any, Adamw8bitState]:
        chosen, target = select(updates), rule.target(updates, params, state.count)
        moved, new, _ = step(chosen, state, target)
        leaves = chosen.treedef.flatten_up_to(params)
        return chosen._replace(leaves=leaves).replace(moved), new

    def step(
        chosen: Selection, state: Any, target: Target | None
    ) -> tuple[list[jax.Array], Adamw8bitState, jax.Array]:
        taken = all_finite(chosen.chosen(), None)
        count = increment(state.count)
        values, mu, nu = _adam(
            [widen(g) for g in chosen.chosen()],
            chosen.read(state.mu),
            chosen.read(state.nu),
            count,
            (b1, b2, eps),
            make_seed(count),
            taken,
            target,
        )
        new = Adamw8bitState(
            count=jnp.where(taken, count, state.count),
            mu=chosen.state(mu),
            nu=chosen.state(nu),
        )
        return values, new, taken

    return InPlaceTransformation(init_fn, update_fn, apply_fn)


def _adam(
    grads: Sequence[jax.Array],
    mu: Sequence[Any],
    nu: Sequence[Any],
    count: jax.Array,
    numbers: tuple[Scalar, Scalar, Scalar],
    seed: Seed,
    taken: jax.Array,
    target: Target | None,
) -> tuple[list[jax.Array], list[Any], list[Any]]:
    """(directions, new first moments, new second moments) of the leaves in order.

    With a target, its new parameters in place of the directions.
    """
    found: list[Any] = [None] * len(grads)
    together: dict[Any, list[int]] = {}
    for i, (g, m, v) in enumerate(zip(grads, mu, nu, strict=True)):
        if isinstance(m, Quantized) and isinstance(v, Quantized):
            together.setdefault(g.dtype, []).append(i)
            continue
        value, *new = _adam_leaf(jnp.where(taken, g, 0), m, v, count, numbers, seed)
        if target is not None:
            own = target.of([i])
            value = jnp.where(taken, own.moved([value])[0], own.params[0])
        found[i] = (value, *optax.tree.where(taken, new, [m, v]))
    b1, b2, _ = numbers
    for dtype, places in together.items():
        corrected = _corrected(numbers, count, dtype)
        g, m, v = (
            [grads[i] for i in places],
            [mu[i] for i in places],
            [nu[i] for i in places],
        )
        if target is None:
            scalars = AdamwNumbers(b1, b2, *corrected)
            result = adamw8bit_directions(g, m, v, scalars, seed, taken)
        else:
            own = target.of(places)
            scalars = AdamwNumbers(b1, b2, *corrected, own.rate, own.decay)
            result = adamw8bit_parameters(
                g, m, v, own.params, scalars, seed, taken, is_decayed=own.is_decayed
            )
        for i, *new in zip(places, *result, strict=True):
            found[i] = new
    values, new_mu, new_nu = zip(*found, strict=True) if found else ((), (), ())
    return list(values), list(new_mu), list(new_nu)


def _adam_leaf(
    g: jax.Array,
    mu: Any,
    nu: Any,
    count: jax.Array,
    numbers: tuple[Scalar, Scalar, Scalar],
    seed: Seed,
) -> tuple[jax.Array, Any, Any]:
    """One leaf whose moments are not both bytes."""
    b1, b2, _ = numbers
    m = b1 * load(mu, g.dtype) + (1 - b1) * g
    v, new_nu = next_variance(nu, g, b2, seed)
    u = adam_direction(m, v, *_corrected(numbers, count, g.dtype))
    if isinstance(nu, Factored):
        # A mean of squares is no less than the square of the mean, m; the estimate by
        # rows and columns can be, and its entry would make a step without bounds.
        u = jnp.clip(u, -1, 1)
    return u, store(m, mu), new_nu


def _corrected(
    numbers: tuple[Scalar, Scalar, Scalar], count: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """The factor of m and the eps that make up for moments that began as zeros."""
    b1, b2, eps = numbers
    root = jnp.sqrt(bias_correction(b2, count, dtype))
    return root / bias_correction(b1, count, dtype), eps * root
