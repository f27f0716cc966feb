"""The threshold above which the k largest magnitudes of a row lie, exactly.

A magnitude, its sign bit cleared, is an unsigned integer of the same order, here a key.
An entry i of a row is kept where its key is above the row's threshold, or equal to it
while i is below the row's end: on ties the lower index wins.

The native kernel takes about one pass over memory. The twin decides the bits of the
threshold from the highest down, one counting pass a bit; no sort, and no quantile of
rounded positions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sfpo_jax.kernels._native import alike, choose, ffi_call

Arrays = Sequence[jax.Array]

_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
_NATIVE = (jnp.float32, jnp.bfloat16, jnp.float16)


class Thresholds(NamedTuple):
    """What is kept of each row; rows of all arrays are numbered through."""

    key: jax.Array  # uint32[rows], uint64 of float64; above every key: nothing
    end: jax.Array  # uint32[rows]


def magnitude_thresholds(
    arrays: Arrays, counts: Arrays, *, live: Arrays = (), addend: Arrays = ()
) -> Thresholds:
    """Thresholds that keep min(count, live entries) of each row.

    Args:
      arrays: float[r, n] of one dtype and any sizes; NaN is larger than infinity.
      counts: uint32[r], how many to keep of each row.
      live: bool[r, n], entries that may be kept; () for all.
      addend: float[r, n], added first; () for none.

    Returns:
      The thresholds. With `live`, only live entries are to be compared with them.
    """
    arrays = [lax.stop_gradient(x) for x in arrays]
    addend = [lax.stop_gradient(x) for x in addend]
    present = alike((tuple(arrays), tuple(counts), tuple(live), tuple(addend)))
    if any(x.dtype not in _NATIVE for x in arrays):
        return _twin(present)
    if any(x.dtype != jnp.float32 for x in (*arrays, *addend)) and addend:
        return _twin(present)
    return choose(_native, _twin, present)


def is_kept(rows: jax.Array, thresholds: Thresholds) -> jax.Array:
    """bool[r, n]: which entries of float[r, n] the thresholds of its rows keep."""
    keys = _keys(rows)
    threshold, end = thresholds.key[:, None], thresholds.end[:, None]
    keys = keys.astype(threshold.dtype)
    index = lax.broadcasted_iota(jnp.uint32, keys.shape, 1)
    return (keys > threshold) | ((keys == threshold) & (index < end))


def of_each(thresholds: Thresholds, arrays: Arrays) -> list[Thresholds]:
    """The thresholds of the rows of each array [r, n]."""
    ends = np.cumsum([x.shape[0] for x in arrays])[:-1]
    parts = [jnp.split(part, ends) for part in thresholds]
    return [Thresholds(*pair) for pair in zip(*parts, strict=True)]


def _native(present: Any) -> Thresholds:
    arrays, counts, live, addend = present
    wanted = jnp.concatenate(counts)
    found = ffi_call(
        "sfpo_magnitude_threshold",
        [wanted, *arrays, *addend, *live],
        [*[(wanted.shape, jnp.uint32)] * 2, ((_workspace(arrays),), jnp.uint32)],
        {
            "has_addend": bool(addend),
            "has_live": bool(live),
            "rows": np.array([x.shape[0] for x in arrays], np.int64),
        },
    )
    return Thresholds(*found[:2])


def _workspace(arrays: Arrays) -> int:
    """What GPUs share long rows by, in uint32: `row_words` of core/select.h."""
    most_of_block, chunk, row_words = 2**15, 2**14, 2052
    return sum(
        x.shape[0] * (row_words + -(-x.shape[1] // chunk))
        for x in arrays
        if x.shape[1] > most_of_block
    )


def _twin(present: Any) -> Thresholds:
    arrays, counts, live, addend = present
    if addend:
        arrays = [x + a for x, a in zip(arrays, addend, strict=True)]
    keys = [_keys(x) for x in arrays]
    widths = [np.full(x.shape[0], x.shape[1], np.uint32) for x in arrays]
    width = jnp.asarray(np.concatenate(widths))
    wanted = jnp.concatenate(counts)
    if live:
        # One above the magnitude, so that a live zero differs from a dead entry.
        pairs = zip(keys, live, strict=True)
        keys = [jnp.where(m, k + _number(1, k), _number(0, k)) for k, m in pairs]
        available = _counts(live)
    else:
        available = width
    wanted = jnp.minimum(wanted, available)

    def everything() -> Thresholds:
        zeros = _zeros_like(wanted)
        return Thresholds(zeros.astype(_key_dtype(keys)), zeros | width)

    def search() -> Thresholds:
        key, end = _search(keys, wanted, width)
        key = key.astype(_key_dtype(keys))
        key = key - _number(bool(live), key)
        # Two cases of their own: a kernel need not look at the entries.
        is_none, is_all = wanted == 0, wanted == available
        key = jnp.where(is_none, ~_number(0, key), key)
        key = jnp.where(is_all, _number(0, key), key)
        return Thresholds(key, jnp.where(is_none | is_all, width, end))

    # Nothing to drop, as in a warm-up at sparsity 0, should not cost a search.
    return lax.cond(jnp.all(wanted == available), everything, search)


def _search(
    keys: list[jax.Array], wanted: jax.Array, width: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The `wanted`-th largest key of each row, and the end of those equal to it."""
    threshold = _kth_largest(keys, wanted)
    columns = _columns(threshold, keys)
    above = _counts([k > t for k, t in zip(keys, columns, strict=True)])
    equal = [k == t for k, t in zip(keys, columns, strict=True)]
    missing = wanted - above
    end = lax.cond(
        jnp.all(_counts(equal) == missing),
        lambda: _zeros_like(missing) | width,
        lambda: jnp.minimum(_end_of_first(equal, missing), width),
    )
    return threshold, end


def _key_dtype(keys: Arrays) -> Any:
    return jnp.uint64 if keys[0].dtype == jnp.uint64 else jnp.uint32


def _keys(x: jax.Array) -> jax.Array:
    """The bits of |x|, unsigned, in the order of the magnitudes."""
    unsigned = _UNSIGNED[x.dtype.itemsize]
    cleared = np.array(2 ** (8 * x.dtype.itemsize - 1) - 1, unsigned)
    return lax.bitcast_convert_type(x, unsigned) & cleared


def _number(value: int, like: jax.Array) -> Any:
    return np.array(value, like.dtype)


def _counts(flags: Arrays) -> jax.Array:
    """uint32[rows of all arrays]: set flags of each row."""
    counts = [jnp.sum(f, axis=-1, dtype=jnp.uint32) for f in flags]
    return jnp.concatenate(counts)


def _columns(vector: jax.Array, arrays: Arrays) -> list[jax.Array]:
    """A vector over the rows of all arrays as one column [r, 1] for each array.

    So an operation on what there is one of for each row compiles once, not once for
    each array.
    """
    ends = np.cumsum([x.shape[0] for x in arrays])[:-1]
    return [part[:, None] for part in jnp.split(vector, ends)]


def _kth_largest(keys: list[jax.Array], count: jax.Array) -> jax.Array:
    """The largest t of each row with at least `count` keys >= t."""
    bits = 8 * keys[0].dtype.itemsize
    one = np.array(1, keys[0].dtype)

    def decide(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (one << (bits - 1 - i).astype(one.dtype))
        columns = _columns(candidate, keys)
        reached = _counts([k >= c for k, c in zip(keys, columns, strict=True)])
        return jnp.where(reached >= count, candidate, found)

    return lax.fori_loop(0, bits, decide, _zeros_like(count).astype(one.dtype))


def _end_of_first(flags: list[jax.Array], count: jax.Array) -> jax.Array:
    """Where the first `count` set flags of each row end, found by bisecting."""
    index = [lax.broadcasted_iota(jnp.uint32, f.shape, 1) for f in flags]
    bits = max(f.shape[-1] for f in flags).bit_length()

    def decide(i: jax.Array, end: jax.Array) -> jax.Array:
        candidate = end | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        columns = zip(flags, index, _columns(candidate, flags), strict=True)
        before = _counts([f & (i < e) for f, i, e in columns])
        return jnp.where(before <= count, candidate, end)

    return lax.fori_loop(0, bits, decide, _zeros_like(count))


def _zeros_like(vector: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes the vector varies over.

    Inside `shard_map` a loop's carry must have its final type from the start.
    """
    return vector ^ vector
