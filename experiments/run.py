"""A run made ready to start, and the contenders that a configuration names."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.contender import Contender, Record, Result, run_contender
from experiments.layout import GradientRelease
from experiments.profiling.recorder import Recorder
from experiments.run_log import Course, Store
from experiments.task import Task
from sfpo_jax import RecomputePlan, training
from sfpo_jax.training import (
    Communication,
    DataIterator,
    Memory,
    Optimizer,
    Parallel,
    Sparsity,
    Stop,
    Train,
)

DENSE = "dense AdamW"
_NAMES = {
    "none": "AdamW",
    "bf16": "bfloat16 AdamW",
    "int8": "int8 AdamW",
    "1bit_adam": "SFPO",
    "sparse_1bit": "sparse 1-bit Adam",
    "low_rank": "low-rank AdamW",
}


T = TypeVar("T")


class Sections(Protocol):
    """What the contenders read of a configuration, whatever its model and data."""

    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def parallel(self) -> Parallel: ...
    @property
    def sparsity(self) -> Sparsity: ...
    @property
    def communication(self) -> Communication: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def train(self) -> Train: ...


class Run(NamedTuple):
    """A configuration made ready to start."""

    config: Any  # a dataclass of sections; nothing in it is left to be measured
    data: str  # what the task learns, for reports
    task: Task
    mesh: Mesh
    contenders: list[Contender]
    stream: Callable[[], DataIterator]  # training batches from the first
    tests: Callable[[], Sequence[Any]]  # the whole test set
    notes: Sequence[str] = ()  # why gradients are averaged as they are

    def start(
        self,
        contender: Contender,
        on_record: Callable[[Record], None] = lambda record: None,
        *,
        on_plan: Callable[[RecomputePlan], None] = lambda plan: None,
        store: Store | None = None,
        stop: Stop | None = None,
        recorder: Recorder | None = None,
    ) -> Result:
        """Trains one contender; all of them see the same batches.

        Arguments and errors are those of `run_contender`.
        """
        return run_contender(
            contender,
            self.task,
            self.mesh,
            self.stream(),
            self.tests(),
            self.config.train,
            microbatches=self.config.parallel.microbatches,
            on_record=on_record,
            on_plan=on_plan,
            store=store,
            stop=stop,
            recorder=recorder,
        )


def settle_run(config: T, mesh: Mesh, task: Task) -> tuple[T, list[str]]:
    """The configuration with what its links decide, and the reasons.

    Arguments and errors are those of `training.settle`, of a section in `config`.
    """
    given: Any = config
    shapes = [leaf.shape for leaf in jax.tree.leaves(task.shapes)]
    is_masked = given.sparsity.schedule != "none"
    communication, notes = training.settle(
        given.communication, mesh, shapes, is_masked=is_masked
    )
    return dataclasses.replace(given, communication=communication), notes


def make_contenders(config: Sections, mesh: Mesh) -> list[Contender]:
    """Dense AdamW where `train.compare` asks for it, and what the sections name."""
    own = make_contender(config, mesh)
    return [make_dense(config, mesh), own] if config.train.compare else [own]


def make_dense(config: Sections, mesh: Mesh) -> Contender:
    """Dense AdamW, the reference."""
    optimizer, max_norm = config.optimizer, None
    if mesh.shape["op"] > 1:
        optimizer, max_norm = _unclipped(optimizer)
    tx = training.make_dense_optimizer(optimizer, config.train.steps)
    return Contender(DENSE, tx, max_norm=max_norm, budget=config.parallel.time.limit)


def make_contender(config: Sections, mesh: Mesh) -> Contender:
    """The optimizer that the configuration names, and the step it trains by.

    Raises:
      ValueError: values that do not go together, with the reason.
    """
    algorithm = config.communication.compression.algorithm
    name, optimizer, release = _NAMES[algorithm], config.optimizer, None
    if (
        algorithm in training.ONE_BIT
        and config.communication.compression.sync_every > 1
    ):
        name = "0/1 Adam" if algorithm == "1bit_adam" else "sparse 0/1 Adam"
    axes = training.split_axes(config.communication, mesh)
    parts = (*axes.exact, *(["op"] if mesh.shape["op"] > 1 else []))
    _check_sharded(config, axes, parts)
    max_norm = None
    if config.memory.gradient_release:
        name, release = f"layered {name}", _release(config, axes)
    staleness = config.parallel.staleness
    if config.memory.gradient_release or parts or staleness:
        # The chain sees one layer, or parts of tensors, whose norm is not that of all;
        # and a late step tells the halves of a transformation apart, not of a chain.
        optimizer, max_norm = _unclipped(optimizer)
    tx = training.make_optimizer(
        optimizer,
        config.sparsity,
        config.communication,
        config.memory,
        steps=config.train.steps,
        axis_name=axes.axis_name,
    )
    if algorithm not in training.ONE_BIT:
        return Contender(
            name,
            tx,
            release=release,
            shard_axes=axes.exact,
            max_norm=max_norm,
            budget=config.parallel.time.limit,
            staleness=staleness,
        )

    phases = training.phases_of(config.communication)

    def course(freeze: int | None) -> Course:
        steps, communication = config.train.steps, config.communication
        names = training.step_phases(communication, steps, freeze)
        curves = (
            np.asarray([phases.index(name) for name in names], np.int8),
            training.sparsity_curve(config.sparsity, communication, steps, freeze),
        )
        # What comes late began with a step that sent nothing of use, a dense one.
        return Course(*(np.pad(x, (staleness, 0))[:steps] for x in curves))

    return Contender(
        name,
        tx,
        phases,
        course,
        release,
        axes.exact,
        max_norm,
        config.parallel.time.limit,
        staleness,
    )


def _unclipped(
    optimizer: training.Optimizer,
) -> tuple[training.Optimizer, float | None]:
    """(the section without clipping, the norm that the step clips to instead)."""
    norm = None if optimizer.clip_norm == "none" else optimizer.clip_norm
    return dataclasses.replace(optimizer, clip_norm="none"), norm


def _check_sharded(
    config: Sections, axes: training.Axes, parts: tuple[str, ...]
) -> None:
    """Raises ValueError for keys that the step cannot do on a part of each tensor."""
    memory = config.memory
    for key in ("rounding", "shard", "offload"):
        if getattr(memory, key) != "none" and not memory.gradient_release:
            raise ValueError(
                f"`memory.{key}` must be none without `memory.gradient_release`, got "
                f"{getattr(memory, key)}: the layered step does it."
            )
    chosen = config.communication.compression
    algorithm = chosen.algorithm
    if algorithm in training.ONE_BIT and chosen.sync_every > 1:
        _check_shared(config, axes)
    if memory.shard != "none" and algorithm != "none" and not axes.exact:
        if "data" in axes.compressed:
            raise ValueError(
                f"`memory.shard` must be none with {algorithm} over the axis data, got "
                f"{memory.shard}: shards are reduced exactly; compress between nodes "
                "(parallel.mesh.node), or set communication.compression.algorithm to "
                "none."
            )
    if parts and algorithm in training.ONE_BIT and chosen.warmup == "auto":
        raise ValueError(
            "`communication.compression.warmup` must be a share of the run where "
            f"tensors are split over {', '.join(parts)}, got auto: a device sees part "
            "of the variance; 0.12 is usual."
        )


def _check_shared(config: Sections, axes: training.Axes) -> None:
    """Raises ValueError for steps that cannot have parameters of each rank's own."""
    every = config.communication.compression.sync_every
    for key, is_on, off in (
        ("memory.gradient_release", config.memory.gradient_release, "false"),
        ("parallel.staleness", config.parallel.staleness > 0, "0"),
        ("communication.topology_aware.enable", bool(axes.exact), "false"),
    ):
        if is_on:
            raise ValueError(
                f"`{key}` must be {off} with `communication.compression.sync_every` "
                f"{every}: between two exchanges each rank has whole parameters of "
                "its own."
            )


def _release(config: Sections, axes: training.Axes) -> GradientRelease:
    """What goes with `memory.gradient_release`."""
    optimizer, chosen = config.optimizer, config.communication.compression
    if config.parallel.staleness:
        raise ValueError(
            "`parallel.staleness` must be 0 with `memory.gradient_release`, got "
            f"{config.parallel.staleness}: a layer's gradient is applied where it is "
            "made, and a step's delay would keep those of all; its transfers run under "
            "other layers by `parallel.pipeline_depth`."
        )
    if optimizer.groups:
        raise ValueError(
            "`optimizer.groups` must be [] with `memory.gradient_release`, got "
            f"{len(optimizer.groups)}: all layers share one transformation, which does "
            "not know their paths."
        )
    if chosen.algorithm in training.ONE_BIT and chosen.warmup == "auto":
        raise ValueError(
            "`communication.compression.warmup` must be a share of the run with "
            "`memory.gradient_release`, got auto: it takes the variance of all layers "
            "at once; 0.12 is usual."
        )
    memory = config.memory
    # The exact axes share the states at least.
    shard = "states" if axes.exact and memory.shard == "none" else memory.shard
    return GradientRelease(
        config.parallel.time.recompute,
        config.parallel.time.limit,
        None if memory.rounding == "none" else memory.rounding,
        shard,
        axes.exact or ("data",),
        config.parallel.pipeline_depth,
        memory.offloaded,
    )
