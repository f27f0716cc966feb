"""The example of docs/parallel.md runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PAGE = Path(__file__).parents[1] / "docs" / "parallel.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_example_runs() -> None:
    (source,) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(source, names)
    wanted = 32 * jax.nn.gelu(jnp.full((2, 16, 8), 8.0))
    np.testing.assert_allclose(names["y"], wanted, rtol=1e-5)
