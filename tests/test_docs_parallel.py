"""The examples of docs/parallel.md run as they stand there."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PAGE = Path(__file__).parents[1] / "docs" / "parallel.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_run() -> None:
    product, late = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"loss_fn": jnp.vdot, "tx": optax.sgd(0.1)}
    exec(product, names)
    wanted = 32 * jax.nn.gelu(jnp.full((2, 16, 8), 8.0))
    np.testing.assert_allclose(names["y"], wanted, rtol=1e-5)
    exec(late, names)
    assert names["step"].staleness == 1
