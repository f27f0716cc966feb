"""Runs of the small GPT on a real text: configuration and set-up."""

import dataclasses

import numpy as np

from experiments.config import RunConfig
from experiments.data.text import load_stdlib
from experiments.devices import make_operator, make_run_mesh, show_cpu_devices
from experiments.models.gpt import GPTConfig
from experiments.run import Run, make_contenders, settle_run
from experiments.text_task import make_text_task
from sfpo_jax.training import (
    Optimizer,
    Text,
    TextData,
    Train,
    check_groups,
    text_windows,
)


@dataclasses.dataclass(frozen=True)
class TextConfig(RunConfig):
    """Everything a run depends on."""

    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    data: TextData = dataclasses.field(default_factory=TextData)
    optimizer: Optimizer = dataclasses.field(
        default_factory=lambda: Optimizer(learning_rate=0.012)
    )
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
    if dataset.vocabulary > config.model.vocabulary:
        raise ValueError(
            f"`model.vocabulary` must be at least {dataset.vocabulary}, the tokens of "
            f"{dataset.name}, got {config.model.vocabulary}."
        )
    mesh = make_run_mesh(config.parallel, data.batch_size)
    recompute = config.parallel.time.recompute == "full"
    operator = make_operator(config.parallel, mesh, config.model)
    task = make_text_task(config.model, recompute=recompute, operator=operator)
    check_groups(config.optimizer.groups, task.shapes)
    config, notes = settle_run(config, mesh, task)
    return Run(
        config,
        f"{len(dataset.train.tokens):,} training and {len(dataset.test.tokens):,} test "
        f"bytes of {dataset.name}, in windows of {length}",
        task,
        mesh,
        make_contenders(config, mesh),
        stream=lambda: text_windows(
            dataset.train,
            batch_size=data.batch_size,
            length=length,
            seed=config.train.seed,
        ),
        tests=lambda: _test_batches(dataset.test, data, length),
        notes=notes,
    )


def _test_batches(text: Text, data: TextData, length: int) -> list[np.ndarray]:
    """The windows that are tested, the same at each call."""
    # Without gradients, eight times the batch still takes less memory than training.
    size = 8 * data.batch_size
    windows = text_windows(
        text,
        batch_size=size,
        length=length,
        epochs=1,
        shuffle=True,
        remainder="pad",
    )
    batches = -(-min(data.test_windows, windows.windows) // size)
    return [next(windows) for _ in range(batches)]
