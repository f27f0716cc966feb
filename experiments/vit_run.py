"""Runs of the Vision Transformer experiments: configuration and set-up."""

import dataclasses

import jax

from experiments.data.images import Dataset
from experiments.data.sources import held_out_batches, open_dataset, training_stream
from experiments.devices import make_operator, make_run_mesh, show_cpu_devices
from experiments.models.vit import ViTConfig
from experiments.run import Run, make_contenders, settle_run
from experiments.vit_task import make_task
from sfpo_jax.training import (
    Communication,
    Data,
    Distributed,
    Memory,
    Optimizer,
    Parallel,
    Sparsity,
    Train,
    check_groups,
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
    distributed: Distributed = dataclasses.field(default_factory=Distributed)
    train: Train = dataclasses.field(default_factory=lambda: Train("vit_mnist5k"))


def prepare(config: Config) -> Run:
    """Builds all that a run needs and checks what only shows then.

    Raises:
      ValueError: values that do not go together, in one line with the remedy.
    """
    show_cpu_devices(config.parallel.cpu_devices)
    model = config.model
    dataset = open_dataset(config.data, model.image_size, model.channels)
    recompute = config.parallel.time.recompute == "full"
    mesh = make_run_mesh(config.parallel, config.data.batch_size)
    operator = make_operator(config.parallel, mesh, model)
    task = make_task(model, dataset, recompute=recompute, operator=operator)
    check_groups(config.optimizer.groups, jax.eval_shape(lambda: task.init(0)))
    data = config.data
    config, notes = settle_run(config, mesh, task)
    return Run(
        config,
        _describe(dataset),
        task,
        mesh,
        make_contenders(config, mesh),
        stream=lambda: training_stream(dataset.train, data, config.train.seed),
        # Without gradients, twice the batch still takes less memory than training.
        tests=lambda: held_out_batches(dataset.test, 2 * data.batch_size),
        notes=notes,
    )


def _describe(dataset: Dataset) -> str:
    height, width, channels = dataset.train.shape
    return (
        f"{len(dataset.train.labels)} training and {len(dataset.test.labels)} test "
        f"images of {dataset.name}, {height} x {width} x {channels}, "
        f"{dataset.classes} classes"
    )
