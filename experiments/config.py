"""The sections that every run has, whatever its model and data."""

import dataclasses
from typing import Any

from sfpo_jax.training import (
    Communication,
    Distributed,
    Memory,
    Optimizer,
    Parallel,
    Sparsity,
    Train,
)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on; an experiment says which model and data it has."""

    model: Any
    data: Any
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    sparsity: Sparsity = dataclasses.field(default_factory=Sparsity)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    communication: Communication = dataclasses.field(default_factory=Communication)
    memory: Memory = dataclasses.field(default_factory=Memory)
    distributed: Distributed = dataclasses.field(default_factory=Distributed)
    train: Train = dataclasses.field(default_factory=Train)


def check_plain(config: RunConfig, model: str) -> None:
    """Raises ValueError for keys that want a model in layers, or one cut over `op`.

    Args:
      config: of the run.
      model: what the model is called.
    """
    if config.memory.gradient_release:
        raise ValueError(
            f"`memory.gradient_release` must be false for a {model}, got true: the "
            "layered step trains stacks of equal layers, whole."
        )
    if config.parallel.mesh.op != 1:
        raise ValueError(
            f"`parallel.mesh.op` must be 1 for a {model}, got "
            f"{config.parallel.mesh.op}: its products are not shared in pieces."
        )
