"""Runs on labelled images: set-up from the source to the contenders."""

from collections.abc import Callable

from jax.sharding import Mesh

from experiments.config import RunConfig
from experiments.data.images import Dataset
from experiments.data.sources import held_out_batches, open_dataset, training_stream
from experiments.devices import make_run_mesh, show_cpu_devices
from experiments.run import Run, make_contenders, settle_run
from experiments.task import Task
from sfpo_jax.training import check_groups


def prepare_images(
    config: RunConfig, make_task: Callable[[Dataset, Mesh], Task]
) -> Run:
    """Builds all that a run on images needs.

    Args:
      config: of the run; `model` has an `image_size` and `channels`.
      make_task: (data set, mesh) -> what is trained.

    Raises:
      ValueError: values that do not go together, in one line with the remedy.
    """
    show_cpu_devices(config.parallel.cpu_devices)
    data = config.data
    dataset = open_dataset(data, config.model.image_size, config.model.channels)
    mesh = make_run_mesh(config.parallel, data.batch_size)
    task = make_task(dataset, mesh)
    check_groups(config.optimizer.groups, task.shapes)
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
