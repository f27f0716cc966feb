"""The default run of `vit_l`: what its steps take beside forward and backward."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import optax

from experiments.bench.contender import Run
from experiments.layout import make_trainee
from experiments.vit_run import Config, prepare
from sfpo_jax.kernels import use_twins

# Past the warm-up of 96 steps, and a refresh.
_STEPS = 115


def step_runs() -> dict[str, Run]:
    """One step each: of SGD, dense AdamW, SFPO natively and SFPO in jnp."""
    run = prepare(Config())
    batch = next(iter(run.stream()))
    dense, sfpo = run.contenders
    key = jax.random.key(1) if run.task.has_key else None

    def ready(tx: Any, steps: int, context: Callable[[], Any]) -> Run:
        step, init, _ = make_trainee(run.task, tx, dense.release, run.mesh)
        held = [step.init(init(0), key)]
        placed = step.shard_batch(batch)

        def turn() -> None:
            held[0], _ = jax.block_until_ready(step(held[0], placed))

        with context():
            for _ in range(steps):
                turn()
        return turn

    return {
        "SGD": ready(optax.sgd(1e-3), 2, contextlib.nullcontext),
        "dense AdamW": ready(dense.tx, 2, contextlib.nullcontext),
        "SFPO, native kernels": ready(sfpo.tx, _STEPS, contextlib.nullcontext),
        "SFPO, jnp twins": ready(sfpo.tx, _STEPS, use_twins),
    }
