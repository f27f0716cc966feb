"""The layered step against plain differentiation of unstacked layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.transforms import is_per_rank

RANKS, STEPS, DEPTH, WIDTH, HIDDEN, ROWS = 8, 20, 3, 64, 512, 16


def embed(outer: Any, batch: Any, key: Any) -> Any:
    del key
    return {"h": batch["x"] @ outer["in"], "row": batch["row"]}


def block(layer: Any, x: Any, key: Any) -> Any:
    h = jnp.tanh(x["h"] @ layer["up"] + layer["bias"][None])
    if key is not None:
        h = h * jax.random.bernoulli(key, 0.9, h.shape)
    return {"h": x["h"] + h @ layer["down"], "row": x["row"]}


def loss(outer: Any, x: Any, batch: Any, key: Any) -> Any:
    del key
    # Tied: `in` is used on both sides.
    out = x["h"] @ outer["in"].T
    return jnp.mean((out - batch["y"]) ** 2), {
        "row": jnp.mean(x["row"].astype(x["h"].dtype))
    }


MODEL = sfpo.LayeredModel(embed, block, loss)


def parameters() -> Any:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape) / np.sqrt(shape[-2])

    return {
        "outer": {"in": normal(4, WIDTH)},
        "layers": {
            "up": normal(DEPTH, WIDTH, HIDDEN),
            "bias": 0.1 * rng.normal(size=(DEPTH, HIDDEN)),
            "down": normal(DEPTH, HIDDEN, WIDTH),
        },
    }


def batch_of(step: int) -> Any:
    rng = np.random.default_rng(step + 1)
    x = rng.normal(size=(ROWS, 4))
    return {"x": x, "y": np.sin(3 * x), "row": np.arange(ROWS, dtype=np.int32)}


class Reference(NamedTuple):
    """Unstacked layers, each with a state of its own, through `value_and_grad`."""

    tx: Any
    mesh: Mesh
    reduces: tuple[str, ...]
    max_norm: float | None

    def run(self, steps: int) -> tuple[Any, list[float], list[float]]:
        stacked = parameters()
        units = [
            jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), stacked["layers"])
            for i in range(DEPTH)
        ]
        units.append(jax.tree.map(jnp.asarray, stacked["outer"]))
        tx = optax.with_extra_args_support(self.tx)
        with jax.set_mesh(self.mesh):
            states = [tx.init(unit) for unit in units]
        axes = tuple(self.mesh.axis_names)

        def spec(node: Any) -> Any:
            where = PartitionSpec(self.reduces) if is_per_rank(node) else None
            return jax.tree.map(lambda _: where or PartitionSpec(), node)

        state_specs = jax.tree.map(spec, states, is_leaf=is_per_rank)
        everywhere = PartitionSpec()

        def differentiate(units: Any, batch: Any) -> Any:
            def full(units: Any) -> Any:
                x = embed(units[-1], batch, None)
                for layer in units[:-1]:
                    x = block(layer, x, None)
                return loss(units[-1], x, batch, None)[0]

            value, grads = jax.value_and_grad(full)(units)
            squares = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
            norm = jnp.sqrt(lax.pmean(squares, axes))
            if self.max_norm is not None:
                scale = jnp.minimum(1.0, self.max_norm / norm)
                grads = jax.tree.map(lambda g: g * scale, grads)
            dense = tuple(a for a in axes if a not in self.reduces)
            grads = jax.tree.map(lambda g: lax.pmean(g, dense)[None], grads)
            return grads, lax.pmean(value, axes), norm

        def update(unit: Any, state: Any, grads: Any) -> Any:
            grads = jax.tree.map(lambda g: g[0], grads)
            updates, state = tx.update(grads, state, unit)
            return optax.apply_updates(unit, updates), state

        def shard(fn: Any, in_specs: Any, out_specs: Any) -> Any:
            return jax.jit(
                jax.shard_map(
                    fn,
                    mesh=self.mesh,
                    in_specs=in_specs,
                    out_specs=out_specs,
                    check_vma=False,
                )
            )

        by_rank = PartitionSpec(axes)
        differentiate = shard(
            differentiate, (everywhere, by_rank), (by_rank, everywhere, everywhere)
        )
        # One program for all layers, another for what is outside.
        updates = [
            shard(update, (everywhere, specs, by_rank), (everywhere, specs))
            for specs in state_specs[-2:]
        ]
        losses, norms = [], []
        for i in range(steps):
            grads, value, norm = differentiate(units, batch_of(i))
            for place, grad in enumerate(grads):
                run = updates[place == DEPTH]
                units[place], states[place] = run(units[place], states[place], grad)
            losses.append(float(value))
            norms.append(float(norm))
        layers = jax.tree.map(lambda *xs: np.stack(xs), *units[:-1])
        return {"outer": units[-1], "layers": layers}, losses, norms


def adamw(axis: Any) -> Any:
    del axis
    return optax.adamw(1e-3, weight_decay=0.1)


def onebit(axis: Any) -> Any:
    return sfpo.onebit_adam(
        1e-3, weight_decay=0.1, warmup_steps=4, refresh_every=5, axis_name=axis
    )


def chain(axis: Any) -> Any:
    return optax.chain(
        sfpo.sparsify(0.6, error_feedback=True, axis_name=axis),
        sfpo.onebit_adam(1e-3, warmup_steps=4, axis_name=axis),
    )


_known: dict[Any, Any] = {}


def reference(
    make: Callable[[Any], Any], axis: str | None, max_norm: float | None
) -> Any:
    """What the reference reaches, once for all tests that ask."""
    key = (make.__name__, axis, max_norm)
    if key not in _known:
        mesh = sfpo.make_mesh(node=2)
        reduces = (axis,) if axis else ()
        _known[key] = Reference(make(axis), mesh, reduces, max_norm).run(STEPS)
    return _known[key]


CASES: dict[str, tuple[Callable[[Any], Any], str | None, dict[str, Any]]] = {
    "adamw": (adamw, None, {}),
    "adamw, all saved": (adamw, None, {"recompute": "none"}),
    "adamw, clipped, 2 microbatches": (
        adamw,
        None,
        {"max_norm": 0.5, "microbatches": 2},
    ),
    "adamw, states sharded": (adamw, None, {"shard": "states"}),
    "adamw, weights sharded": (adamw, None, {"shard": "weights"}),
    "adamw, weights sharded over all, clipped": (
        adamw,
        None,
        {
            "shard": "weights",
            "shard_axes": ("node", "data"),
            "weight_prefetch": 2,
            "max_norm": 0.5,
        },
    ),
    "onebit_adam": (onebit, "data", {}),
    "onebit_adam between nodes, clipped": (onebit, "node", {"max_norm": 0.5}),
    "sparsify and onebit_adam": (chain, "data", {"skip_nonfinite": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_plain_differentiation(case: str) -> None:
    make, axis, options = CASES[case]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wanted, losses, norms = reference(make, axis, options.get("max_norm"))
        step = sfpo.make_layered_train_step(
            MODEL, make(axis), sfpo.make_mesh(node=2), **options
        )
        state = step.init(parameters())
        for i in range(STEPS):
            state, metrics = step(state, batch_of(i))
            assert float(metrics["loss"]) == pytest.approx(losses[i], rel=1e-9)
            assert float(metrics["grad_norm"]) == pytest.approx(norms[i], rel=1e-9)
            assert float(metrics["row"]) == pytest.approx((ROWS - 1) / 2)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9),
            state.params,
            wanted,
        )
