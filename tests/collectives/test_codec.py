"""The stages of a codec are those of the mean they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax.collectives import codec_stages
from sfpo_jax.compression import Compressor

SIZE = 5000


@pytest.mark.parametrize(
    "compressor",
    [sfpo.compression.int8(), sfpo.compression.sign()],
    ids=lambda c: c.name,
)
def test_on_one_rank_they_make_the_mean_and_its_errors(compressor: Compressor) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=SIZE), jnp.float32)
    stages = codec_stages(compressor, SIZE, 1)
    sent, error = jax.jit(stages.send)(x, jnp.zeros_like(x))
    reply, lost = jax.jit(stages.serve)(sent, stages.server_error(x))
    first = jax.jit(stages.receive)(sent, reply)
    # What the worker sends and what it loses are all of x.
    np.testing.assert_allclose(first + error, x, rtol=1e-6, atol=1e-6)
    tx = sfpo.compressed_mean(compressor, None)
    _, state = jax.jit(tx.update)(x, tx.init(x))
    np.testing.assert_array_equal(error, state.worker_error.tree.reshape(-1))
    for found, expected in zip(lost, state.server_error.tree[0], strict=True):
        np.testing.assert_allclose(found, expected.reshape(found.shape), atol=1e-6)


def test_a_rank_serves_its_part() -> None:
    x = jnp.ones(SIZE)
    stages = codec_stages(sfpo.compression.sign(64), SIZE, 4)
    (whole,) = {e.shape for e in stages.server_error(x) if e.shape[1] == 64}
    assert whole[0] * 4 >= SIZE // 64
    sent, _ = stages.send(x, x)
    _, lost = stages.serve(sent, stages.server_error(x))
    assert [e.shape for e in lost] == [e.shape for e in stages.server_error(x)]
