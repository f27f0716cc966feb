"""Adapters: what they compute, what trains beside frozen weights, and their files."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sfpo_jax as sfpo
from sfpo_jax import lora


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.hidden:
            x = jnp.tanh(layer(x))
        return self.last(x)


X = jax.random.normal(jax.random.key(0), (16, 16))
Y = jnp.argmax(X[:, :3], axis=-1)


def adapted(rank: int = 2, match: str = "hidden") -> Net:
    net = Net(nnx.Rngs(0))
    lora.attach(net, rank, match=match, rngs=nnx.Rngs(1))
    return net


def test_a_new_adapter_changes_nothing_and_a_merged_one_computes_the_same() -> None:
    net = Net(nnx.Rngs(0))
    before = net(X)
    kernel = np.asarray(net.hidden[0].kernel[...])
    assert lora.attach(net, 2, match="hidden", rngs=nnx.Rngs(1)) == 2
    np.testing.assert_array_equal(net(X), before)
    # Their places are not taken twice.
    with pytest.raises(ValueError, match=r"`match` must be found .* 'hidden'.*last"):
        lora.attach(net, 2, match="hidden", rngs=nnx.Rngs(1))
    hidden: Any = net.hidden  # of adapters now
    for layer in hidden:
        layer.lora_b[...] = jax.random.normal(jax.random.key(2), layer.lora_b.shape)
    a, b = hidden[0].lora_a[...], hidden[0].lora_b[...]
    wanted = net(X)
    assert float(jnp.abs(wanted - before).max()) > 0.1
    assert lora.merge(net) == 2
    assert type(net.hidden[0]) is nnx.Linear
    np.testing.assert_allclose(net(X), wanted, rtol=1e-5, atol=1e-5)
    found = net.hidden[0].kernel[...]
    np.testing.assert_allclose(found, kernel + np.asarray(a) @ np.asarray(b), atol=1e-6)


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.rest = nnx.List([self.first, nnx.Linear(16, 16, rngs=rngs)])
        self.named = nnx.Dict(again=self.first)
        self.plain = nnx.data({"again": self.first})

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.first, *self.rest, self.named["again"]):
            x = jnp.tanh(layer(x))
        return jnp.tanh(self.plain["again"](x))


@pytest.mark.parametrize(("match", "count"), [("", 2), ("first", 1), ("rest/0", 1)])
def test_a_shared_layer_has_one_adapter_everywhere(match: str, count: int) -> None:
    net = Tied(nnx.Rngs(0))
    first = net.first
    assert lora.attach(net, 2, match=match, rngs=nnx.Rngs(1)) == count
    adapter: Any = net.first
    assert isinstance(adapter, nnx.LoRA) and adapter.base_module is first
    assert net.rest[0] is net.named["again"] is net.plain["again"] is adapter
    adapter.lora_b[...] = jax.random.normal(jax.random.key(2), adapter.lora_b.shape)
    wanted = net(X)
    assert lora.merge(net) == count
    assert net.first is net.rest[0] is net.named["again"] is net.plain["again"] is first
    np.testing.assert_allclose(net(X), wanted, rtol=1e-5, atol=1e-5)


def test_adapters_alone_are_trained_sent_and_kept(
    mesh8: jax.sharding.Mesh, tmp_path: Path
) -> None:
    net = adapted()
    graph, trained, frozen = lora.split(net, also="last")
    names = {
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(trained)
    }
    assert len(names) == 2 * 2 + 2
    before = jax.tree.map(np.array, frozen)

    def loss_fn(trained: Any, batch: Any, *, frozen: Any) -> jax.Array:
        x, y = batch
        logits = nnx.merge(graph, trained, frozen)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    tx = sfpo.onebit_adam(0.03, warmup_steps=4, axis_name="data")
    step = sfpo.make_train_step(loss_fn, tx, mesh8, frozen=frozen)
    state = step.init(trained)
    losses = []
    for _ in range(12):
        state, metrics = step(state, (X, Y))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    assert jax.tree.structure(state.params) == jax.tree.structure(trained)
    for a, b in zip(*map(jax.tree.leaves, (before, frozen)), strict=True):
        assert a.tobytes() == np.asarray(b).tobytes()
    # A float32 all-reduce of what is trained, and of a few scalars.
    size = sum(x.size for x in jax.tree.leaves(trained))
    sent = step.wire_bytes(state, (X, Y), "warmup")["data"]
    assert 4 * size <= sent / (2 * 7 / 8) < 4 * size + 64

    lora.save(tmp_path / "adapters.safetensors", state.params)
    found = lora.load(tmp_path / "adapters.safetensors", trained)
    jax.tree.map(np.testing.assert_array_equal, found, jax.device_get(state.params))
    net = nnx.merge(graph, found, frozen)
    wanted = net(X)
    lora.merge(net)
    np.testing.assert_allclose(net(X), wanted, rtol=1e-5, atol=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`rank` must be at least 1, got 0"):
        adapted(0)
    with pytest.raises(
        ValueError, match=r"`match` .* 'mlp'.* hidden/0, hidden/1, last"
    ):
        adapted(match="mlp")
    path = tmp_path / "a.safetensors"
    lora.save(path, lora.split(adapted(rank=3)).trained)
    with pytest.raises(ValueError) as error:
        lora.load(path, lora.split(adapted(match="")).trained)
    for words in (
        "hidden.0.lora_a must be float32 [16, 2], got float32 [16, 3]",
        "hidden.1.lora_b must be float32 [2, 16], got float32 [3, 16]",
        "and 2 more",
    ):
        assert words in str(error.value)
    assert "\n" not in str(error.value)
