"""The example of docs/experiments.md runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

PAGE = Path(__file__).parents[1] / "docs" / "experiments.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_example_runs() -> None:
    (source,) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(source, names)
    assert names["metrics"]["loss"] < 0.5
    assert type(names["net"].hidden) is nnx.Linear
    assert jnp.shape(names["trained"]["hidden"]["lora_a"][...]) == (16, 4)
