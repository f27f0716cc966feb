"""The Vision Transformer: sizes, shapes, and recomputation that changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models.vit import Pool, ViT, ViTConfig, patchify

TINY = ViTConfig(
    image_size=8,
    patch_size=4,
    channels=2,
    width=16,
    depth=2,
    heads=2,
    mlp_width=32,
    classes=5,
)


def images(config: ViTConfig, batch: int = 3) -> jax.Array:
    shape = (batch, config.image_size, config.image_size, config.channels)
    return jax.random.normal(jax.random.key(1), shape)


def model(config: ViTConfig, *, recompute: bool = False) -> ViT:
    made = ViT(config, recompute=recompute, rngs=nnx.Rngs(0))
    # The head begins at zero, which would hide everything below it.
    noise = jax.random.normal(jax.random.key(2), made.head.kernel.shape)
    made.head.kernel[...] = noise
    return made


def count(config: ViTConfig) -> int:
    shapes = nnx.eval_shape(lambda: nnx.state(ViT(config, rngs=nnx.Rngs(0))))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_vit_l_16_has_its_published_size() -> None:
    # torchvision's vit_l_16 and timm's vit_large_patch16_224 count the same.
    assert count(ViTConfig()) == 304_326_632


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_the_count_follows_from_the_sizes(pool: Pool) -> None:
    D, F, P, V = 16, 32, 4 * 4 * 2, 5
    block = 2 * (2 * D) + (D + 1) * 3 * D + (D + 1) * D + (D + 1) * F + (F + 1) * D
    tokens = 4 + (pool == "token")
    expected = (P + 1) * D + tokens * D + (pool == "token") * D
    expected += 2 * block + 2 * D + (D + 1) * V
    assert count(dataclasses.replace(TINY, pool=pool)) == expected


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_float32_whatever_the_arithmetic(pool: Pool, dtype: str) -> None:
    config = dataclasses.replace(TINY, pool=pool, dtype=dtype)
    logits = jax.jit(lambda x: model(config)(x))(images(config))
    assert (logits.shape, logits.dtype) == ((3, 5), jnp.float32)
    assert bool(jnp.isfinite(logits).all())
    state = nnx.state(model(config))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}


def test_patches_are_rows_of_pixels() -> None:
    grid = jnp.arange(2 * 4 * 4 * 3).reshape(2, 4, 4, 3)
    cut = patchify(grid, 2)
    assert cut.shape == (2, 4, 12)
    np.testing.assert_array_equal(cut[1, 1], grid[1, :2, 2:].reshape(-1))
    np.testing.assert_array_equal(cut[0, 2], grid[0, 2:, :2].reshape(-1))


def test_positions_and_every_patch_matter() -> None:
    net, x = model(TINY), images(TINY)
    flipped = x[:, ::-1]
    assert float(jnp.abs(net(x) - net(flipped)).max()) > 1e-3
    for row in (0, 4):
        changed = x.at[:, row, row].add(1.0)
        assert float(jnp.abs(net(x) - net(changed)).max()) > 1e-4


def test_recomputation_gives_the_same_gradients() -> None:
    config = dataclasses.replace(TINY, dropout=0.3)
    graph, params = nnx.split(model(config))

    def gradients(recompute: bool) -> tuple[jax.Array, str]:
        other, _ = nnx.split(model(config, recompute=recompute))

        def loss(params: nnx.State) -> jax.Array:
            logits = nnx.merge(other, params)(images(config), key=jax.random.key(3))
            return (logits**2).mean()

        program = str(jax.make_jaxpr(jax.grad(loss))(params))
        return jax.jit(jax.grad(loss))(params), program

    del graph
    (kept, plain), (again, saving) = gradients(False), gradients(True)
    assert "remat" in saving
    assert "remat" not in plain
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_dropout_acts_with_a_key_only() -> None:
    net = model(dataclasses.replace(TINY, dropout=0.5))
    x = images(TINY)
    np.testing.assert_array_equal(net(x), net(x))
    first, second = (net(x, key=jax.random.key(i)) for i in (0, 1))
    assert float(jnp.abs(first - second).max()) > 1e-3
    np.testing.assert_array_equal(first, net(x, key=jax.random.key(0)))


def test_other_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`images`.*8, 8, 2.*got \[3, 4, 4, 2\]"):
        model(TINY)(jnp.zeros((3, 4, 4, 2)))
