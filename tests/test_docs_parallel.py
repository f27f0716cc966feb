"""The examples of the pages on parallelism run as they stand there."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sfpo_jax.transforms import takes_local_steps

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def test_the_examples_run() -> None:
    (product,) = blocks("parallel.md")
    names: dict[str, Any] = {}
    exec(product, names)
    wanted = 32 * jax.nn.gelu(jnp.full((2, 16, 8), 8.0))
    np.testing.assert_allclose(names["y"], wanted, rtol=1e-5)
    (late,) = blocks("staleness.md")
    names |= {"loss_fn": jnp.vdot, "tx": optax.sgd(0.1)}
    exec(late, names)
    assert names["step"].staleness == 1


def test_fewer_exchanges() -> None:
    *_, example = blocks("topology.md")
    names: dict[str, Any] = {"loss_fn": lambda p, batch: jnp.mean((p - batch) ** 2)}
    exec(example, names)
    state = names["step"].init(jnp.zeros((1, 8)))
    state, metrics = names["step"](state, np.ones((8, 8), np.float32))
    assert float(metrics["loss"]) == 1.0
    assert takes_local_steps(state.opt_state)
