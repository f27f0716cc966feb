"""Named values kept or computed again: the same gradients, the FLOPs foretold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from sfpo_jax.memory import count_flops, recomputed
from sfpo_jax.memory._named import trace_named
from sfpo_jax.memory._recompute_graph import cost
from tests.memory.recompute_models import ROWS, WIDTH, graph_of, loss_fn, params_of

HIDDEN = (32, 128, 64)
CHOICES: dict[str, tuple[str, ...]] = {
    "blocks": ("block",),
    "all": ("block", "hidden", "turn"),
    "one block": ("block/1",),
    "not adjacent": ("block/0", "turn/0", "hidden/2", "block/2"),
    "what nothing reads": ("block/1", "turn/2"),
}


def gradients(fn: Any, params: Any, x: Any) -> Any:
    return jax.grad(fn, has_aux=True)(params, x)


def flops(fn: Any) -> int:
    params, x = params_of(HIDDEN), jnp.zeros((ROWS, WIDTH))
    return count_flops(jax.make_jaxpr(gradients, static_argnums=0)(fn, params, x)).total


def test_values_are_numbered_and_cuts_found() -> None:
    params, x = params_of(HIDDEN), jnp.zeros((ROWS, WIDTH))
    named = trace_named(loss_fn, (params, x), {})
    assert named.names[:4] == ("hidden/0", "turn/0", "block/0", "hidden/1")
    # Before the first layer nothing but the input flows past a value.
    assert named.cuts == ("hidden/0", "turn/0", "block/0", "block/1", "block/2")


@pytest.mark.parametrize("keep", CHOICES.values(), ids=CHOICES)
def test_the_flops_are_those_foretold(keep: tuple[str, ...]) -> None:
    graph = graph_of(loss_fn, HIDDEN)
    saved = {v.name for v in graph.values if {v.name, v.name[:-2]} & {*keep}}
    again = flops(recomputed(loss_fn, keep)) - flops(loss_fn)
    assert again == cost(graph, frozenset(saved))[0]
    assert (again == 0) == (keep == CHOICES["all"])


def test_gradients_stay_the_same() -> None:
    with jax.enable_x64(True):
        params = params_of(HIDDEN, jnp.float64)
        x = jax.random.normal(jax.random.key(9), (8, WIDTH), jnp.float64)

        def both(params: Any, x: Any) -> Any:
            other = recomputed(loss_fn, CHOICES["not adjacent"])
            return gradients(loss_fn, params, x), gradients(other, params, x)

        wanted, got = jax.jit(both)(params, x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14),
            got,
            wanted,
        )


def test_what_flows_past_keeps_a_value_from_being_a_cut() -> None:
    def cuts(fn: Any) -> tuple[str, ...]:
        args = jnp.ones((64, 64)), jax.random.key(0)
        return trace_named(fn, args, {}).cuts

    def with_key(x: Any, key: Any) -> Any:
        keys = jax.random.split(key)  # 16 bytes
        y = checkpoint_name(jnp.tanh(x), "first")
        y = y * jax.random.normal(keys[0], x.shape)
        return jnp.sum(y) + jax.random.normal(keys[1])

    def around(x: Any, key: Any) -> Any:
        del key
        past = x + 1
        return jnp.sum(checkpoint_name(jnp.tanh(past), "first") * past)

    assert cuts(with_key) == ("first/0",)
    assert cuts(around) == ()


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (
            ("blocks",),
            "'blocks', which no value is called: .* block, hidden, turn here",
        ),
        (("block/7",), "'block/7', which no value is called"),
        (("hidden/1", "turn/2"), "hidden/1, turn/2, none of which everything flows"),
    ],
)
def test_names_that_do_nothing_are_refused(keep: Any, message: str) -> None:
    params, x = params_of(HIDDEN), jnp.zeros((ROWS, WIDTH))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(recomputed(loss_fn, keep), params, x)
