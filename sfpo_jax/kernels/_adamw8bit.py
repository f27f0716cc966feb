r"""AdamW whose moments take one byte an entry, each read and written once a step.

With dequantised m and v, as `_quantized` keeps them, and blocks of one scale,

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    u = m factor / (sqrt(v) + eps), 0 where v is not positive

and back to bytes, v with the rounding at random of `_hash`; parameters go to
p - learning_rate (u + weight_decay p). The largest root of a block makes its scale, so
a block is passed over twice: array operations take floats to memory between the passes,
the native kernel keeps them in the first-level cache.

The factor and eps hold the corrections of both moments, in the order of operations that
Kingma & Ba 2015 (https://arxiv.org/abs/1412.6980, section 2) call the more efficient
one. Here it is: what the native kernel waits for is the divider, and so it takes three
square roots and one division an entry, all true ones. The twin's operations are the
same, and XLA is kept from contracting the sums: directions and parameters are equal,
bytes but for one in ten thousand, and that by one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sfpo_jax.kernels._hash import Seed, round_at_random
from sfpo_jax.kernels._native import alike, choose, ffi_call, is_float32
from sfpo_jax.kernels._quantized import Quantized, dequantize, quantize
from sfpo_jax.kernels._rounded import uncontracted

Arrays = Sequence[jax.Array]


class AdamwNumbers(NamedTuple):
    """The scalars of a step, each a number or a float scalar array."""

    b1: Any
    b2: Any
    factor: Any  # sqrt(1 - b2^t) / (1 - b1^t)
    eps: Any  # eps sqrt(1 - b2^t)
    learning_rate: Any = 0.0  # of parameters alone
    weight_decay: Any = 0.0  # likewise


class Adamw8bitResult(NamedTuple):
    """New arrays, in the order of the leaves."""

    values: list[jax.Array]  # directions, or parameters
    mu: list[Quantized]
    nu: list[Quantized]


class _Operands(NamedTuple):
    numbers: jax.Array  # float[8]: b1, 1 - b1, b2, 1 - b2, and the others in order
    seeds: jax.Array  # uint32[2], uint32[2 + 2 * leaves] to round parameters at random
    taken: jax.Array  # bool[]
    grads: tuple[jax.Array, ...]
    mu: tuple[Quantized, ...]
    nu: tuple[Quantized, ...]
    parameters: tuple[jax.Array, ...]  # () for directions


def adamw8bit_directions(
    grads: Arrays,
    mu: Sequence[Quantized],
    nu: Sequence[Quantized],
    numbers: AdamwNumbers,
    seed: Seed,
    taken: jax.Array,
) -> Adamw8bitResult:
    """Directions u, and the moments after them.

    Args:
      grads: g, all float32 or all float64, of one axis or more.
      mu: m of each, signed, with scales of that dtype.
      nu: v of each, unsigned, likewise.
      numbers: of this step.
      seed: for v's rounding, another one in each step.
      taken: bool[]; False: moments stay as they are, directions are 0, whatever the
        gradients are.
    """
    return _update(grads, mu, nu, (), numbers, (seed,), taken, (False,) * len(grads))


def adamw8bit_parameters(
    grads: Arrays,
    mu: Sequence[Quantized],
    nu: Sequence[Quantized],
    parameters: Arrays,
    numbers: AdamwNumbers,
    seed: Seed,
    taken: jax.Array,
    *,
    is_decayed: Sequence[bool],
    rounding: Sequence[Seed] = (),
) -> Adamw8bitResult:
    """New parameters in place of directions, in the buffers of the old if donated.

    Args:
      grads: float32, as all of `adamw8bit_directions`.
      mu: as there.
      nu: as there.
      parameters: float32 or bfloat16, of the gradients' shapes.
      numbers: of this step.
      seed: for v's rounding.
      taken: False: everything stays as it is.
      is_decayed: whether weight decay is for a leaf.
      rounding: a seed for each leaf, to round bfloat16 at random as
        `transforms.make_rounding("stochastic")` does; () rounds to nearest.
    """
    # The handler takes bfloat16 last.
    order = sorted(range(len(grads)), key=lambda i: _is_narrow(parameters[i]))

    def sort(items: Sequence[Any]) -> list[Any]:
        return [items[i] for i in order] if items else []

    found = _update(
        sort(grads),
        sort(mu),
        sort(nu),
        sort(parameters),
        numbers,
        (seed, *sort(rounding)),
        taken,
        sort(is_decayed),
    )
    back = [order.index(i) for i in range(len(order))]
    return Adamw8bitResult(
        [found.values[i] for i in back],
        [found.mu[i] for i in back],
        [found.nu[i] for i in back],
    )


def adam_direction(m: jax.Array, v: jax.Array, factor: Any, eps: Any) -> jax.Array:
    """u; where v is 0 no gradient ever was, and without eps it would be 0 / 0."""
    u = m * factor / (jnp.sqrt(v) + eps)
    return jnp.where(v > 0, u, 0)


def _update(
    grads: Arrays,
    mu: Sequence[Quantized],
    nu: Sequence[Quantized],
    parameters: Arrays,
    numbers: AdamwNumbers,
    seeds: Sequence[Seed],
    taken: jax.Array,
    is_decayed: Sequence[bool],
) -> Adamw8bitResult:
    if not grads:
        return Adamw8bitResult([], [], [])
    dtype, (b1, b2, *others) = grads[0].dtype, numbers
    # 1 - b1 of a Python number is rounded once, as it is in an expression of arrays.
    scalars = [b1, 1 - b1, b2, 1 - b2, *others]
    operands = alike(
        _Operands(
            jnp.stack([jnp.asarray(x, dtype) for x in scalars]),
            jnp.stack([word for seed in seeds for word in seed]),
            taken,
            tuple(grads),
            tuple(mu),
            tuple(nu),
            tuple(parameters),
        )
    )

    def twin(operands: _Operands) -> Adamw8bitResult:
        return _twin(operands, is_decayed)

    def native(operands: _Operands) -> Adamw8bitResult:
        return _native(operands, is_decayed)

    wide = [p for p in parameters if not _is_narrow(p)]
    if not is_float32([*grads, *(q.scales for q in (*mu, *nu)), *wide]):
        return twin(operands)
    return choose(native, twin, operands)


def _twin(operands: _Operands, is_decayed: Sequence[bool]) -> Adamw8bitResult:
    b1, m_share, b2, v_share, factor, eps, rate, decay = (
        operands.numbers[i] for i in range(8)
    )
    whole = uncontracted(b1)
    taken, seeds = operands.taken, operands.seeds.reshape(-1, 2)
    values, new_mu, new_nu = [], [], []
    for place, (g, mu, nu) in enumerate(
        zip(operands.grads, operands.mu, operands.nu, strict=True)
    ):
        # What is not finite must not reach a moment, even one that is dropped.
        g = jnp.where(taken, g, 0)
        m = whole(b1 * dequantize(mu)) + whole(m_share * g)
        v = whole(b2 * dequantize(nu)) + whole(v_share * g * g)
        u = adam_direction(m, v, factor, eps)
        new_mu.append(optax.tree.where(taken, quantize(m), mu))
        new_v = quantize(v, False, seed=Seed(*seeds[0]))
        new_nu.append(optax.tree.where(taken, new_v, nu))
        if not operands.parameters:
            values.append(jnp.where(taken, u, 0))
            continue
        p = operands.parameters[place]
        moved = p.astype(u.dtype)
        moved -= whole(rate * (u + whole(decay * moved) if is_decayed[place] else u))
        if _is_narrow(p) and len(seeds) > 1:
            moved = round_at_random(moved, Seed(*seeds[1 + place]))
        values.append(jnp.where(taken, moved.astype(p.dtype), p))
    return Adamw8bitResult(values, new_mu, new_nu)


def _native(operands: _Operands, is_decayed: Sequence[bool]) -> Adamw8bitResult:
    grads, mu, nu, parameters = operands[3:]
    count = len(grads)
    state = [
        *(q.values for q in mu),
        *(q.scales for q in mu),
        *(q.values for q in nu),
        *(q.scales for q in nu),
    ]
    values = parameters or grads
    found = ffi_call(
        "sfpo_adamw8bit",
        [*operands[:3], *grads, *state, *parameters],
        [(x.shape, x.dtype) for x in (*state, *values)],
        {
            "leaves": count,
            "has_parameters": bool(parameters),
            "narrow": sum(map(_is_narrow, parameters)),
            "is_stochastic": operands.seeds.shape[0] > 2,
            "is_decayed": np.array(is_decayed, np.int64),
            "widths": np.array([g.shape[-1] for g in grads], np.int64),
            "blocks": np.array([q.block_size for q in mu], np.int64),
        },
        _aliases(count, bool(parameters)),
    )
    parts = [found[i * count : (i + 1) * count] for i in range(5)]

    def moments(values: Arrays, scales: Arrays) -> list[Quantized]:
        pairs = zip(values, scales, mu, strict=True)
        return [Quantized(codes, scale, q.block_size) for codes, scale, q in pairs]

    return Adamw8bitResult(parts[4], moments(*parts[:2]), moments(*parts[2:4]))


def _aliases(count: int, has_parameters: bool) -> dict[int, int]:
    """Everything is written where it was read, directions over the gradients."""
    first = 3 + count
    pairs = {first + i: i for i in range(4 * count)}
    values = first + 4 * count if has_parameters else 3
    return pairs | {values + i: 4 * count + i for i in range(count)}


def _is_narrow(p: jax.Array) -> bool:
    return p.dtype == jnp.bfloat16
