"""Dense AdamW and SFPO train a ResNet side by side.

    python -m experiments.resnet50
    python -m experiments.resnet50 --config configs/resnet50.yaml --data.source imagenet
    python -m experiments.resnet50 --train.resume runs/resnet_mnist5k-20250102-030405

Without arguments it is the narrow network of `configs/resnet_mnist5k.yaml`, on 5,000
real digits and four devices shown by the CPU. Batch statistics are state beside the
parameters; the test takes their running averages.
"""

import dataclasses
import sys
from collections.abc import Sequence

from jax.sharding import Mesh

from experiments.command import Experiment, run_experiment
from experiments.config import RunConfig, check_plain
from experiments.data.images import Dataset
from experiments.image_run import prepare_images
from experiments.models.resnet import ResNetConfig
from experiments.resnet_task import make_resnet_task
from experiments.run import Run
from experiments.task import Task
from sfpo_jax.training import Data, Parallel, Train

PROGRAM = "python -m experiments.resnet50"
# The same network as ResNet-50, as narrow and shallow as 5,000 small digits can use.
SMALL_RESNET = ResNetConfig(
    image_size=28, channels=1, width=16, stages=(2, 2, 2), classes=10
)


@dataclasses.dataclass(frozen=True)
class ResNetRun(RunConfig):
    """Everything a run depends on."""

    model: ResNetConfig = SMALL_RESNET
    data: Data = dataclasses.field(default_factory=Data)
    # A device's batch norms want more than 16 images.
    parallel: Parallel = dataclasses.field(
        default_factory=lambda: Parallel(cpu_devices=4)
    )
    train: Train = dataclasses.field(
        default_factory=lambda: Train("resnet_mnist5k", steps=400)
    )


def prepare(config: ResNetRun) -> Run:
    """Builds all that a run needs and checks what only shows then.

    Raises:
      ValueError: values that do not go together, in one line with the remedy.
    """
    check_plain(config, "ResNet")
    model, recompute = config.model, config.parallel.time.recompute == "full"

    def task(dataset: Dataset, mesh: Mesh) -> Task:
        del mesh
        return make_resnet_task(model, dataset, recompute=recompute)

    return prepare_images(config, task)


def main(argv: Sequence[str]) -> int:
    """Runs the command; arguments and status are those of `run_experiment`."""
    description = "Trains a ResNet."
    return run_experiment(Experiment(PROGRAM, description, ResNetRun(), prepare), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
