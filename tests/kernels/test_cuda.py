"""The CUDA library without a GPU: it loads, and programs for one compile with it."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sfpo_jax.kernels import (
    AdamFactors,
    AdamwNumbers,
    Bucket,
    Piece,
    Quantized,
    RowGroup,
    Seed,
    adamw8bit_directions,
    decode_signs,
    encode_signs,
    load_libraries,
    native_platforms,
    onebit_directions,
    serve_signs,
    sparsify_leaves,
)
from sfpo_jax.kernels._library import TARGETS
from sfpo_jax.memory import find_device, planning_mesh
from tests.memory.programs import needs_gpu_compiler

LIBRARY = next(x for x in load_libraries() if x.platform == "cuda")
needs_library = pytest.mark.skipif(
    LIBRARY.path is None, reason="no CUDA library was built here"
)
RANKS, SIZE = 8, 100_000
ROWS = 56  # of 2,048: those of SIZE entries, and padding to a multiple of the ranks
SHARED = PartitionSpec("data")
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
)


@needs_library
def test_the_library_is_registered_without_a_driver() -> None:
    assert LIBRARY.problem == ""
    assert "cuda" in native_platforms()


def _bucket() -> Bucket:
    group = RowGroup(2048, ROWS, (Piece(0, 0, SIZE),))
    return Bucket((0,), (SIZE,), (group,))


def _mean(x: jax.Array, error: jax.Array, variance: jax.Array) -> tuple[Any, ...]:
    """Each rank's own x, the mean of all: in one bit an entry, and both exchanges."""
    bucket = _bucket()
    sent = encode_signs(bucket, [x], momentum=[x], error=[error], variance=[variance])

    def exchanged(a: jax.Array) -> jax.Array:
        return lax.all_to_all(a, "data", 0, 0, tiled=True)

    def own(a: jax.Array) -> jax.Array:
        part = ROWS // RANKS
        return lax.dynamic_slice_in_dim(a, lax.axis_index("data") * part, part)

    served = serve_signs(
        bucket,
        [exchanged(a) for a in sent.signs],
        [exchanged(a) for a in sent.scales],
        [own(a) for a in sent.live],
        [jnp.zeros((ROWS // RANKS, 2048))],
        RANKS,
        1.0,
    )

    def everyone(a: jax.Array) -> jax.Array:
        return lax.all_gather(a, "data", tiled=True)

    signs = [everyone(a) for a in served.signs]
    scales = [everyone(a) for a in served.scales]
    mean = decode_signs(bucket, signs, scales, [(SIZE,)], [variance])
    factors = AdamFactors(0.1, 0.02, 1e-8, 0.1)
    update, momentum = onebit_directions(bucket, signs, scales, [variance], factors)
    taken = jnp.asarray(True)
    cut = sparsify_leaves([x], [SIZE // 10], residual=[x], is_on=taken, is_new=taken)
    mu, nu = (
        Quantized(jnp.zeros(SIZE, dtype), jnp.zeros(SIZE // 250), 250)
        for dtype in (jnp.int8, jnp.uint8)
    )
    numbers = AdamwNumbers(0.9, 0.99, 1.0, 1e-8)
    seed = Seed(jnp.uint32(1), jnp.uint32(2))
    adam = adamw8bit_directions([variance], [mu], [nu], numbers, seed, taken)
    results = mean[0], update[0], momentum[0], cut.kept[0], cut.residual[0]
    return *results, adam.values[0], sent.error[0], served.error[0]


@needs_library
@needs_gpu_compiler
def test_a_program_for_eight_a100s_calls_every_kernel_and_adds_no_collective() -> None:
    mesh = planning_mesh(find_device("a100-80gb"), {"data": RANKS})
    sharding = NamedSharding(mesh, SHARED)
    x = jax.ShapeDtypeStruct((RANKS * SIZE,), jnp.float32, sharding=sharding)
    step = jax.jit(
        jax.shard_map(_mean, mesh=mesh, in_specs=SHARED, out_specs=SHARED),
        donate_argnums=1,
    )
    compiled = step.lower(x, x, x).compile()
    text = compiled.as_text()
    assert text is not None
    called = set(re.findall(r'custom_call_target="(sfpo_\w+)"', text))
    assert called == set(TARGETS)
    # Signs and scales, each way.
    found = Counter(COLLECTIVE.findall(text))
    assert found.keys() == {"all-to-all", "all-gather"}
    assert max(found.values()) <= 2
    # The new error lies where the old one did.
    stats = compiled.memory_analysis()
    assert stats is not None
    assert stats.alias_size_in_bytes == 4 * SIZE
