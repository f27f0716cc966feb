"""A small SFPO run that ends itself at given points; a program, started by tests.

    python interrupted.py FOLDER [WHERE@STEP ...]

Each point is a start of its own, forked before JAX is, and ends at the point: `step`
while the step is in flight, `test` in the evaluation, `save` after the arrays are
written, `commit` before the checkpoint gets its name, `retire` before the oldest is
removed. With a leading `term-` the end is SIGTERM, otherwise SIGKILL. A last start
runs to the end. Prints one JSON line for each start.
"""

import hashlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sfpo_jax as sfpo
from sfpo_jax.training import (
    Checkpoints,
    JsonLines,
    Monitor,
    ReplayedIterator,
    Train,
    _checkpoints,
    fit,
    stop_on_signals,
)

STEPS, WARMUP = 14, 7
TRAIN = Train(steps=STEPS, evaluate_every=3, checkpoint_every=2, keep=2, ema=0.9)


def batches() -> Iterator[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    for number in range(1000):
        x = generator.normal(size=(8, 24)).astype(np.float32)
        yield {"x": x, "number": np.full(8, number, np.float32)}


def loss_fn(params: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["w"])
    hidden *= jax.random.bernoulli(key, 0.9, hidden.shape)
    error = hidden @ params["v"] - jnp.sin(batch["x"][:, :1])
    mean = 0.9 * model_state + 0.1 * hidden.mean(0)
    return (error**2).mean(), {"model_state": mean, "number": batch["number"].mean()}


class Tape(Monitor):
    """Every loss, test and checkpoint, exactly."""

    def __init__(self, folder: Path) -> None:
        self.lines = JsonLines(folder / "tape.jsonl")
        self.done = 0

    def started(self, done: int, tested: int, saved: Any) -> None:
        self.done = done
        self.lines.rewind(
            lambda record: record["step"] <= (tested if "test" in record else done)
        )

    def dispatched(self, done: int, state: Any) -> None:
        self.done = done
        reach("step", done)

    def stepped(self, done: int, metrics: dict[str, float]) -> None:
        exact = {name: float(x).hex() for name, x in metrics.items()}
        self.lines.write({"step": done, **exact})

    def evaluated(self, done: int, metrics: dict[str, float]) -> None:
        self.lines.write({"step": done, "test": metrics["test"].hex()})

    def saving(self, done: int, state: Any) -> None:
        """The digest of every array of a checkpoint."""
        digests = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            data = np.asarray(leaf).tobytes()
            digests[jax.tree_util.keystr(path)] = hashlib.sha256(data).hexdigest()
        self.lines.write({"step": done, "digests": digests})


# Where this start ends; none: at the end of the run.
POINT: list[str] = []


def reach(where: str, step: int) -> None:
    """Ends this process if this is the point."""
    name = f"{where}@{step}"
    if POINT == [name]:
        os.kill(os.getpid(), signal.SIGKILL)
    if POINT == [f"term-{name}"]:
        os.kill(os.getpid(), signal.SIGTERM)


class Watched(Checkpoints):
    """Tells the tape of each checkpoint, and passes points on its way."""

    tape: Tape
    step = 0

    def save(
        self, step: int, state: Any, data_state: Any = None, extra: Any = None
    ) -> None:
        self.step = step
        self.tape.saving(step, state)
        super().save(step, state, data_state, extra)

    def _commit(self, draft: Path, step: int) -> None:
        reach("commit", step)
        super()._commit(draft, step)

    def _remove(self, step: int) -> None:
        reach("retire", self.step)
        super()._remove(step)


def run(folder: Path) -> int:
    """One start; the exit status."""
    checkpoints = Watched(folder / "checkpoints", TRAIN.keep)
    checkpoints.tape = tape = Tape(folder)
    write = _checkpoints.write_manifest

    def write_manifest(draft: Path, step: int, leaves: Any) -> None:
        reach("save", step)
        write(draft, step, leaves)

    _checkpoints.write_manifest = write_manifest
    mesh = sfpo.make_mesh()
    tx = sfpo.sfpo(
        1e-2, STEPS, warmup_steps=WARMUP, min_size=16, axis_name="data", eps=1e-6
    )
    step = sfpo.make_train_step(loss_fn, tx, mesh, has_key=True, has_model_state=True)
    keys = jax.random.split(jax.random.key(1), 2)
    params = {
        "w": jax.random.normal(keys[0], (24, 64)) / 5,
        "v": jax.random.normal(keys[1], (64, 1)) / 8,
    }
    state = step.init(params, jax.random.key(2), jnp.zeros(64))

    def evaluate(params: Any, model_state: Any) -> dict[str, float] | None:
        del model_state
        reach("test", tape.done)
        if stop.requested:
            return None
        return {"test": float(jnp.square(params["w"]).sum())}

    with stop_on_signals() as stop:
        done = fit(
            step,
            state,
            ReplayedIterator(batches),
            TRAIN,
            evaluate=evaluate,
            monitor=tape,
            checkpoints=checkpoints,
            stop=stop,
        )
    return 0 if done.is_finished or stop.requested else 3


def main(folder: Path, points: list[str]) -> None:
    """All starts, one after another."""
    # Imported once for all of them.
    importlib.import_module("orbax.checkpoint")
    for point in [*points, ""]:
        began = time.monotonic()
        child = os.fork()
        if not child:
            POINT[:] = [point]
            status = 4
            try:
                status = run(folder)
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        names = sorted(path.name for path in (folder / "checkpoints").glob("*"))
        report = {
            "point": point,
            "status": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - began,
            "checkpoints": names,
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
