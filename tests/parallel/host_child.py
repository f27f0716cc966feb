"""One host of a small SFPO run; a program, started by tests through the launcher.

    python host_child.py FOLDER STEPS SECONDS DEADLINE

SECONDS is how long each step's data take to come. Ends as an experiment does. Alone it
shows two devices, which are the two nodes that two hosts would be.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sfpo_jax as sfpo
from sfpo_jax.parallel import current_hosts, is_launched, join_hosts
from sfpo_jax.training import (
    Checkpoints,
    Monitor,
    ReplayedIterator,
    Train,
    evaluate,
    fit,
    stop_on_signals,
)

PROGRAM = "host_child"


def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["w"])
    hidden *= jax.random.bernoulli(key, 0.9, hidden.shape)
    return jnp.mean((hidden @ params["v"] - jnp.sin(batch["x"][:, :1])) ** 2)


def batches(rows: slice, seconds: float) -> Iterator[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    while True:
        time.sleep(seconds)
        yield {"x": generator.normal(size=(8, 24)).astype(np.float32)[rows]}


class Tape(Monitor):
    """A line for each step, from the first host."""

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first

    def stepped(self, done: int, metrics: dict[str, float]) -> None:
        if self._is_first:
            print(f"step {done} loss {metrics['loss'].hex()}", flush=True)


def main(folder: str, steps: int, seconds: float, deadline: float) -> int:
    jax.config.update("jax_num_cpu_devices", 1 if is_launched() else 2)
    hosts = join_hosts(deadline=deadline) if is_launched() else current_hosts()
    with hosts.failing_together(PROGRAM):
        status = train(folder, steps, seconds, hosts)
    hosts.leave(status)
    return status


def train(folder: str, steps: int, seconds: float, hosts: Any) -> int:
    mesh = sfpo.make_mesh(node=hosts.count if is_launched() else 2)
    tx = sfpo.onebit_adam(0.01, warmup_steps=4, axis_name="node")
    step = sfpo.make_train_step(loss_fn, tx, mesh, has_key=True)
    rng = np.random.default_rng(1)
    params = {
        "v": rng.normal(size=(48, 1)).astype(np.float32),
        "w": rng.normal(size=(24, 48)).astype(np.float32),
    }
    state = step.init(params, jax.random.key(0))
    share = 8 // hosts.count
    rows = slice(share * hosts.rank, share * (hosts.rank + 1))
    test = jax.jit(lambda p, x: (jnp.mean(jnp.tanh(x @ p["w"])),))
    held_out = step.shard_batch({"x": np.ones((8, 24), np.float32)[rows]})["x"]
    with stop_on_signals() as stop:
        done = fit(
            step,
            state,
            ReplayedIterator(lambda: batches(rows, seconds)),
            Train(steps=steps, evaluate_every=7, checkpoint_every=10, agree_every=5),
            evaluate=lambda p: score(evaluate(test, p, [held_out] * 4, stop)),
            monitor=Tape(hosts.is_first),
            checkpoints=Checkpoints(folder),
            stop=stop,
        )
    print(f"host {hosts.rank} left after step {done.done}", flush=True)
    return 0


def score(sums: np.ndarray | None) -> dict[str, float] | None:
    return None if sums is None else {"mean": float(sums[0])}


if __name__ == "__main__":
    folder, steps, seconds, deadline = sys.argv[1:]
    status = main(folder, int(steps), float(seconds), float(deadline))
    sys.stdout.flush()
    sys.exit(status)
