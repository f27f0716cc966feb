"""How a contender's step is built: plain, or layer by layer with gradient release."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optax
from jax.sharding import Mesh

from experiments.task import Task, Test
from sfpo_jax import make_layered_train_step, make_train_step
from sfpo_jax.parallel import Offload, Step


@dataclasses.dataclass(frozen=True)
class GradientRelease:
    """What the layered step does besides the transformation."""

    recompute: Literal["none", "full", "auto"] = "full"
    """What a layer computes again in the backward pass."""
    budget: str | None = None
    """What a device may hold, with auto."""
    rounding: str | None = None
    """How bfloat16 weights keep small updates."""
    shard: Literal["none", "states", "weights"] = "none"
    """What each device keeps but its part of."""
    shard_axes: tuple[str, ...] = ("data",)
    """Mesh axes that the parts lie along."""
    pipeline_depth: int = 2
    """Layers whose reduction is in flight."""
    offload: tuple[Offload, ...] = ()
    """What of the layers lies in the host's memory."""


class Trainee(NamedTuple):
    """A task in the form that a step takes."""

    step: Step
    init: Callable[[int], Any]  # seed -> parameters
    test: Test


def make_trainee(
    task: Task,
    tx: optax.GradientTransformation,
    release: GradientRelease | None,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    max_norm: float | None = None,
    shard_axes: tuple[str, ...] = (),
    frozen: Any = None,
    budget: str | None = None,
    staleness: int = 0,
) -> Trainee:
    """The step that trains a task, and the parameters it trains.

    Args:
      task: parameters, loss and test.
      tx: the optimizer; with `release` it must not mix layers.
      release: None for the plain step.
      mesh: the devices.
      microbatches: parts of a device's batch.
      max_norm: what the step clips to, where the chain sees layers, or parts of
        tensors.
      shard_axes: axes along which the plain step shares the states; () for none.
      frozen: what the task reads and nobody trains.
      budget: what a device may hold; the plain step then plans what it computes again.
      staleness: steps that an update of the plain step comes late.
    """
    shared: Any = {
        "has_key": task.has_key,
        "microbatches": microbatches,
        "max_norm": max_norm,
    }
    if release is None:
        if shard_axes:
            shared |= {"shard": "states", "shard_axes": shard_axes}
        if budget is not None:
            shared |= {"recompute": "auto", "budget": budget}
        step = make_train_step(
            task.loss_fn,
            tx,
            mesh,
            operator_specs=task.specs,
            has_model_state=task.init_state is not None,
            frozen=frozen,
            staleness=staleness,
            **shared,
        )
        return Trainee(step, task.init, task.test)
    layered = task.layered
    if layered is None:
        raise ValueError("`task` must have layers for the layered step, got none.")
    step = make_layered_train_step(
        layered.model,
        tx,
        mesh,
        operator_specs=layered.specs,
        **dataclasses.asdict(release),
        **shared,
    )
    return Trainee(step, layered.init, layered.test)
