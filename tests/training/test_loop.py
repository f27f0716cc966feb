"""The order of steps, tests and checkpoints, and the ways a run ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import sfpo_jax as sfpo
from sfpo_jax.parallel import TrainState
from sfpo_jax.training import (
    CheckpointError,
    Checkpoints,
    DataIterator,
    Ema,
    Fit,
    Monitor,
    NonFiniteLossError,
    ReplayedIterator,
    Stop,
    Train,
    evaluate,
    fit,
)


@pytest.fixture(scope="module")
def step(mesh8: Mesh) -> Any:
    """A step whose parameter counts steps and whose loss is the batch's mean."""

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return batch.mean() - (params["w"] - jax.lax.stop_gradient(params["w"])).sum()

    return sfpo.make_train_step(loss_fn, optax.sgd(1.0), mesh8)


def batches(*values: float) -> ReplayedIterator:
    """Batches of one value each, zeros after them."""

    def make() -> Iterator[np.ndarray]:
        for value in (*values, *[0.0] * 100):
            yield np.full(8, value, np.float32)

    return ReplayedIterator(make)


class Tape(Monitor):
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.losses: list[float] = []

    def started(self, done: int, tested: int, saved: Any) -> None:
        self.events.append(("start", done, tested, saved))

    def dispatched(self, done: int, state: TrainState) -> None:
        self.events.append(("sent", done))

    def stepped(self, done: int, metrics: dict[str, float]) -> None:
        self.events.append(("done", done))
        self.losses.append(metrics["loss"])

    def paused(self) -> None:
        self.events.append(("pause",))

    def evaluated(self, done: int, metrics: dict[str, float]) -> None:
        self.events.append(("test", done, metrics["w"]))

    def get_state(self) -> Any:
        return {"losses": len(self.losses)}


def test_one_step_stays_in_flight(step: Any) -> None:
    tape = Tape()
    done = fit(
        step,
        step.init({"w": jnp.zeros(())}),
        batches(1.0, 2.0, 3.0),
        Train(steps=3, evaluate_every=2),
        evaluate=lambda params: {"w": float(params["w"])},
        monitor=tape,
    )
    assert (done.done, done.is_finished) == (3, True)
    assert tape.losses == [1.0, 2.0, 3.0]
    assert tape.events == [
        ("start", 0, 0, None),
        ("sent", 1),
        ("sent", 2),
        ("done", 1),
        # Nothing is in flight beside a test.
        ("done", 2),
        ("pause",),
        ("test", 2, 2.0),
        ("sent", 3),
        ("done", 3),
        ("pause",),
        ("test", 3, 3.0),
    ]


def test_a_hidden_copy_is_an_error(step: Any) -> None:
    def leaky(state: TrainState, batch: Any) -> Any:
        state, metrics = step(state, batch)
        return state, {**metrics, "loss": metrics["loss"] + np.float32(1)}

    with pytest.raises(Exception, match=r"Disallowed host-to-device transfer"):
        fit(leaky, step.init({"w": jnp.zeros(())}), batches(), Train(steps=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_stays_not_finite_ends_the_run(
    tmp_path: Path, step: Any, value: float
) -> None:
    checkpoints = Checkpoints(tmp_path)
    train = Train(steps=9, max_nonfinite=3, checkpoint_every=1)
    # Twice in a row is forgiven; what was counted then does not count later.
    data = batches(1.0, value, value, 1.0, value, value, value, 1.0)
    tape = Tape()
    with pytest.raises(NonFiniteLossError) as caught:
        fit(
            step,
            step.init({"w": jnp.zeros(())}),
            data,
            train,
            monitor=tape,
            checkpoints=checkpoints,
        )
    message = str(caught.value)
    assert f"was {value} at step 7, and not finite in 3 steps in a row" in message
    for word in ("train.max_nonfinite", "optimizer.learning_rate", "clip_norm"):
        assert word in message
    assert len(tape.losses) == 7
    # None was saved while the loss was not finite.
    assert checkpoints.steps() == [1, 4]


def test_the_count_of_such_losses_goes_on(tmp_path: Path, step: Any) -> None:
    train = Train(steps=9, max_nonfinite=3)
    nan = float("nan")
    stop = Stop()

    class StopAfterTwo(Tape):
        def stepped(self, done: int, metrics: dict[str, float]) -> None:
            super().stepped(done, metrics)
            if done == 1:
                stop.request()

    def run(monitor: Monitor) -> Fit:
        state, checkpoints = step.init({"w": jnp.zeros(())}), Checkpoints(tmp_path)
        return fit(
            step,
            state,
            batches(nan, nan, nan),
            train,
            monitor=monitor,
            checkpoints=checkpoints,
            stop=stop,
        )

    done = run(StopAfterTwo())
    assert (done.done, done.is_finished) == (2, False)
    stop.request(False)
    tape = Tape()
    with pytest.raises(NonFiniteLossError, match="step 3"):
        run(tape)
    assert tape.events[0] == ("start", 2, 0, {"losses": 2})


def test_stopped_before_the_first_step(tmp_path: Path, step: Any) -> None:
    checkpoints, stop = Checkpoints(tmp_path), Stop()
    stop.request()
    state = step.init({"w": jnp.zeros(())})
    done = fit(
        step, state, batches(), Train(steps=3), checkpoints=checkpoints, stop=stop
    )
    assert (done.done, done.is_finished, checkpoints.steps()) == (0, False, [0])


def test_a_stopped_test_is_made_at_the_next_start(tmp_path: Path, step: Any) -> None:
    train = Train(steps=4, evaluate_every=2)
    stop = Stop()

    def run(tape: Tape) -> bool:
        def test(params: Any) -> dict[str, float] | None:
            if not tape.losses[2:]:
                stop.request()
            sums = evaluate(lambda p, b: (p["w"],), params, [0], stop)
            return None if sums is None else {"w": float(sums[0])}

        done = fit(
            step,
            step.init({"w": jnp.zeros(())}),
            batches(),
            train,
            evaluate=test,
            monitor=tape,
            checkpoints=Checkpoints(tmp_path),
            stop=stop,
        )
        return done.is_finished

    first, second = Tape(), Tape()
    assert not run(first)
    assert not [event for event in first.events if event[0] == "test"]
    stop.request(False)
    second.losses = [0.0] * 3
    assert run(second)
    assert second.events[0] == ("start", 2, 0, {"losses": 2})
    assert second.events[1:3] == [("pause",), ("test", 2, 2.0)]
    assert ("test", 4, 4.0) in second.events


def test_averaged_weights_are_tested(step: Any) -> None:
    tape = Tape()
    fit(
        step,
        step.init({"w": jnp.zeros(())}),
        batches(),
        Train(steps=3, ema=0.5),
        evaluate=lambda params: {"w": float(params["w"])},
        monitor=tape,
    )
    # 1, 2, 3 with weights 1/4, 1/2, 1.
    assert tape.events[-1] == ("test", 3, pytest.approx(4.25 / 1.75, rel=1e-6))


def test_the_average_is_part_of_the_state(tmp_path: Path, step: Any) -> None:
    train = Train(steps=2, ema=0.5)

    def run(train: Train) -> Fit:
        state, checkpoints = step.init({"w": jnp.zeros(())}), Checkpoints(tmp_path)
        return fit(step, state, batches(), train, checkpoints=checkpoints)

    run(train)
    ema = Ema(0.5)
    state = step.init({"w": jnp.zeros(())})
    template = {"train": state, "ema": ema.init(state.params)}
    restored = Checkpoints(tmp_path).restore(template)
    assert restored is not None
    assert float(restored.state["ema"].mean["w"]) == 1.25
    assert run(train).is_finished
    with pytest.raises(CheckpointError, match=r"holds `\['ema'\]"):
        run(Train(steps=2))


def test_a_resume_holds_one_state_only(tmp_path: Path, step: Any) -> None:
    train = Train(steps=2)
    for place in (tmp_path, tmp_path):
        state = step.init({"w": jnp.zeros(())})
        done = fit(step, state, batches(), train, checkpoints=Checkpoints(place))
        assert state.params["w"].is_deleted()
        assert float(done.state.params["w"]) == 2.0
    # Nothing is left of a run that is as long already.
    state = step.init({"w": jnp.zeros(())})
    shorter = Train(steps=1)
    done = fit(step, state, batches(), shorter, checkpoints=Checkpoints(tmp_path))
    assert (done.done, done.is_finished) == (2, True)


def test_data_that_ends(step: Any) -> None:
    data = ReplayedIterator(lambda: iter([np.zeros(8, np.float32)] * 2))
    assert isinstance(data, DataIterator)
    with pytest.raises(ValueError, match=r"`data` must give 3 batches.*got 2"):
        fit(step, step.init({"w": jnp.zeros(())}), data, Train(steps=3))


def test_other_data_are_refused(tmp_path: Path, step: Any) -> None:
    class Other(ReplayedIterator):
        def set_state(self, state: dict[str, Any]) -> None:
            raise ValueError("`seed` was 0, got 1")

    def run(data: DataIterator, steps: int) -> Fit:
        state, checkpoints = step.init({"w": jnp.zeros(())}), Checkpoints(tmp_path)
        return fit(step, state, data, Train(steps=steps), checkpoints=checkpoints)

    run(batches(), 1)
    with pytest.raises(CheckpointError, match=r"the data are not .* got 1"):
        run(Other(lambda: iter([])), 2)


def test_other_frozen_weights_are_refused(tmp_path: Path, mesh8: Mesh) -> None:
    def loss_fn(params: Any, batch: jax.Array, *, frozen: Any) -> jax.Array:
        return batch.mean() * (params["w"] + frozen["base"].sum())

    def go_on(base: np.ndarray, steps: int) -> Fit:
        step = sfpo.make_train_step(
            loss_fn, optax.sgd(1.0), mesh8, frozen={"base": base}
        )
        state = step.init({"w": jnp.zeros(())})
        kept = Checkpoints(tmp_path)
        return fit(step, state, batches(1.0), Train(steps=steps), checkpoints=kept)

    base = np.arange(4, dtype=np.float32)
    assert go_on(base, 1).done == 1
    assert go_on(base, 2).done == 2
    with pytest.raises(CheckpointError, match="weights that are not trained"):
        go_on(base[::-1].copy(), 3)
