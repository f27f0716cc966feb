"""A GPT whose gradients are applied layer by layer, up to the 13 billion of GPT-3.

    python -m experiments.gpt3_13b
    python -m experiments.gpt3_13b --model.depth 8 --optimizer.clip_norm 1.0
    python -m experiments.gpt3_13b --config configs/gpt3_13b.yaml

Without arguments it is the small network of `configs/gpt_stdlib.yaml`, on the sources
of Python's standard library: dense AdamW by the plain step, and the same AdamW by the
layered step, which never holds more than one layer's gradient. `build` gives the step
of the full size, from shapes alone, for whoever plans its memory.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.command import Experiment, run_experiment
from experiments.devices import make_operator
from experiments.models.gpt import GPTConfig
from experiments.models.layered import layered_gpt
from experiments.text_run import TextConfig, prepare_text
from sfpo_jax import make_layered_train_step
from sfpo_jax.parallel import LayeredTrainStep, TrainState
from sfpo_jax.training import (
    Communication,
    Compression,
    Memory,
    Optimizer,
    Parallel,
    Train,
    make_dense_optimizer,
    read_yaml,
)
from sfpo_jax.training import build as build_config

PROGRAM = "python -m experiments.gpt3_13b"
FULL_SIZE = Path(__file__).parents[1] / "configs" / "gpt3_13b.yaml"
# As wide as two CPU cores train in minutes, and deep enough for layers to matter.
SMALL = TextConfig(
    model=GPTConfig(depth=4),
    optimizer=Optimizer(learning_rate=0.006),
    parallel=Parallel(cpu_devices=4),
    communication=Communication(Compression("none")),
    memory=Memory(gradient_release=True),
    train=Train("gpt_stdlib", steps=600),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; arguments and status are those of `run_experiment`."""
    description = "Trains a GPT, its gradients applied layer by layer."
    return run_experiment(Experiment(PROGRAM, description, SMALL, prepare_text), argv)


def build(
    mesh: Mesh, batch_size: int | None = None
) -> tuple[LayeredTrainStep, TrainState, jax.ShapeDtypeStruct]:
    """(step, state, batch) of the full size on a mesh, the latter two as shapes.

    One window a device, or `batch_size` of all devices; weights and states sharded
    over `data` where there are several. The devices of the mesh need not exist.
    """
    config = build_config(TextConfig, read_yaml(FULL_SIZE))
    model, clip_norm = config.model, config.optimizer.clip_norm
    rounding = config.memory.rounding
    operator = make_operator(config.parallel, mesh, model)
    layered = layered_gpt(model, operator)
    # The step clips, for the chain sees one layer at a time.
    unclipped = dataclasses.replace(config.optimizer, clip_norm="none")
    step = make_layered_train_step(
        layered.model,
        make_dense_optimizer(unclipped, config.train.steps, config.memory),
        mesh,
        has_key=model.dropout > 0,
        max_norm=None if clip_norm == "none" else clip_norm,
        rounding=None if rounding == "none" else rounding,
        shard="none" if mesh.shape["data"] == 1 else "weights",
        pipeline_depth=config.parallel.pipeline_depth,
        operator_specs=None if operator is None else layered.specs,
        recompute=config.parallel.time.recompute,
        budget=config.parallel.time.limit,
        microbatches=config.parallel.microbatches,
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(layered.init, key)
    state = step.init_shapes(params, key if model.dropout > 0 else None)
    devices = math.prod(mesh.shape[name] for name in step.batch_axes)
    windows = batch_size or devices * config.parallel.microbatches
    return step, state, jax.ShapeDtypeStruct((windows, model.length + 1), jnp.int32)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
