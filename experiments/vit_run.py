"""Runs of the Vision Transformer experiments: configuration and set-up."""

import dataclasses

from jax.sharding import Mesh

from experiments.config import RunConfig
from experiments.data.images import Dataset
from experiments.devices import make_operator
from experiments.image_run import prepare_images
from experiments.models.vit import ViTConfig
from experiments.run import Run
from experiments.task import Task
from experiments.vit_task import make_task
from sfpo_jax.training import Data, Train

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
class Config(RunConfig):
    """Everything a run depends on."""

    model: ViTConfig = SMALL_VIT
    data: Data = dataclasses.field(default_factory=Data)
    train: Train = dataclasses.field(default_factory=lambda: Train("vit_mnist5k"))


def prepare(config: Config) -> Run:
    """Builds all that a run needs and checks what only shows then.

    Raises:
      ValueError: values that do not go together, in one line with the remedy.
    """
    model, parallel = config.model, config.parallel

    def task(dataset: Dataset, mesh: Mesh) -> Task:
        operator = make_operator(parallel, mesh, model)
        recompute = parallel.time.recompute == "full"
        return make_task(model, dataset, recompute=recompute, operator=operator)

    return prepare_images(config, task)
