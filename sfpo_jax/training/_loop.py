"""The loop: steps, tests, checkpoints, and the ways to end."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from sfpo_jax.parallel import Step, TrainState
from sfpo_jax.training._checkpoints import Checkpoints
from sfpo_jax.training._data_iterator import DataIterator
from sfpo_jax.training._ema import Ema, EmaState
from sfpo_jax.training._manifest import CheckpointError
from sfpo_jax.training._sections import Train
from sfpo_jax.training._signals import Stop
from sfpo_jax.training._vitals import fingerprint

Metrics = dict[str, float]


class NonFiniteLossError(FloatingPointError):
    """The loss stayed infinite or NaN: one line, with what to try."""


class DisagreementError(RuntimeError):
    """Devices hold different copies of what is to be the same, in one line."""


class Monitor:
    """What is told of a run; override what is wanted."""

    def started(self, done: int, tested: int, saved: Any) -> None:
        """The run begins after step `done`, or goes on there.

        Args:
          done: steps taken, 0 at a fresh start.
          tested: the step after which the last test was made; less than `done` where
            the test after that is still to come.
          saved: what `get_state` gave when the checkpoint was made, None without.
        """

    def fetched(self, seconds: float) -> None:
        """The batch of the next step came, after so long a wait."""

    def dispatched(self, done: int, state: TrainState) -> None:
        """Step `done` is on its way; its `state` is gone with the next step."""

    def stepped(self, done: int, metrics: Metrics) -> None:
        """The metrics of step `done`, a step late: one step is always in flight."""

    def paused(self) -> None:
        """Nothing is in flight: the time until the next step is not a step's."""

    def evaluated(self, done: int, metrics: Metrics) -> None:
        """The outcome of the test after step `done`."""

    def get_state(self) -> Any:
        """What `started` needs to go on after this step; it goes through JSON."""
        return None


class Fit(NamedTuple):
    """How a run ended."""

    state: TrainState
    done: int  # steps taken, those before a resume included
    is_finished: bool  # False where it was asked to stop before


def fit(
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]],
    state: TrainState,
    data: DataIterator,
    train: Train,
    *,
    evaluate: Callable[..., Metrics | None] | None = None,
    monitor: Monitor | None = None,
    checkpoints: Checkpoints | None = None,
    stop: Stop | None = None,
) -> Fit:
    """Trains for `train.steps` steps, from the last checkpoint where there is one.

    A run that was killed and goes on from a checkpoint gives, bit by bit, what one
    without a break gives: the checkpoint holds parameters, optimizer state, residuals,
    random key, averaged weights, the place in the data and the monitor's state.

    Args:
      step: from `make_train_step` or `make_layered_train_step`. It runs under
        `jax.transfer_guard("disallow")`: a hidden copy between host and devices is an
        error.
      state: from ``step.init``; given up.
      data: the batches.
      train: `steps`, `evaluate_every`, `checkpoint_every`, `ema`, `max_nonfinite`.
      evaluate: (parameters[, model_state=]) -> metrics, called with nothing in flight,
        after every `evaluate_every` steps and after the last; with the averaged weights
        where `ema` is on, and the model state where the step has one. None from it:
        stopped, and to be repeated on resume.
      monitor: is told of each step and test.
      checkpoints: where the run is saved every `checkpoint_every` steps, after the
        last, and when it stops. Not every so many steps while the loss is not finite.
      stop: when requested, the run is saved after the step at hand and left.

    Returns:
      The last state, the steps taken, and whether that is all of them.

    Raises:
      DisagreementError: devices hold different copies of an array.
      NonFiniteLossError: the loss was not finite in `max_nonfinite` steps in a row.
      CheckpointError: a checkpoint cannot be written, or holds another state.
      ValueError: the data ended early.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import sfpo_jax as sfpo
      >>> from sfpo_jax.training import ReplayedIterator, Train
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params["w"] - 1) ** 2)
      >>> step = sfpo.make_train_step(loss_fn, optax.sgd(0.1), sfpo.make_mesh())
      >>> state = step.init({"w": jnp.zeros(2)})
      >>> data = ReplayedIterator(lambda: iter([jnp.ones((8, 2))] * 20))
      >>> done = fit(step, state, data, Train(steps=20))
      >>> done.done, done.is_finished, done.state.params["w"].round(3).tolist()
      (20, True, [0.5, 0.5])
    """
    loop = _Loop(step, state, data, train, evaluate, monitor, checkpoints, stop)
    return loop.run()


class _Loop:
    def __init__(
        self,
        step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]],
        state: TrainState,
        data: DataIterator,
        train: Train,
        evaluate: Callable[..., Metrics | None] | None,
        monitor: Monitor | None,
        checkpoints: Checkpoints | None,
        stop: Stop | None,
    ) -> None:
        self._step, self._state, self._data, self._train = step, state, data, train
        self._evaluate = evaluate
        self._monitor = monitor or Monitor()
        self._checkpoints = checkpoints
        self._stop = stop or Stop()
        self._ema = None if train.ema == "none" else Ema(train.ema)
        self._mean: EmaState | None = self._ema and self._ema.init(state.params)
        self._done = 0
        self._tested = 0  # step after which the last test was made
        self._agreed = 0  # step after which the devices were last compared
        self._saved: int | None = None  # step of the last checkpoint
        self._nonfinite = 0  # steps in a row, up to the last one
        self._pending: list[tuple[int, dict[str, jax.Array]]] = []
        frozen = step.frozen if isinstance(step, Step) else None
        self._frozen = None if frozen is None else fingerprint(frozen)

    def run(self) -> Fit:
        """All steps that are left, or as many as there is time for."""
        self._resume()
        self._stop.meet()
        while not self._stop.requested:
            if not self._test_if_due():
                break
            self._agree_if_due()
            self._save_if_due()
            if self._is_last():
                return Fit(self._state, self._done, True)
            # Asked while it tested or saved.
            if not self._stop.requested_alone:
                self._advance()
        self._flush()
        self._save()
        return Fit(self._state, self._done, False)

    def _advance(self) -> None:
        began = time.perf_counter()
        try:
            batch = next(self._data)
        except StopIteration:
            raise ValueError(
                f"`data` must give {self._train.steps} batches (`train.steps`), got "
                f"{self._done}: let it begin anew."
            ) from None
        self._monitor.fetched(time.perf_counter() - began)
        with jax.transfer_guard("disallow"):
            self._state, metrics = self._step(self._state, batch)
            if self._ema and self._mean:
                self._mean = self._ema.update(self._mean, self._state.params)
        self._done += 1
        self._monitor.dispatched(self._done, self._state)
        self._pending.append((self._done, metrics))
        if len(self._pending) > 1:
            self._resolve()

    def _resolve(self) -> None:
        """Waits for the oldest step in flight."""
        done, metrics = self._pending.pop(0)
        values = {name: x.item() for name, x in jax.device_get(metrics).items()}
        self._nonfinite = 0 if math.isfinite(values["loss"]) else self._nonfinite + 1
        self._monitor.stepped(done, values)
        if self._nonfinite >= self._train.max_nonfinite:
            raise NonFiniteLossError(
                f"the loss was {values['loss']} at step {done}, and not finite in "
                f"{self._nonfinite} steps in a row (`train.max_nonfinite`): lower "
                "`optimizer.learning_rate`, set `optimizer.clip_norm`, or look for "
                "such values in the data."
            )

    def _flush(self) -> None:
        while self._pending:
            self._resolve()
        self._monitor.paused()

    def _is_last(self) -> bool:
        return self._done >= self._train.steps

    def _is_due(self, every: int) -> bool:
        return self._is_last() or (self._done > 0 and self._done % every == 0)

    def _agree_if_due(self) -> None:
        every = self._train.agree_every
        if every == "none" or self._done in (0, self._agreed):
            return
        if not isinstance(self._step, Step) or self._step.mesh.size == 1:
            return
        # What is saved is to be right.
        saves = self._checkpoints and self._is_due(self._train.checkpoint_every)
        if not saves and not self._is_due(every):
            return
        if self._pending:
            self._flush()
        self._agreed = self._done
        if names := self._step.differing(self._state):
            raise DisagreementError(
                f"the devices differ after step {self._done} in {names[0]} and "
                f"{len(names) - 1} more arrays: a bit flipped, or hosts run different "
                "versions; go on from the last checkpoint, without the host that "
                "repeats it."
            )

    def _test_if_due(self) -> bool:
        """False where the test was stopped."""
        if self._evaluate is None or self._tested == self._done:
            return True
        if not self._is_due(self._train.evaluate_every):
            return True
        self._flush()
        params = self._state.params
        if self._ema and self._mean:
            params = self._ema.average(self._mean, params)
        held = self._state.model_state
        extra = {} if held is None else {"model_state": held}
        metrics = self._evaluate(params, **extra)
        if metrics is None:
            return False
        self._tested = self._done
        self._monitor.evaluated(self._done, metrics)
        return True

    def _save_if_due(self) -> None:
        if self._checkpoints is None:
            return
        if self._is_due(self._train.checkpoint_every):
            self._flush()
            # Parameters may be lost already; the checkpoints before are better.
            if self._nonfinite == 0 or self._is_last():
                self._save()

    def _save(self) -> None:
        if self._checkpoints is None or self._saved == self._done:
            return
        extra = {
            "tested": self._tested,
            "nonfinite": self._nonfinite,
            "monitor": self._monitor.get_state(),
            "frozen": self._frozen,
        }
        state, data_state = self._everything(), self._data.get_state()
        self._checkpoints.save(self._done, state, data_state, extra)
        self._saved = self._done

    def _resume(self) -> None:
        fresh = self._everything()
        saved = self._checkpoints and self._checkpoints.restore(fresh)
        if not saved:
            self._monitor.started(0, 0, None)
            return
        if saved.extra.get("frozen", self._frozen) != self._frozen:
            raise CheckpointError(
                "the weights that are not trained (`frozen` of the step) are not those "
                "the run began with: give it the same ones, or begin another run."
            )
        # No step donates it now, and the caller may hold it to the end.
        for leaf in jax.tree.leaves(fresh):
            leaf.delete()
        self._state, self._mean = saved.state["train"], saved.state["ema"]
        try:
            self._data.set_state(saved.data_state)
        except ValueError as error:
            raise CheckpointError(
                f"the data are not those the run began with: {error}"
            ) from error
        self._done = self._saved = int(self._state.step)
        self._tested = saved.extra["tested"]
        self._nonfinite = saved.extra["nonfinite"]
        self._monitor.started(self._done, self._tested, saved.extra["monitor"])

    def _everything(self) -> dict[str, Any]:
        return {"train": self._state, "ema": self._mean}
