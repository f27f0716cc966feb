"""Every byte under one name."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.memory._ledger import classify, make_ledger
from sfpo_jax.memory._lowered import keep_used
from sfpo_jax.memory._measurement import Measurement
from sfpo_jax.transforms._state import PerRank

MEASURED = Measurement(
    argument_bytes=100,
    output_bytes=50,
    alias_bytes=40,
    temporary_bytes=30,
    host_bytes=0,
    activation_bytes=20,
    constant_bytes=7,
    parameters={0: 40, 1: 30, 2: 25},
    buffers=(),
    wire_bytes={},
    without_triton=False,
)


class State(NamedTuple):
    params: Any
    opt_state: Any
    step: Any


def test_the_entries_add_up_to_the_total() -> None:
    ledger = make_ledger(MEASURED, ["parameters", "residuals", "other arguments"])
    assert ledger == {
        "parameters": 40,
        "optimizer": 0,
        "residuals": 30,
        # 5 bytes are the compiler's own.
        "other arguments": 30,
        "activations": 20,
        "other temporaries": 10,
        "output": 10,
    }
    assert sum(ledger.values()) == 100 + 50 - 40 + 30


def test_parameters_of_no_known_class_are_other_arguments() -> None:
    ledger = make_ledger(MEASURED, [])
    assert ledger["other arguments"] == 100
    assert sum(ledger.values()) == 140


def test_a_state_that_comes_first_is_told_apart() -> None:
    state = State({"w": 0, "b": 1}, (2, {"error": PerRank((3, 4))}), 5)
    assert classify(len, (state, 6)) == [
        "parameters",
        "parameters",
        "optimizer",
        "residuals",
        "residuals",
        "other arguments",
        "other arguments",
    ]


def test_arguments_are_known_by_name() -> None:
    def step(params: Any, opt_state: Any, batch: Any) -> None: ...

    found = classify(step, ((0, 1), State(2, 3, 4), 5))
    assert found == ["parameters"] * 2 + ["optimizer"] * 3 + ["other arguments"]
    # A callable whose arguments cannot be told has no names for them.
    assert classify(min, (0, 1)) == ["other arguments"] * 2


def test_what_jit_drops_is_left_out() -> None:
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    lowered = jax.jit(lambda a, b, c: (a, c)).lower(x, x, x)
    assert keep_used(["a", "b", "c"], lowered) == ["a", "c"]
    assert keep_used(["a", "b"], object()) == ["a", "b"]
