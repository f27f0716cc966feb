"""FLOPs of programs whose count can be written down."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.memory import count_flops
from sfpo_jax.transforms import PHASE_SCOPES, SCOPES, run_once

N = 8
PRODUCT = 2 * N**3
X = jax.ShapeDtypeStruct((N, N), jnp.float32)


def chain(x: Any, times: int) -> Any:
    return lax.scan(lambda c, _: (c @ x, None), x, None, length=times)[0]


def squared(x: Any) -> Any:
    return jnp.sum(chain(x, 3) ** 2)


def literal_while(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, c[1] @ x), (0, x))[1]


def bounded_while(x: Any) -> Any:
    return lax.fori_loop(2, jnp.int32(6), lambda _, c: c @ x, x)


def by_two(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 2, c[1] @ x), (0, x))[1]


def branches(x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)


@jax.custom_vjp
def product(x: Any) -> Any:
    return x @ x


product.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))


def rematted(x: Any) -> Any:
    return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ x) @ x)(x))


@pytest.mark.parametrize(
    ("program", "products"),
    [
        (lambda x: x @ x, 1),
        (lambda x: x + x, 0),
        (jax.jit(lambda x: x @ x), 1),
        (lambda x: chain(x, 5), 5),
        (lambda x: lax.fori_loop(0, 4, lambda _, c: chain(c, 3), x), 12),
        (literal_while, 7),
        (bounded_while, 4),
        (branches, 2),
        (product, 1),
        (jax.grad(lambda x: jnp.sum(product(x))), 3),
        # A product's derivative is two products, for each of three.
        (jax.grad(squared), 9),
        # Two products forward, four backward, one made again.
        (jax.grad(rematted), 7),
        (jax.vmap(lambda v: v @ jnp.ones((N, N), jnp.float32)), 1),
    ],
)
def test_products(program: Callable[[Any], Any], products: int) -> None:
    counted = count_flops(jax.make_jaxpr(program)(X))
    assert counted.total == products * PRODUCT
    assert counted.unknown_loops == 0


def test_a_loop_of_unknown_length_counts_once_and_is_told() -> None:
    def until(x: Any, n: Any) -> Any:
        return lax.fori_loop(0, n, lambda _, c: c @ x, x)

    counted = count_flops(jax.make_jaxpr(until)(X, jnp.int32(3)))
    assert (counted.total, counted.unknown_loops) == (PRODUCT, 1)
    counted = count_flops(jax.make_jaxpr(by_two)(X))
    assert (counted.total, counted.unknown_loops) == (PRODUCT, 1)


@pytest.mark.parametrize("scopes", [tuple(SCOPES.values()), (PHASE_SCOPES["local"],)])
@pytest.mark.parametrize("batched", [False, True])
def test_of_the_loops_for_phases_the_costliest_counts(
    scopes: tuple[str, ...], batched: bool
) -> None:
    def program(x: Any, is_first: Any) -> Any:
        for times, scope in enumerate(scopes, 1):

            def update(x: Any, times: int = times, scope: str = scope) -> Any:
                with jax.named_scope(scope):
                    return chain(x, times)

            # Two units, one after the other.
            for _ in range(2):
                x = run_once(is_first, update, x)
        return x @ x

    mapped = jax.vmap(program, in_axes=(0, None)) if batched else program
    x = jax.ShapeDtypeStruct((2, *X.shape), X.dtype) if batched else X
    counted = count_flops(jax.make_jaxpr(mapped)(x, jnp.bool_(True)))
    assert counted.total == (1 + batched) * (2 * len(scopes) + 1) * PRODUCT
    assert counted.unknown_loops == 0


def test_a_late_step_runs_one_backward_pass(mesh8: Mesh) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum((batch @ params) ** 2)

    def counted(tx: Any) -> Any:
        step = sfpo.make_train_step(loss_fn, tx, mesh8, staleness=1)
        state = step.init(params)
        return count_flops(step.trace(state, batch).jaxpr)

    params = jnp.ones((N, N))
    batch = jax.ShapeDtypeStruct((16, N), jnp.float32)
    found = counted(sfpo.onebit_adam(0.1, warmup_steps=2, axis_name="data"))
    assert found == counted(optax.sgd(0.1))
    assert found.total > 0 and found.unknown_loops == 0


def test_a_shard_map_counts_every_device(mesh8: Mesh) -> None:
    spec = PartitionSpec("data")

    def local(x: Any) -> Any:
        return x @ x.T

    program = jax.shard_map(local, mesh=mesh8, in_specs=spec, out_specs=spec)
    x = jax.ShapeDtypeStruct((16, N), jnp.float32)
    counted = count_flops(jax.make_jaxpr(program)(x))
    assert counted.total == 8 * 2 * (2 * N * 2)


def test_a_batched_product_with_an_outer_shape() -> None:
    def program(a: Any, b: Any) -> Any:
        return jnp.einsum("bhqd,bhkd->bhqk", a, b)

    shapes = [jax.ShapeDtypeStruct((2, 3, n, 5), jnp.float32) for n in (7, 11)]
    counted = count_flops(jax.make_jaxpr(program)(*shapes))
    assert counted.total == 2 * math.prod((2, 3, 7, 11, 5))


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (2, 1), (1, 2)])
def test_a_convolution_and_its_derivatives(groups: int, stride: int) -> None:
    def convolve(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    x = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 4 // groups, 6), jnp.float32)
    out = 2 * (8 // stride) ** 2 * 6
    once = 2 * out * 9 * 4 // groups
    assert count_flops(jax.make_jaxpr(convolve)(x, kernel)).total == once

    def loss(x: Any, kernel: Any) -> Any:
        return jnp.sum(convolve(x, kernel) ** 2)

    both = count_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, kernel))
    assert both.total == 3 * once
