"""The CUDA kernels beside their jnp twins, and beside a copy of as many bytes.

`python -m experiments.bench.gpu --part kernels` runs it. A kernel's bytes are those of
its arguments and results, each once: one that is as fast as a copy cannot be faster.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from sfpo_jax.collectives import plan_buckets
from sfpo_jax.compression import sign
from sfpo_jax.kernels import (
    AdamFactors,
    AdamwNumbers,
    Quantized,
    Seed,
    adamw8bit_parameters,
    decode_signs,
    encode_signs,
    load_libraries,
    magnitude_thresholds,
    onebit_directions,
    serve_signs,
    sparsify_leaves,
)
from sfpo_jax.memory import find_device, planning_mesh

# Layers of a model as wide as ViT-L: 50 million entries in 48 leaves.
_WIDTH, _HIDDEN = 1024, 4096
_MATRICES = (3 * _WIDTH**2, _WIDTH**2, _WIDTH * _HIDDEN, _HIDDEN * _WIDTH)
_VECTORS = (3 * _WIDTH, _HIDDEN, *[_WIDTH] * 6)
_LAYERS, _RANKS = 4, 8
_WARM, _CALLS = 3, 20

Row = dict[str, Any]


class Kernel(NamedTuple):
    """A call: (carried, given) -> (carried, results); what is carried is donated."""

    name: str
    run: Callable[[Any, Any], tuple[Any, Any]]
    carried: Any  # trees of jax.ShapeDtypeStruct
    given: Any


def kernels() -> list[Kernel]:
    """Every native kernel, on the leaves of a few layers."""
    sizes = (*_MATRICES, *_VECTORS) * _LAYERS
    bucket = plan_buckets(sizes, sign(), _RANKS, sum(sizes))[0]
    leaves = [_shape(size) for size in sizes]
    signs = [_shape(g.rows, g.width // 8, dtype="uint8") for g in bucket.groups]
    scales = [_shape(g.rows) for g in bucket.groups]
    part = [g._replace(rows=g.rows // _RANKS) for g in bucket.groups]

    def encode(error: Any, given: Any) -> tuple[Any, Any]:
        x, momentum, variance = given
        found = encode_signs(
            bucket, x, momentum=momentum, b1=0.9, error=error, variance=variance
        )
        return found.error, found._replace(error=())

    def serve(error: Any, given: Any) -> tuple[Any, Any]:
        signs, scales, live = given
        found = serve_signs(bucket, signs, scales, live, error, _RANKS, 1.0)
        return found.error, found._replace(error=())

    def decode(_: Any, given: Any) -> tuple[Any, Any]:
        signs, scales, variance = given
        return (), decode_signs(bucket, signs, scales, [(n,) for n in sizes], variance)

    def update(_: Any, given: Any) -> tuple[Any, Any]:
        signs, scales, variance = given
        factors = AdamFactors(0.1, 0.02, 1e-8, 0.1)
        return (), onebit_directions(bucket, signs, scales, variance, factors)

    live = [_shape(g.rows, g.width // 8, dtype="uint8") for g in part]
    errors = tuple(_shape(g.rows, g.width) for g in part)
    return [
        Kernel("sign_encode", encode, tuple(leaves), (leaves, leaves, leaves)),
        Kernel("sign_serve", serve, errors, (signs, scales, live)),
        Kernel("sign_decode", decode, (), (signs, scales, leaves)),
        Kernel("onebit_update", update, (), (signs, scales, leaves)),
        *_of_leaves(leaves),
    ]


def _of_leaves(leaves: list[jax.ShapeDtypeStruct]) -> list[Kernel]:
    """The kernels that know no rows of signs; a tenth of each leaf is kept."""
    counts = [x.size // 10 for x in leaves]

    def threshold(_: Any, x: Any) -> tuple[Any, Any]:
        wanted = [jnp.full(1, count, jnp.uint32) for count in counts]
        return (), tuple(magnitude_thresholds([a[None] for a in x], wanted))

    def sparsify(residual: Any, x: Any) -> tuple[Any, Any]:
        on = jnp.asarray(True)
        found = sparsify_leaves(x, counts, residual=residual, is_on=on, is_new=on)
        return found.residual, (found.kept, found.counts)

    def adamw(carried: Any, grads: Any) -> tuple[Any, Any]:
        params, *moments = carried
        mu, nu = ([Quantized(v, scale, 256) for v, scale in part] for part in moments)
        numbers = AdamwNumbers(0.9, 0.99, 1.0, 1e-8, 1e-3, 0.1)
        seed, taken = Seed(jnp.uint32(1), jnp.uint32(2)), jnp.asarray(True)
        flags = [True] * len(grads)
        found = adamw8bit_parameters(
            grads, mu, nu, params, numbers, seed, taken, is_decayed=flags
        )
        new = ([(q.values, q.scales) for q in part] for part in (found.mu, found.nu))
        return (found.values, *new), ()

    mu, nu = (
        [(_shape(x.size, dtype=dtype), _shape(-(-x.size // 256))) for x in leaves]
        for dtype in ("int8", "uint8")
    )
    return [
        Kernel("magnitude_threshold", threshold, (), leaves),
        Kernel("sparsify", sparsify, tuple(leaves), leaves),
        Kernel("adamw8bit", adamw, (list(leaves), mu, nu), leaves),
    ]


def rows(has_gpu: bool) -> list[Row]:
    """Runs every kernel, or compiles it for an A100 where there is no GPU."""
    library = next(x for x in load_libraries() if x.platform == "cuda")
    if library.problem:
        return [{"kernel": "all", "problem": library.problem}]
    return [_measured(k) if has_gpu else _compiled(k) for k in kernels()]


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| kernel | device | bytes | native | twin | a copy | differs from the twin |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        cells = [row["kernel"], row.get("device", row.get("problem", ""))]
        cells.append(f"{row['bytes'] / 1e6:.0f} MB" if "bytes" in row else "")
        for name in ("native", "twin", "copy"):
            seconds = row.get(f"{name}_seconds")
            cells.append(f"{1e3 * seconds:.3f} ms" if seconds else "")
        cells.append(row.get("difference", "nothing ran"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _measured(kernel: Kernel) -> Row:
    native = _lowered(kernel, is_native=True).compile()
    twin = _lowered(kernel, is_native=False).compile()
    carried = jax.jit(lambda: _filled(kernel.carried, 1))
    given = jax.jit(lambda: _filled(kernel.given, 2))()
    bytes_ = _bytes(kernel)
    half = jnp.zeros(bytes_ // 8, jnp.float32)
    copy = jax.jit(lambda x, _: (-x, ()), donate_argnums=0)
    return {
        "kernel": kernel.name,
        "device": jax.devices()[0].device_kind,
        "bytes": bytes_,
        "difference": _difference(native(carried(), given), twin(carried(), given)),
        "native_seconds": _seconds(native, carried(), given),
        "twin_seconds": _seconds(twin, carried(), given),
        "copy_seconds": _seconds(copy, half, ()),
    }


def _compiled(kernel: Kernel) -> Row:
    device = find_device("a100-80gb")
    mesh = planning_mesh(device, {"data": 1})
    began = time.perf_counter()
    sharding = SingleDeviceSharding(mesh.devices.flat[0])
    text = _lowered(kernel, is_native=True, sharding=sharding).compile().as_text()
    row = {
        "kernel": kernel.name,
        "device": f"{device.name}, compiled only",
        "bytes": _bytes(kernel),
        "compile_seconds": time.perf_counter() - began,
    }
    if f"sfpo_{kernel.name}" not in (text or ""):
        row["problem"] = "the program does not call the kernel"
    return row


def _lowered(kernel: Kernel, *, is_native: bool, sharding: Any = None) -> Any:
    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x.update(sharding=sharding)

    shapes = jax.tree.map(placed, (kernel.carried, kernel.given))
    run = jax.jit(lambda carried, given: kernel.run(carried, given), donate_argnums=0)
    if is_native:
        return run.lower(*shapes)
    with mock.patch("sfpo_jax.kernels._native.native_platforms", tuple):
        return run.lower(*shapes)


def _seconds(run: Any, carried: Any, given: Any) -> float:
    """Of one call, the mean of some: each is queued before the last has ended."""

    def calls(count: int, carried: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        found = None
        for _ in range(count):
            carried, found = run(carried, given)
        jax.block_until_ready((carried, found))
        return (time.perf_counter() - began) / count, carried

    _, carried = calls(_WARM, carried)
    return calls(_CALLS, carried)[0]


def _difference(found: Any, wanted: Any) -> str:
    """Bits that differ, of all, and the largest difference of floats, relative."""
    bits, all_bits, worst = 0, 0, 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            apart = jax.lax.population_count(a ^ b)
            bits += int(jnp.sum(apart, dtype=jnp.int32))
            all_bits += 8 * a.dtype.itemsize * a.size
        elif a.size:
            size = float(jnp.max(jnp.abs(b))) or 1.0
            worst = max(worst, float(jnp.max(jnp.abs(a - b))) / size)
    return f"{bits} of {all_bits} bits, floats by {worst:.1e}"


def _bytes(kernel: Kernel) -> int:
    out = jax.eval_shape(kernel.run, kernel.carried, kernel.given)
    arrays = jax.tree.leaves((kernel.carried, kernel.given, out))
    return sum(x.size * x.dtype.itemsize for x in arrays)


def _filled(shapes: Any, seed: int) -> Any:
    """Random bits; normal floats, which are variances where they are positive."""
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), max(1, len(leaves)))

    def fill(key: Any, x: Any) -> jax.Array:
        if x.dtype.itemsize == 1:
            return jax.random.bits(key, x.shape, jnp.uint8).view(x.dtype)
        return jax.random.normal(key, x.shape, x.dtype)

    return treedef.unflatten([fill(*pair) for pair in zip(keys, leaves, strict=False)])


def _shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, np.dtype(dtype))
