"""Classifying images with a ResNet: parameters, batch statistics, loss and test."""

from typing import Any

import jax

from experiments.data.batches import Batch
from experiments.data.images import Dataset
from experiments.image_task import image_reader
from experiments.models.resnet import ResNetConfig, make_classifier
from experiments.scores import total_score
from experiments.task import Task, from_seed, shapes_of


def make_resnet_task(
    model: ResNetConfig, dataset: Dataset, *, recompute: bool = False
) -> Task:
    """Puts a ResNet and a data set together.

    In training a batch norm takes the statistics of a device's own images; the running
    ones, by which it is tested, are averaged over the devices.

    Args:
      model: sizes of the network.
      dataset: what it learns.
      recompute: compute the activations inside each block again in the backward pass.

    Raises:
      ValueError: images or classes that do not fit the model.
    """
    read = image_reader(model, dataset)
    net = make_classifier(model, recompute="full" if recompute else "none")

    def loss_fn(params: Any, batch: Batch, *, model_state: Any) -> Any:
        images, labels = read(batch)
        given = {"image": images, "label": labels}
        return net.loss_fn(params, given, model_state=model_state)

    def test(params: Any, batch: Batch, *, model_state: Any) -> Any:
        images, labels = read(batch)
        return total_score(net.predict(params, model_state, images), labels)

    return Task(
        init=from_seed(lambda key: net.init(key)[0]),
        loss_fn=loss_fn,
        test=jax.jit(test),
        has_key=False,
        shapes=shapes_of(lambda key: net.init(key)[0]),
        init_state=from_seed(lambda key: net.init(key)[1]),
    )
