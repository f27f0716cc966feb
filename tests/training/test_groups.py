"""Groups of parameters: which they are, and what is different for them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sfpo_jax.training import (
    Communication,
    Compression,
    ConfigError,
    Group,
    Memory,
    Optimizer,
    Sparsity,
    build,
    check_groups,
    make_optimizer,
    parse_yaml,
)

GROUPS = (Group("^head", learning_rate=4.0), Group("embed|head/w", weight_decay=False))
PARAMS = {
    "embed": jnp.full((32, 64), 2.0),
    "head": {"w": jnp.full((32, 64), 2.0), "b": jnp.full(64, 2.0)},
}


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Optax's own AdamW does not run under the strict rules of the other tests."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("algorithm", ["none", "int8", "1bit_adam"])
def test_rates_and_decays(algorithm: str) -> None:
    optimizer = Optimizer(
        learning_rate=0.5,
        warmup=0.0,
        schedule="constant",
        weight_decay=0.25,
        groups=GROUPS,
    )
    tx = make_optimizer(
        optimizer,
        Sparsity(),
        Communication(Compression(algorithm)),  # pyright: ignore[reportArgumentType]
        Memory(),
        steps=10,
        axis_name=None,
    )
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    updates: Any
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    # Adam's first step is the rate: 0.5, four times that in the head; decay adds a
    # quarter of the parameter where it is on. `head/w` belongs to the first group.
    np.testing.assert_allclose(updates["embed"], -0.5, rtol=1e-5)
    np.testing.assert_allclose(updates["head"]["w"], -2.0 * 1.5, rtol=1e-5)
    np.testing.assert_allclose(updates["head"]["b"], -2.0, rtol=1e-5)


def test_a_rate_of_0_keeps_the_parameters() -> None:
    optimizer = Optimizer(groups=(Group("embed", learning_rate=0.0),))
    communication = Communication()
    tx = make_optimizer(
        optimizer, Sparsity(), communication, Memory(), steps=9, axis_name=None
    )
    updates: Any
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    moved: Any = optax.apply_updates(PARAMS, updates)
    assert bool((moved["embed"] == PARAMS["embed"]).all())
    assert bool((moved["head"]["w"] != PARAMS["head"]["w"]).any())


def test_a_file_lists_them() -> None:
    text = "groups: [{match: embed, learning_rate: 0, weight_decay: false}]"
    (group,) = build(Optimizer, parse_yaml(text)).groups
    assert group == Group("embed", 0.0, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups: embed", "`groups` must be a list of sections, got 'embed'"),
        ("groups: [embed]", "`groups[0]` must be a section of keys, got 'embed'"),
        ("groups: [{mach: a}]", "unknown key `groups[0].mach` (value 'a'): did you"),
        ("groups: [{learning_rate: 2}]", "`groups[0].match` is missing"),
        ("groups: [{match: '('}]", "regular expression, got '('"),
        ("groups: [{match: a, learning_rate: -1}]", "[0, inf), got -1"),
        ("groups: [{match: a, weight_decay: 1}]", "true or false, got 1"),
    ],
)
def test_a_list_that_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(Optimizer, parse_yaml(text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pattern_that_matches_nothing() -> None:
    check_groups(GROUPS[:1], PARAMS)
    with pytest.raises(ValueError, match=r"got 'tail'.*paths are embed, head/b"):
        check_groups([*GROUPS, Group("tail")], PARAMS)
    # Everything of it is taken by the group before it.
    with pytest.raises(ValueError, match=r"got 'head/w'.*earlier group"):
        check_groups([GROUPS[0], Group("head/w")], PARAMS)
