"""The answer in words: the verdict, the warnings, what to try."""

import dataclasses
import json

import pytest

import sfpo_jax as sfpo
from sfpo_jax.memory._buffers import Buffer
from sfpo_jax.memory._origins import Origin

GB = 10**9
PLAN = sfpo.Plan(
    device="a100-80gb",
    mesh_shape={"node": 1, "data": 8, "op": 1},
    compiler="gpu",
    argument_bytes=32 * GB,
    output_bytes=20 * GB,
    alias_bytes=20 * GB,
    temporary_bytes=30 * GB,
    host_bytes=0,
    budget_bytes=85 * GB,
    memory_bytes=85 * GB,
    flops=10**15,
    wire_bytes={"data": 3 * GB},
    ledger={
        "parameters": 8 * GB,
        "optimizer": 16 * GB,
        "residuals": 7 * GB,
        "other arguments": 1 * GB,
        "activations": 25 * GB,
        "other temporaries": 5 * GB,
        "output": 0,
    },
    buffers=(
        Buffer(
            20 * GB, "f32[24,64,1024]{2,1,0}", 0, Origin("jit(f)/jvp()/" * 9, "m.py", 7)
        ),
        Buffer(5 * GB, "bf16[" + "64," * 40 + "1]{0}", 0, Origin("", "", 0)),
    ),
    notes=("a note",),
)


def test_the_total_and_what_fits() -> None:
    assert PLAN.total_bytes == 62 * GB == sum(PLAN.ledger.values())
    assert PLAN.fits and PLAN.advice == ()
    small = dataclasses.replace(PLAN, budget_bytes=62 * GB - 1)
    assert not small.fits
    assert dataclasses.replace(small, budget_bytes=62 * GB).fits


def test_the_table_has_80_columns_and_says_it_all() -> None:
    text = str(dataclasses.replace(PLAN, budget_bytes=40 * GB))
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "62 GB a device: does NOT fit into 40 GB",
        "mesh data 8",
        "22 GB too",
    ):
        assert words in text
    rows = [line.split() for line in text.splitlines()]
    assert ["activations", "25", "GB", "40.3%", "#" * 10] in rows
    assert "f32[24,64,1024]  m.py:7" in text
    assert "data 3 GB" in text and "1e+15" in text and "a note" in text


def test_advice_begins_with_the_batch_then_with_what_saves_most() -> None:
    advice = dataclasses.replace(PLAN, budget_bytes=60 * GB).advice
    assert advice[0] == "a smaller batch: about 92 % of this one"
    assert advice[1] == "recompute: jax.checkpoint around each block: up to 25 GB"
    assert "shard optimizer states over 8 devices: up to 14 GB" in advice[2]
    assert "8-bit optimizer states, if they are float32: up to 12 GB" in advice[4]
    none = dataclasses.replace(PLAN, budget_bytes=30 * GB).advice
    assert none[0] == "no smaller batch: 37 GB are not activations"


def test_advice_for_one_device_and_for_a_state_that_is_not_donated() -> None:
    ledger = PLAN.ledger | {"output": 24 * GB}
    plan = dataclasses.replace(
        PLAN,
        mesh_shape={},
        ledger=ledger,
        alias_bytes=0,
        output_bytes=24 * GB,
        budget_bytes=GB,
    )
    assert any(text.startswith("donate the state") for text in plan.advice)
    assert any(text.startswith("two devices") for text in plan.advice)


def test_jax_refuses_what_its_fraction_does_not_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert PLAN.warnings == ()
    full = dataclasses.replace(PLAN, temporary_bytes=38 * GB)
    (warning,) = full.warnings
    assert "JAX takes 75% of the card, 63.75 GB, and would refuse" in warning
    assert warning.endswith("export XLA_CLIENT_MEM_FRACTION=0.84")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.84")
    assert full.warnings == ()
    (warning,) = dataclasses.replace(PLAN, temporary_bytes=52 * GB).warnings
    assert warning.endswith("too tight")
    # What the card itself does not hold needs no word about a fraction of it.
    assert dataclasses.replace(PLAN, temporary_bytes=90 * GB).warnings == ()
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "much")
    assert full.warnings != ()


def test_to_dict_is_json_and_has_what_is_derived() -> None:
    plan = PLAN.to_dict()
    assert json.loads(json.dumps(plan)) == plan
    assert plan["total_bytes"] == 62 * GB and plan["fits"] is True
    assert plan["buffers"][0]["line"] == 7 and plan["buffers"][0]["is_activation"]
