r"""One bit an entry, over the leaves of a bucket: encoded, averaged, decoded.

With B the blocks of a leaf, w the relaxation and sums over live entries alone,

    c = b1 m + (1 - b1) x + e        what a rank wants to send
    scale = w mean_B |c|             signs = bit 31 of c
    e = c - sign(c) scale            what is lost of it

Three kernels, each one pass over memory where array operations take four to eight and
write what they pass on. Leaves are never joined to rows of floats: only their bits are.
A sum over a block is made in another order than by the twin, which changes scales by
rounding; signs are alike bit for bit where b1 is 0 or without momentum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.kernels._bits import pack_bits, unpack_bits
from sfpo_jax.kernels._native import alike, choose, ffi_call, is_float32
from sfpo_jax.kernels._rows import Bucket

Arrays = Sequence[jax.Array]


class EncodedSigns(NamedTuple):
    """Leaves as signs; a tuple has one array for each group of the bucket."""

    signs: tuple[jax.Array, ...]  # uint8[rows, width / 8], bit 1 = negative
    live: tuple[jax.Array, ...]  # uint8[rows, width / 8], bit 1 = an entry that counts
    scales: tuple[jax.Array, ...]  # float[rows]
    error: tuple[jax.Array, ...]  # the leaves' shapes; () without error feedback


class ServedSigns(NamedTuple):
    """The encoded mean of some rows; one array a group."""

    signs: tuple[jax.Array, ...]  # uint8[rows, width / 8]
    scales: tuple[jax.Array, ...]  # float[rows]
    error: tuple[jax.Array, ...]  # float[rows, width]; () without error feedback


def encode_signs(
    bucket: Bucket,
    leaves: Arrays,
    *,
    momentum: Arrays = (),
    b1: Any = 0.0,
    error: Arrays = (),
    variance: Arrays = (),
    relaxation: float = 1.0,
) -> EncodedSigns:
    """Encodes the leaves of a bucket.

    Args:
      bucket: the layout.
      leaves: float arrays, all of one dtype, in the order of `bucket.leaves`; so are
        `momentum`, `error` and `variance`, where given.
      momentum: m; without it the leaves themselves are sent.
      b1: the share of m.
      error: what earlier steps lost.
      variance: entries are live where it is positive; () for all.
      relaxation: factor on the scales.

    Returns:
      Signs, live entries, scales and new errors. What is not live has error 0.
    """
    present = alike((tuple(leaves), tuple(momentum), tuple(error), tuple(variance)))
    share = alike((jnp.asarray(b1, leaves[0].dtype), present[0][0]))[0]

    def twin(share: jax.Array, arrays: Any) -> EncodedSigns:
        return _encode_twin(bucket, share, arrays, relaxation)

    def native(share: jax.Array, arrays: Any) -> EncodedSigns:
        return _encode_native(bucket, share, arrays, relaxation)

    everything = [x for group in present for x in group]
    if not is_float32(everything):
        return twin(share, present)
    return choose(native, twin, share, present)


def serve_signs(
    bucket: Bucket,
    signs: Arrays,
    scales: Arrays,
    live: Arrays,
    error: Arrays,
    ranks: int,
    relaxation: float,
) -> ServedSigns:
    """The mean of what `ranks` ranks have sent of some rows, encoded again.

    Args:
      bucket: the layout; of its groups only the widths are used.
      signs: uint8[ranks * rows, width / 8] a group, led by the rank.
      scales: float[ranks * rows] a group, likewise.
      live: uint8[rows, width / 8] a group.
      error: float[rows, width] a group, added to the mean; () for none.
      ranks: how many have sent.
      relaxation: factor on the new scales.
    """
    present = alike((tuple(signs), tuple(scales), tuple(live), tuple(error)))
    widths = [group.width for group in bucket.groups]

    def twin(arrays: Any) -> ServedSigns:
        return _serve_twin(widths, arrays, ranks, relaxation)

    def native(arrays: Any) -> ServedSigns:
        return _serve_native(widths, arrays, ranks, relaxation)

    if not is_float32([*scales, *error]):
        return twin(present)
    return choose(native, twin, present)


def decode_signs(
    bucket: Bucket,
    signs: Arrays,
    scales: Arrays,
    shapes: Sequence[Any],
    variance: Arrays = (),
) -> list[jax.Array]:
    """The leaves that signs stand for: +-scale, 0 where not live.

    Args:
      bucket: the layout.
      signs: uint8[rows, width / 8] a group.
      scales: float[rows] a group.
      shapes: of the leaves.
      variance: the leaves' shapes; entries are live where it is positive; () for all.
    """
    present = alike((tuple(signs), tuple(scales), tuple(variance)))

    def twin(arrays: Any) -> tuple[jax.Array, ...]:
        signs, scales, variance = arrays
        live = _live_rows(bucket, variance)
        rows = _decoded_rows(signs, scales, live)
        return tuple(_reshaped(bucket.unpack(rows), shapes))

    def native(arrays: Any) -> tuple[jax.Array, ...]:
        signs, scales, variance = arrays
        results = [(tuple(shape), jnp.float32) for shape in shapes]
        attributes = {"has_variance": bool(variance), **layout_attributes(bucket)}
        operands = [*signs, *scales, *variance]
        return tuple(ffi_call("sfpo_sign_decode", operands, results, attributes))

    if not is_float32([*scales, *variance]):
        return list(twin(present))
    return list(choose(native, twin, present))


def layout_attributes(bucket: Bucket) -> dict[str, np.ndarray]:
    """The layout as handlers read it: see `xla_ffi/core/pieces.h`."""
    fields: list[int] = []
    for number, group in enumerate(bucket.groups):
        for piece, row in zip(group.pieces, group.first_rows(), strict=True):
            place = bucket.leaves.index(piece.leaf)
            fields += [place, piece.start, piece.length, number, row]
    widths = [group.width for group in bucket.groups]
    return {"pieces": np.array(fields, np.int64), "widths": np.array(widths, np.int64)}


def _encode_twin(
    bucket: Bucket, share: jax.Array, arrays: Any, relaxation: float
) -> EncodedSigns:
    leaves, momentum, error, variance = arrays
    total = leaves
    if momentum:
        pairs = zip(momentum, leaves, strict=True)
        total = [share * m + (1 - share) * x for m, x in pairs]
    if error:
        total = [c + e for c, e in zip(total, error, strict=True)]
    live = _live_rows(bucket, variance)
    rows = bucket.pack_own(total)
    scales = tuple(
        mean_magnitude(c, m) * np.asarray(relaxation, c.dtype)
        for c, m in zip(rows, live, strict=True)
    )
    signs = tuple(pack_bits(jnp.signbit(c)) for c in rows)
    lost = ()
    if error:
        kept = zip(rows, scales, live, strict=True)
        lost = [
            jnp.where(m, c - with_sign(s, jnp.signbit(c), m), 0) for c, s, m in kept
        ]
        shapes = [x.shape for x in leaves]
        lost = tuple(_reshaped(bucket.unpack(lost), shapes))
    return EncodedSigns(signs, tuple(pack_bits(m) for m in live), scales, lost)


def _encode_native(
    bucket: Bucket, share: jax.Array, arrays: Any, relaxation: float
) -> EncodedSigns:
    leaves, momentum, error, variance = arrays
    groups = bucket.groups
    bits = [((g.rows, g.width // 8), jnp.uint8) for g in groups]
    scales = [((g.rows,), jnp.float32) for g in groups]
    lost = [(x.shape, jnp.float32) for x in error]
    first_error = 1 + len(leaves) + len(momentum)
    found = ffi_call(
        "sfpo_sign_encode",
        [share, *leaves, *momentum, *error, *variance],
        [*bits, *bits, *scales, *lost],
        {
            "leaves": len(leaves),
            "has_momentum": bool(momentum),
            "has_error": bool(error),
            "has_variance": bool(variance),
            "relaxation": np.float32(relaxation),
            **layout_attributes(bucket),
        },
        {first_error + i: 3 * len(groups) + i for i in range(len(error))},
    )
    count = len(groups)
    return EncodedSigns(
        signs=tuple(found[:count]),
        live=tuple(found[count : 2 * count]),
        scales=tuple(found[2 * count : 3 * count]),
        error=tuple(found[3 * count :]),
    )


def _serve_twin(
    widths: Sequence[int], arrays: Any, ranks: int, relaxation: float
) -> ServedSigns:
    signs, scales, live, error = arrays
    new_signs, new_scales, new_error = [], [], []
    for place, width in enumerate(widths):
        mask = unpack_bits(live[place], width)
        rows = mask.shape[0]
        everyone = jnp.broadcast_to(mask[None], (ranks, rows, width))
        negative = unpack_bits(signs[place], width)
        sent = with_sign(scales[place], negative, everyone.reshape(-1, width))
        total = jnp.sum(sent.reshape(ranks, rows, width), axis=0)
        total = total * np.asarray(1 / ranks, total.dtype)
        if error:
            total = total + error[place]
        scale = mean_magnitude(total, mask) * np.asarray(relaxation, total.dtype)
        negative = jnp.signbit(total)
        new_signs.append(pack_bits(negative))
        new_scales.append(scale)
        if error:
            lost = total - with_sign(scale, negative, mask)
            new_error.append(jnp.where(mask, lost, 0))
    return ServedSigns(tuple(new_signs), tuple(new_scales), tuple(new_error))


def _serve_native(
    widths: Sequence[int], arrays: Any, ranks: int, relaxation: float
) -> ServedSigns:
    signs, scales, live, error = arrays
    count = len(widths)
    results = [(x.shape, jnp.uint8) for x in live]
    results += [((x.shape[0],), jnp.float32) for x in live]
    results += [(x.shape, jnp.float32) for x in error]
    found = ffi_call(
        "sfpo_sign_serve",
        [*signs, *scales, *live, *error],
        results,
        {
            "ranks": ranks,
            "has_error": bool(error),
            "relaxation": np.float32(relaxation),
            "widths": np.array(widths, np.int64),
        },
        {3 * count + i: 2 * count + i for i in range(len(error))},
    )
    return ServedSigns(
        signs=tuple(found[:count]),
        scales=tuple(found[count : 2 * count]),
        error=tuple(found[2 * count :]),
    )


def mean_magnitude(rows: jax.Array, live: jax.Array) -> jax.Array:
    """float[r]: mean |x| over the live entries of each row, 0 where there are none."""
    total = jnp.sum(jnp.where(live, jnp.abs(rows), 0), axis=-1)
    count = jnp.maximum(jnp.sum(live, axis=-1, dtype=jnp.int32), 1)
    return total / count.astype(rows.dtype)


def with_sign(scales: jax.Array, negative: jax.Array, live: jax.Array) -> jax.Array:
    """float[r, w]: +-scale where live, exactly zero elsewhere."""
    scales = scales[:, None]
    return jnp.where(live, jnp.where(negative, -scales, scales), 0)


def _live_rows(bucket: Bucket, variance: Arrays) -> tuple[jax.Array, ...]:
    """bool[rows, width] a group: entries that exist, with a variance where given."""
    if not variance:
        return bucket.live()
    return tuple(rows > 0 for rows in bucket.pack_own(variance))


def _decoded_rows(signs: Arrays, scales: Arrays, live: Arrays) -> list[jax.Array]:
    return [
        with_sign(scale, unpack_bits(bits, mask.shape[-1]), mask)
        for bits, scale, mask in zip(signs, scales, live, strict=True)
    ]


def _reshaped(flat: Arrays, shapes: Sequence[Any]) -> list[jax.Array]:
    return [x.reshape(shape) for x, shape in zip(flat, shapes, strict=True)]
