"""The average of the parameters against its definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sfpo_jax.training import Ema


@pytest.mark.parametrize(("decay", "steps"), [(0.9, 1), (0.9, 40), (0.9999, 40)])
def test_it_is_the_weighted_mean(decay: float, steps: int) -> None:
    values = np.random.default_rng(0).normal(1.0, 1.0, (steps, 3)).astype(np.float32)
    ema = Ema(decay)
    state = ema.init({"w": jnp.zeros(3)})
    for value in values:
        state = ema.update(state, {"w": jnp.asarray(value)})
    weights = np.float64(decay) ** np.arange(steps)[::-1]
    wanted = weights @ values.astype(np.float64) / weights.sum()
    found = ema.average(state, {"w": jnp.zeros(3)})["w"]
    # float32 sums of `steps` terms, and 1 - decay rounded to float32.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=4e-6 * np.abs(values).max())


def test_what_is_not_float32(mesh8: Mesh) -> None:
    whole = NamedSharding(mesh8, PartitionSpec())
    params = jax.device_put(
        {
            "half": jnp.ones(4, jnp.bfloat16),
            "count": jnp.int32(5),
            "empty": jnp.zeros((0, 2)),
        },
        whole,
    )
    ema = Ema(0.999)
    state = ema.init(params)
    assert state.mean["half"].dtype == jnp.float32
    for _ in range(3):
        state = ema.update(state, params)
    average = ema.average(state, params)
    # A bfloat16 sum would stand still at steps of a thousandth.
    assert average["half"].tolist() == [1.0] * 4
    assert average["half"].dtype == jnp.bfloat16
    assert int(average["count"]) == 5
    for leaf in jax.tree.leaves((state.mean, average)):
        assert leaf.sharding.is_equivalent_to(whole, leaf.ndim)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1])
def test_a_decay_without_meaning_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"`decay` must lie in \(0, 1\)"):
        Ema(decay)
