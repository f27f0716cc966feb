"""The examples of docs/training.md run as they stand there, one after the other."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.training import ReplayedIterator

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.mean((batch @ params["w"]) ** 2)

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "loss_fn": loss_fn,
        "tx": optax.sgd(0.1),
        "params": {"w": jnp.ones(2)},
        "accuracy": lambda params: float(params["w"].sum()),
        "data": ReplayedIterator(lambda: iter([np.ones((8, 2), np.float32)] * 9)),
    }
    step = sfpo.make_train_step(loss_fn, names["tx"], sfpo.make_mesh())
    names["state"] = step.init(names["params"])
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 2
    for source in blocks:
        exec(source.replace("steps=1000", "steps=3"), names)
    assert names["checkpoints"].steps() == [100]
    assert names["done"].is_finished
