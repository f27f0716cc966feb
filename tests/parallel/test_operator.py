"""Products shared over the axis `op` are plain products, whoever computes what."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sfpo_jax as sfpo
from sfpo_jax.memory import find_device, planning_mesh
from sfpo_jax.parallel._offload import layer_at, put_layer
from sfpo_jax.parallel._stack_pass import StackPass
from tests.memory.programs import needs_gpu_compiler

B, D, F = 2, 6, 16
SPECS = (P(None, "op"), P(None, "op"), P("op"), P("op"), P())
# What makes XLA's GPU compiler run transfers under products, here two at a time.
OVERLAP = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}


@contextmanager
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def arguments(length: int, dtype: Any) -> tuple[jax.Array, ...]:
    """x, both kernels, both biases."""
    rng = np.random.default_rng(0)
    shapes = ((B, length, D), (D, F), (F, D), (F,), (D,))
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)


def network(operator: sfpo.Operator) -> Callable[..., jax.Array]:
    def apply(x: Any, w: Any, v: Any, b: Any, c: Any) -> jax.Array:
        y = sfpo.column_parallel(x, w, b, operator)
        return sfpo.row_parallel(jnp.tanh(y), v, c, operator)

    return apply


def plain(x: Any, w: Any, v: Any, b: Any, c: Any) -> jax.Array:
    return jnp.tanh(x @ w + b[None, None]) @ v + c[None, None]


def shared(operator: sfpo.Operator, op: int, **how: Any) -> Callable[..., Any]:
    """(value, gradients of the sum of squares) on `op` ranks."""
    apply = network(operator)

    def local(*args: jax.Array) -> Any:
        if how.get("checkpoint"):
            return _value_and_grads(jax.checkpoint(apply), args)
        return _value_and_grads(apply, args)

    def run(*args: jax.Array) -> Any:
        z, grads = local(*args)
        # The last is of what all ranks hold alike.
        return z, (*grads[:-1], jax.lax.psum(grads[-1], "op"))

    return jax.jit(
        jax.shard_map(
            run,
            mesh=sfpo.make_mesh(op=op, devices=jax.devices()[:op]),
            in_specs=SPECS,
            out_specs=(P(None, "op"), SPECS),
            check_vma=False,
        )
    )


def _value_and_grads(apply: Any, args: Any) -> Any:
    z, pull = jax.vjp(apply, *args)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(pull))
    return z, pull(2 * z)


# Rows of a rank that the pieces divide, and that they do not.
@pytest.mark.parametrize(
    ("op", "chunk_size", "depth", "length"),
    [(2, 4, 2, 12), (2, 8, 3, 14), (4, 16, 2, 20), (8, 8, 1, 8), (8, 16, 8, 24)],
)
def test_values_and_gradients_are_those_of_plain_products(
    op: int, chunk_size: int, depth: int, length: int
) -> None:
    with float64():
        args = arguments(length, jnp.float64)
        operator = sfpo.Operator(chunk_size, depth)
        z, grads = shared(operator, op, checkpoint=op == 4)(*args)
        wanted, wanted_grads = _value_and_grads(plain, args)
        np.testing.assert_allclose(z, wanted, rtol=1e-12, atol=1e-12)
        for got, true in zip(grads, wanted_grads, strict=True):
            np.testing.assert_allclose(got, true, rtol=1e-12, atol=1e-12)


def test_halves_are_accumulated_in_float32() -> None:
    args = arguments(16, jnp.float32)
    halves = tuple(x.astype(jnp.bfloat16) for x in args)
    z, grads = shared(sfpo.Operator(8), 4)(*halves)
    assert {x.dtype for x in (z, *grads)} == {jnp.dtype("bfloat16")}
    wanted, wanted_grads = _value_and_grads(plain, args)
    for got, true in zip((z, *grads), (wanted, *wanted_grads), strict=True):
        error = jnp.linalg.norm(got.astype(jnp.float32) - true)
        # A few roundings to eight bits, each half of 2**-8 at most.
        assert error < 0.02 * jnp.linalg.norm(true)


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_a_backward_loop_over_layers(recompute: str) -> None:
    operator = sfpo.Operator(4)

    def layer(kernels: Any, x: jax.Array, key: Any) -> jax.Array:
        del key
        y = sfpo.column_parallel(x, kernels[0], None, operator)
        return x + sfpo.row_parallel(jnp.tanh(y), kernels[1], None, operator)

    def loop(stack: Any, x: jax.Array) -> Any:
        passes = StackPass(layer, 2, 1, recompute, layer_at, 0)
        z, saved = passes.forward(stack, x[None], None)
        zeros = jax.tree.map(jnp.zeros_like, stack)
        # One kernel's gradient at a time, as the layered step takes them.
        return passes.backward(
            lambda _: stack,
            saved,
            [2 * z],
            lambda index, grads, carry: put_layer(carry, grads, index),
            zeros,
        )[1]

    def whole(stack: Any, x: jax.Array) -> Any:
        def loss(stack: Any) -> jax.Array:
            z, _ = jax.lax.scan(lambda x, w: (layer(w, x, None), None), x, stack)
            return jnp.sum(z**2)

        return jax.grad(loss)(stack)

    with float64():
        x, w, v, *_ = arguments(8, jnp.float64)
        stack = (jnp.stack([w, -w]), jnp.stack([v, v]))
        specs = (P(None, None, "op"), P(None, "op"))
        found = jax.jit(
            jax.shard_map(
                loop,
                mesh=sfpo.make_mesh(op=2, devices=jax.devices()[:2]),
                in_specs=(specs, P(None, "op")),
                out_specs=specs,
                check_vma=False,
            )
        )(stack, x)
        for got, true in zip(found, jax.jit(whole)(stack, x), strict=True):
            np.testing.assert_allclose(got, true, rtol=1e-12, atol=1e-12)


def test_alone_they_are_plain_products() -> None:
    args = arguments(5, jnp.float32)
    found = jax.make_jaxpr(network(sfpo.Operator()))(*args)
    assert "ppermute" not in str(found) and "custom_vjp" not in str(found)
    np.testing.assert_allclose(network(sfpo.Operator())(*args), plain(*args), rtol=1e-5)
    x = args[0]
    assert sfpo.shard_sequence(x) is x


def test_a_sequence_is_cut_and_padded() -> None:
    ids = jnp.arange(10).reshape(2, 5)
    found = jax.shard_map(
        lambda ids: sfpo.shard_sequence(ids, axis=-1, fill=-1),
        mesh=sfpo.make_mesh(op=4),
        in_specs=P(),
        out_specs=P(None, "op"),
        check_vma=False,
    )(ids)
    np.testing.assert_array_equal(
        found, jnp.pad(ids, ((0, 0), (0, 3)), "constant", constant_values=-1)
    )


def trace(operator: sfpo.Operator, length: int, op: int = 4) -> None:
    jax.eval_shape(shared(operator, op), *arguments(length, jnp.float32))


@pytest.mark.parametrize(
    ("operator", "length", "message"),
    [
        (sfpo.Operator(4, 3), 8, r"at least 2 \* `prefetch_depth`, got 4 and 3: cut"),
        (sfpo.Operator(6), 8, r"multiple of .* op, got 6 and 4: .*, take 8"),
        (sfpo.Operator(16), 8, r"into 4 pieces, got 2 rows: lower chunk_size to 8"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    operator: sfpo.Operator, length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trace(operator, length)


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    x, w, v, b, c = arguments(8, jnp.float32)
    with pytest.raises(ValueError, match=r"`kernel`.*got \[16, 6\] and \[2, 8, 6\]"):
        sfpo.column_parallel(x, v)
    with pytest.raises(ValueError, match=r"`bias`.*got \[6\] and \[6, 16\]: cut both"):
        sfpo.column_parallel(x, w, c)
    with pytest.raises(TypeError, match=r"one dtype, got .*bfloat16.*: cast them"):
        sfpo.column_parallel(x, w, b.astype(jnp.bfloat16))
    run = jax.shard_map(
        sfpo.row_parallel,
        mesh=sfpo.make_mesh(op=4),
        in_specs=(P(None, None, "op"), P("op")),
        out_specs=P(None, "op"),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=r"`x`.*got 7 rows and 4 ranks: pad .* to 8"):
        jax.eval_shape(run, jnp.ones((B, 7, F)), v)


def gpu_schedule(fn: Callable[..., Any], mesh: Mesh) -> list[tuple[str, str]]:
    """What the GPU's compiler runs one after the other: (kind, the transfer's name)."""
    specs = (P("data", "op"), P(None, "op"), P("op"))
    shapes = ((8, 1024, 1024), (1024, 4096), (4096, 1024))
    args = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(shapes, specs, strict=True)
    ]
    run = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    compiled = jax.jit(run).lower(*args).compile(compiler_options=OVERLAP)
    text = compiled.as_text()
    assert text is not None
    assert not re.search(r"all-gather|all-reduce|reduce-scatter|all-to-all", text)
    order = []
    for line in text[text.index("ENTRY") :].splitlines():
        if found := re.search(r"%(\S+) = .* collective-permute-start\(", line):
            order.append(("start", found[1]))
        elif found := re.search(r" collective-permute-done\(.*?%?([\w.-]+)\)", line):
            order.append(("done", found[1]))
        elif re.search(r"%\S*gemm\S* = |__cublas", line):
            order.append(("product", ""))
    return order


@needs_gpu_compiler
@pytest.mark.parametrize(("op", "has_gradient"), [(2, False), (4, False), (4, True)])
def test_on_a_gpu_transfers_run_under_products(op: int, has_gradient: bool) -> None:
    operator = sfpo.Operator(8, 2)

    def apply(x: Any, w: Any, v: Any) -> jax.Array:
        y = sfpo.column_parallel(x, w, None, operator)
        return sfpo.row_parallel(jnp.tanh(y), v, None, operator)

    def fn(x: Any, w: Any, v: Any) -> Any:
        if not has_gradient:
            return apply(x, w, v), w, v
        z, pull = jax.vjp(apply, x, w, v)
        return pull(z)

    mesh = planning_mesh(find_device("a100-80gb"), {"data": 8 // op, "op": op})
    order = gpu_schedule(fn, mesh)
    count = Counter(kind for kind, _ in order)
    # Back: two rings for the first product, one for both gradients of the second.
    rings, products = (5, 6) if has_gradient else (2, 2)
    permutes = rings * operator.chunk_size * (op - 1) // op
    assert count["start"] == count["done"] == permutes
    assert count["product"] == products * operator.chunk_size
    flying: set[str] = set()
    hidden: set[str] = set()
    for kind, name in order:
        if kind == "start":
            flying.add(name)
        elif kind == "done":
            flying.remove(name)
        else:
            hidden |= flying
        assert len(flying) <= operator.prefetch_depth
    # XLA's scheduler starts the last of a ring late.
    assert len(hidden) >= permutes - rings
