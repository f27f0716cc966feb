"""Runs of the small GPT on a real text: configuration and set-up."""

import dataclasses

import jax

from experiments.data.text import load_stdlib
from experiments.devices import make_run_mesh, show_cpu_devices
from experiments.models.gpt import GPTConfig
from experiments.run import Run, make_contenders
from experiments.text_task import make_text_task
from sfpo_jax._validate import check_at_least, check_range
from sfpo_jax.training import (
    Communication,
    Memory,
    Optimizer,
    Parallel,
    Sparsity,
    Train,
    check_groups,
    text_windows,
)


@dataclasses.dataclass(frozen=True)
class TextData:
    """Windows of the Python standard library's sources."""

    test_share: float = 0.1
    """Share of the files held out for the test."""
    test_windows: int = 4096
    """Windows of them that are tested, spread evenly."""
    batch_size: int = 32
    """Windows of a step, over all devices."""

    def __post_init__(self) -> None:
        check_range(
            "data.test_share",
            self.test_share,
            0.0,
            1.0,
            "the share of the files held out",
            open_low=True,
            open_high=True,
        )
        for name in ("test_windows", "batch_size"):
            check_at_least(f"data.{name}", getattr(self, name), 1, "a window count")


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Everything a run depends on."""

    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    data: TextData = dataclasses.field(default_factory=TextData)
    optimizer: Optimizer = dataclasses.field(
        default_factory=lambda: Optimizer(learning_rate=0.012)
    )
    sparsity: Sparsity = dataclasses.field(default_factory=Sparsity)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    communication: Communication = dataclasses.field(default_factory=Communication)
    memory: Memory = dataclasses.field(default_factory=Memory)
    train: Train = dataclasses.field(
        default_factory=lambda: Train("gpt_stdlib", steps=600, evaluate_every=600)
    )


def prepare_text(config: TextConfig) -> Run:
    """Builds all that a run needs.

    Raises:
      ValueError: values that do not go together, in one line with the remedy.
    """
    show_cpu_devices(config.parallel.cpu_devices)
    data, length = config.data, config.model.length
    dataset = load_stdlib(data.test_share)
    mesh = make_run_mesh(config.parallel, data.batch_size)
    test = text_windows(
        dataset.test,
        batch_size=8 * data.batch_size,
        length=length,
        epochs=1,
        shuffle=True,
        remainder="pad",
    )
    batches = -(-min(data.test_windows, test.windows) // (8 * data.batch_size))
    task = make_text_task(config.model)
    check_groups(config.optimizer.groups, jax.eval_shape(lambda: task.init(0)))
    return Run(
        config,
        dataset,
        task,
        mesh,
        make_contenders(config, mesh),
        stream=lambda: text_windows(
            dataset.train,
            batch_size=data.batch_size,
            length=length,
            seed=config.train.seed,
        ),
        tests=lambda: [next(test) for _ in range(batches)],
    )
