"""The fused update of one-byte moments: the native kernel is its twin."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sfpo_jax.kernels import Quantized
from tests.kernels.adamw8bit_steps import (
    ULP,
    at,
    directions,
    gradients,
    needs_native,
    twin,
    zeros,
)
from tests.ranks import compiled_programs, copies

pytestmark = needs_native


def assert_close(found: Quantized, expected: Quantized) -> None:
    """Bytes apart by one at most, in at most one of ten thousand."""
    np.testing.assert_allclose(found.scales, expected.scales, rtol=4 * ULP)
    apart = np.abs(np.subtract(found.values, expected.values, dtype=np.int32))
    assert apart.max(initial=0) <= 1
    assert apart.sum() <= max(1, 1e-4 * apart.size)


def test_it_agrees_with_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = gradients(0)
    mu, nu = zeros(grads, True), zeros(grads, False)
    native = jax.jit(directions)
    other = twin(monkeypatch, directions, grads, mu, nu, *at(1))
    for step in range(1, 6):
        grads = gradients(step)
        args = (grads, mu, nu, *at(step))
        found, expected = native(*args), other(*args)
        for i in range(len(grads)):
            u = np.asarray(found.values[i])
            error = np.abs(u - np.asarray(expected.values[i]))
            assert (error <= 2 * ULP * np.abs(u)).all()
            assert not u[..., 5].any() and np.isfinite(u).all()
            assert_close(found.mu[i], expected.mu[i])
            assert_close(found.nu[i], expected.nu[i])
        mu, nu = found.mu, found.nu
    assert compiled_programs(native) == 1


def test_a_step_that_is_not_taken_changes_nothing() -> None:
    grads = gradients(0)
    step = jax.jit(directions)
    state = zeros(grads, True), zeros(grads, False)
    _, *state = step(grads, *state, *at(1))
    before = copies(state)
    grads[0] = grads[0].at[3, 3].set(np.nan)
    u, *after = step(grads, *state, *at(2, taken=False))
    assert copies(after) == before
    assert not any(np.asarray(x).any() for x in u)


def test_empty_leaves_are_well() -> None:
    for shapes in ([(0, 256), (4, 64)], [(0, 256), (3, 0)], []):
        grads = [jnp.ones(s) for s in shapes]
        state = zeros(grads, True), zeros(grads, False)
        found = jax.jit(directions)(grads, *state, *at(1))
        assert [x.shape for x in found.values] == shapes
        assert [q.values.shape for q in found.mu] == shapes


@pytest.mark.parametrize(
    ("place", "bad", "message"),
    [
        (0, np.zeros(9, np.float32), "`numbers` must be eight"),
        (1, np.zeros(4, np.uint32), "`seeds` must be two numbers"),
        (2, np.float32(0), "dtype"),
        (3, np.zeros((4, 300), np.int32), "`g` 0 has a wrong dtype"),
        (3, np.zeros((4, 299), np.float32), "`g` must have whole rows"),
        (4, np.zeros((4, 300), np.uint8), "`m` 0 has a wrong dtype"),
        (5, np.zeros((4, 1), np.float32), "`m_scales` 0 has 4 entries, needs 8"),
        (6, np.zeros((3, 300), np.uint8), "`v` 0 has 900 entries, needs 1200"),
        (7, np.zeros((4, 2), ml_dtypes.bfloat16), "`v_scales` 0 has a wrong dtype"),
    ],
)
def test_what_does_not_fit_is_an_exception(place: int, bad: Any, message: str) -> None:
    operands: list[Any] = [
        np.zeros(8, np.float32),
        np.zeros(2, np.uint32),
        np.bool(True),
        np.zeros((4, 300), np.float32),
        np.zeros((4, 300), np.int8),
        np.zeros((4, 2), np.float32),
        np.zeros((4, 300), np.uint8),
        np.zeros((4, 2), np.float32),
    ]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[4:]]
    results.append(jax.ShapeDtypeStruct((4, 300), np.float32))
    operands[place] = bad
    call = jax.ffi.ffi_call("sfpo_adamw8bit", results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(
            call(
                *operands,
                leaves=1,
                has_parameters=False,
                narrow=0,
                is_stochastic=False,
                is_decayed=np.zeros(1, np.int64),
                widths=np.full(1, 300),
                blocks=np.full(1, 256),
            )
        )


def test_shards_need_no_collective(mesh8: Mesh) -> None:
    grads = gradients(1, [(64, 512), (16, 257)])
    args = (grads, zeros(grads, True), zeros(grads, False))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    local = jax.jit(
        jax.shard_map(
            directions,
            mesh=mesh8,
            in_specs=(rows, rows, rows, whole, whole, whole),
            out_specs=rows,
        )
    )
    placed = jax.device_put(args, NamedSharding(mesh8, rows))
    for fn, is_native in ((local, True), (jax.jit(directions), False)):
        text = fn.lower(*placed, *at(1)).compile().as_text()
        assert text is not None
        assert ("sfpo_adamw8bit" in text) == is_native
        for collective in ("all-reduce", "all-gather", "all-to-all", "permute"):
            assert collective not in text
    found = local(*placed, *at(1))
    expected = jax.jit(directions)(*args, *at(1))
    assert copies_of(found.values) == copies_of(expected.values)
    assert copies_of(found.mu) == copies_of(expected.mu)


def copies_of(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
