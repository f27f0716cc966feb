"""A run goes on with another number of devices, from the same checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax.parallel import Step, TrainState
from sfpo_jax.training import CheckpointError, Checkpoints, ReplayedIterator, Train, fit
from sfpo_jax.transforms import is_per_rank


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch @ params["w"])
    return jnp.mean((hidden @ params["v"] - jnp.sin(batch[:, :1])) ** 2)


def batches() -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    while True:
        yield generator.normal(size=(24, 31)).astype(np.float32)


def begin(ranks: int) -> tuple[Step, TrainState]:
    mesh = sfpo.make_mesh(devices=jax.devices()[:ranks])
    tx = sfpo.sfpo(0.01, 20, warmup_steps=4, axis_name="data")
    step = sfpo.make_train_step(loss_fn, tx, mesh)
    rng = np.random.default_rng(1)
    shapes = {"v": (80, 1), "w": (31, 80)}
    params = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    return step, step.init(params)


def train(ranks: int, folder: Path, steps: int) -> tuple[TrainState, Step]:
    step, state = begin(ranks)
    train = Train(steps=steps, checkpoint_every=8, evaluate_every=8)
    data = ReplayedIterator(batches)
    done = fit(step, state, data, train, checkpoints=Checkpoints(folder))
    return done.state, step


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainState, Path]:
    folder = tmp_path_factory.mktemp("four")
    return train(4, folder, 8)[0], folder


@pytest.mark.parametrize("ranks", [2, 8, 3, 1])
def test_shared_state_stays_and_the_mean_of_the_errors_does(
    four: tuple[TrainState, Path], ranks: int
) -> None:
    old, folder = four
    step, fresh = begin(ranks)
    found = Checkpoints(folder).restore({"train": fresh, "ema": None})
    assert found is not None
    new: TrainState = found.state["train"]
    pairs = zip(
        jax.tree.leaves(old, is_leaf=is_per_rank),
        jax.tree.leaves(new, is_leaf=is_per_rank),
        strict=True,
    )
    errors = 0
    for before, after in pairs:
        if not is_per_rank(before):
            assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
            continue
        if before.layout != ():
            continue
        for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert y.shape[0] == ranks
            gap = np.abs(np.asarray(x).mean(0) - np.asarray(y).mean(0)).max()
            assert gap <= 1e-6 * np.abs(x).max()
            errors += float(np.abs(x).max()) > 0
    # Residuals of the mask and of the signs, of both tensors.
    assert errors >= 3
    for batch, _ in zip(batches(), range(3), strict=False):
        new, metrics = step(new, batch)
        assert np.isfinite(metrics["loss"])
    assert step.differing(new) == []


def test_the_loop_goes_on_where_the_others_stopped(
    four: tuple[TrainState, Path],
) -> None:
    _, folder = four
    ahead, step = train(2, folder, 12)
    assert int(ahead.step) == 12
    assert step.differing(ahead) == []


def test_other_parameters_are_still_refused_by_name(
    four: tuple[TrainState, Path],
) -> None:
    _, folder = four
    _, fresh = begin(2)
    params = {**fresh.params, "w": jnp.zeros((31, 81))}
    with pytest.raises(CheckpointError, match=r"params\['w'\]` of shape \(31, 80\)"):
        Checkpoints(folder).restore(
            {"train": fresh._replace(params=params), "ema": None}
        )
