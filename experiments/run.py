"""A run made ready to start, and the contenders that a configuration names."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh

from experiments.contender import Contender, Record, Result, run_contender
from experiments.devices import compressed_axis
from experiments.run_log import Course, Store
from experiments.task import Task
from sfpo_jax import training
from sfpo_jax.training import (
    Communication,
    DataIterator,
    Memory,
    Optimizer,
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
}


class Sections(Protocol):
    """What the contenders read of a configuration, whatever its model and data."""

    @property
    def optimizer(self) -> Optimizer: ...
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

    config: Any  # a dataclass of sections, with `parallel` and `train`
    dataset: Any  # what the task learns, for reports
    task: Task
    mesh: Mesh
    contenders: list[Contender]
    stream: Callable[[], DataIterator]  # training batches from the first
    tests: Callable[[], Sequence[Any]]  # the whole test set

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
        return run_contender(
            contender,
            self.task,
            self.mesh,
            self.stream(),
            self.tests(),
            self.config.train,
            microbatches=self.config.parallel.microbatches,
            on_record=on_record,
            store=store,
            stop=stop,
        )


def make_contenders(config: Sections, mesh: Mesh) -> list[Contender]:
    """Dense AdamW where `train.compare` asks for it, and what the sections name."""
    own = make_contender(config, mesh)
    return [make_dense(config), own] if config.train.compare else [own]


def make_dense(config: Sections) -> Contender:
    """Dense AdamW, the reference."""
    tx = training.make_dense_optimizer(config.optimizer, config.train.steps)
    return Contender(DENSE, tx)


def make_contender(config: Sections, mesh: Mesh) -> Contender:
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

    def course(freeze: int | None) -> Course:
        steps, communication = config.train.steps, config.communication
        return Course(
            training.compressed_steps(communication, steps, freeze),
            training.sparsity_curve(config.sparsity, communication, steps, freeze),
        )

    return Contender(_NAMES[algorithm], tx, ("warmup", "compressed"), course)
