"""A layered model, and what plain differentiation of its unstacked layers reaches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.transforms import is_per_rank

DEPTH, WIDTH, HIDDEN, ROWS = 3, 64, 512, 16


def embed(outer: Any, batch: Any, key: Any) -> Any:
    del key
    x = batch["x"].astype(outer["in"].dtype)
    return {"h": x @ outer["in"], "row": batch["row"]}


def block(layer: Any, x: Any, key: Any) -> Any:
    h = jnp.tanh(x["h"] @ layer["up"] + layer["bias"][None])
    if key is not None:
        h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)
    return {"h": x["h"] + h @ layer["down"], "row": x["row"]}


def loss(outer: Any, x: Any, batch: Any, key: Any) -> Any:
    del key
    # Tied: `in` is used on both sides.
    out = (x["h"] @ outer["in"].T).astype(batch["y"].dtype)
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


def single(x: np.ndarray) -> np.ndarray:
    """In float32, what is float64."""
    return x.astype(np.float32) if x.dtype == np.float64 else x


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
