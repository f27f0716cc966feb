"""Runs of the Vision Transformer experiments: configuration, set-up, contenders."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from experiments.contender import Contender, Record, Result, run_contender
from experiments.data.images import Dataset
from experiments.data.sources import held_out_batches, open_dataset, training_stream
from experiments.devices import compressed_axis, make_run_mesh, show_cpu_devices
from experiments.models.vit import ViTConfig
from experiments.run_log import Store
from experiments.vit_task import Task, make_task
from sfpo_jax import training
from sfpo_jax.training import (
    Communication,
    Data,
    Memory,
    Optimizer,
    Parallel,
    Sparsity,
    Stop,
    Train,
)

# The same network as ViT-L/16, as narrow as 5,000 small digits can use.
SMALL_VIT = ViTConfig(
    image_size=28,
    patch_size=7,
    channels=1,
    width=64,
    depth=4,
    heads=4,
    mlp_width=256,
    classes=10,
    pool="mean",
)

DENSE = "dense AdamW"
_NAMES = {
    "none": "AdamW",
    "bf16": "bfloat16 AdamW",
    "int8": "int8 AdamW",
    "1bit_adam": "SFPO",
    "sparse_1bit": "sparse 1-bit Adam",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    model: ViTConfig = SMALL_VIT
    data: Data = dataclasses.field(default_factory=Data)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    sparsity: Sparsity = dataclasses.field(default_factory=Sparsity)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    communication: Communication = dataclasses.field(default_factory=Communication)
    memory: Memory = dataclasses.field(default_factory=Memory)
    train: Train = dataclasses.field(default_factory=lambda: Train("vit_mnist5k"))


class Run(NamedTuple):
    """A configuration made ready to start."""

    config: Config
    dataset: Dataset
    task: Task
    mesh: Mesh
    contenders: list[Contender]

    def start(
        self,
        contender: Contender,
        on_record: Callable[[Record], None] = lambda record: None,
        *,
        store: Store | None = None,
        stop: Stop | None = None,
    ) -> Result:
        """Trains one contender; all of them see the same batches.

        Arguments and errors are those of `run_contender`.
        """
        data, train = self.config.data, self.config.train
        return run_contender(
            contender,
            self.task,
            self.mesh,
            training_stream(self.dataset.train, data, train.seed),
            # Without gradients, twice the batch still takes less memory than training.
            held_out_batches(self.dataset.test, 2 * data.batch_size),
            train,
            microbatches=self.config.parallel.microbatches,
            on_record=on_record,
            store=store,
            stop=stop,
        )


def prepare(config: Config) -> Run:
    """Builds all that a run needs and checks what only shows then.

    Raises:
      ValueError: values that do not go together, in one line with the remedy.
    """
    show_cpu_devices(config.parallel.cpu_devices)
    model = config.model
    dataset = open_dataset(config.data, model.image_size, model.channels)
    recompute = config.parallel.time.recompute == "full"
    task = make_task(config.model, dataset, recompute=recompute)
    mesh = make_run_mesh(config.parallel, config.data)
    own = make_contender(config, mesh)
    reference = make_dense(config) if config.train.compare else None
    return Run(config, dataset, task, mesh, [c for c in (reference, own) if c])


def make_dense(config: Config) -> Contender:
    """Dense AdamW, the reference."""
    tx = training.make_dense_optimizer(config.optimizer, config.train.steps)
    return Contender(DENSE, tx)


def make_contender(config: Config, mesh: Mesh) -> Contender:
    """The optimizer that the configuration names."""
    algorithm = config.communication.compression.algorithm
    tx = training.make_optimizer(
        config.optimizer,
        config.sparsity,
        config.communication,
        config.memory,
        steps=config.train.steps,
        axis_name=compressed_axis(mesh),
    )
    if algorithm not in training.ONE_BIT:
        return Contender(_NAMES[algorithm], tx)
    sparsity = functools.partial(
        training.sparsity_curve,
        config.sparsity,
        config.communication,
        config.train.steps,
    )
    return Contender(_NAMES[algorithm], tx, ("warmup", "compressed"), sparsity)
