"""The GPT by the plain and the layered step, and its full size from shapes alone."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo
from experiments import gpt3_13b
from experiments.run import DENSE
from experiments.text_run import TextConfig, prepare_text
from sfpo_jax.training import load_config
from sfpo_jax.transforms import StagedTransformation

pytestmark = pytest.mark.usefixtures("standard_promotion", "compile_once")

LAYERED = "layered AdamW"


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Options of a run that takes seconds."""
    values = {
        "model.length": 8,
        "model.width": 8,
        "model.depth": 2,
        "model.heads": 2,
        "model.mlp_width": 16,
        "data.batch_size": 16,
        "data.test_windows": 128,
        "sparsity.min_size": 16,
        "train.runs": tmp_path / "runs",
        "train.name": "toy",
        "train.steps": 8,
        "train.evaluate_every": 4,
        "train.log_every": 2,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def config(argv: list[str]) -> TextConfig:
    return load_config(gpt3_13b.SMALL, argv, prog="", description="")


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.full
def test_the_layered_step_trains_as_the_plain_one_does(
    tmp_path: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpt3_13b.main(tiny) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    for name in ("report.md", "results.json", "curves.png"):
        assert (folder / name).exists()
    made = records(folder)
    plain, layered = (
        [r for r in made if r["contender"] == name] for name in (DENSE, LAYERED)
    )
    assert [r["step"] for r in plain] == [2, 4, 4, 6, 8, 8]
    for a, b in zip(plain, layered, strict=True):
        assert a.keys() == b.keys()
        for name in {"train_loss", "grad_norm", "test_loss"} & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-4)
    text = (folder / "report.md").read_text()
    for words in (LAYERED, "test bytes of stdlib", "gradient_release: true"):
        assert words in text
    assert LAYERED in capsys.readouterr().out


def test_a_stopped_layered_run_goes_on_to_the_last_bit(
    tiny: list[str], stopped_and_resumed: Callable[..., Any]
) -> None:
    argv = [
        *tiny,
        "--communication.compression.algorithm=int8",  # has residuals
        "--optimizer.clip_norm=1.0",
        "--model.dropout=0.1",
        "--train.compare=false",
    ]
    whole, broken = stopped_and_resumed(gpt3_13b, argv)
    assert broken.records == whole.records
    end, resumed = (
        jax.tree.leaves((run.state.params, run.state.opt_state))
        for run in (whole, broken)
    )
    assert [x.tobytes() for x in end] == [x.tobytes() for x in resumed]


@pytest.mark.full
def test_layered_sfpo_freezes_and_compresses(tiny: list[str]) -> None:
    options = [
        "--communication.compression.algorithm=1bit_adam",
        "--communication.compression.warmup=0.5",
        "--train.compare=false",
        "--train.steps=4",
    ]
    run = prepare_text(config([*tiny, *options]))
    (own,) = run.contenders
    result = run.start(own)
    assert (own.name, result.freeze, result.skipped) == ("layered SFPO", 2, 0)
    assert result.wire_bytes[1] < result.wire_bytes[0] / 3


def test_the_plain_step_may_update_late(tiny: list[str]) -> None:
    options = [
        "--memory.gradient_release=false",
        "--parallel.staleness=1",
        "--optimizer.clip_norm=1.0",
        "--communication.compression.algorithm=1bit_adam",
        "--communication.compression.warmup=0.5",
        "--communication.compression.refresh_every=none",
        "--train.compare=false",
        "--train.steps=4",
    ]
    run = prepare_text(config([*tiny, *options]))
    (own,) = run.contenders
    # The step clips, so that the transformation is no chain, and has its halves.
    assert (own.staleness, own.max_norm) == (1, 1.0)
    assert isinstance(own.tx, StagedTransformation)
    result = run.start(own)
    assert (result.freeze, result.skipped) == (2, 0)
    # Of four steps the first applies nothing, two are the warm-up.
    assert result.phase.tolist() == [0, 0, 0, 1]
    assert np.isfinite(result.test_loss)


def test_half_precision_weights_train_sharded(tiny: list[str]) -> None:
    options = ["dtype=bfloat16", "param_dtype=bfloat16"]
    argv = [*tiny, *(f"--model.{option}" for option in options)]
    argv += ["--memory.rounding=error_term", "--memory.shard=weights"]
    run = prepare_text(config([*argv, "--train.compare=false"]))
    result = run.start(run.contenders[0])
    assert result.skipped == 0 and np.isfinite(result.test_loss)


def test_the_stack_is_tested_as_the_model_is(tiny: list[str]) -> None:
    run = prepare_text(config(tiny))
    task, windows = run.task, run.tests()[0]
    windows[-1] = -1  # a row of PADDING
    plain = task.test(task.init(0), windows)
    assert task.layered is not None
    layered = task.layered.test(task.layered.init(0), windows)
    np.testing.assert_allclose(layered, plain, rtol=1e-6)
    assert plain[2] == (len(windows) - 1) * 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--config=groups.yaml"],
            ["`optimizer.groups`", "`memory.gradient_release`", "got 1"],
        ),
        (
            [
                "--communication.compression.algorithm=1bit_adam",
                "--communication.compression.warmup=auto",
            ],
            ["`communication.compression.warmup`", "got auto", "0.12"],
        ),
        (
            ["--parallel.staleness=1"],
            ["`parallel.staleness` must be 0", "got 1", "`parallel.pipeline_depth`"],
        ),
        (
            ["--memory.gradient_release=false", "--memory.shard=states"],
            ["`memory.shard`", "`memory.gradient_release`", "got states"],
        ),
        (
            [
                "--communication.compression.algorithm=1bit_adam",
                "--memory.shard=weights",
            ],
            ["`memory.shard`", "1bit_adam", "got weights", "parallel.mesh.node"],
        ),
        (["--model.vocabulary=100"], ["`model.vocabulary`", "256", "got 100"]),
    ],
)
def test_what_cannot_run_ends_in_one_line(
    tmp_path: Path,
    tiny: list[str],
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[[ModuleType, list[str]], str],
    options: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("groups.yaml").write_text("optimizer: {groups: [{match: head}]}\n")
    message = refused(gpt3_13b, [*tiny, *options])
    for word in words:
        assert word in message, message


def test_the_full_size_is_planned_from_shapes() -> None:
    step, state, batch = gpt3_13b.build(sfpo.make_mesh())
    sizes = [x.size for x in jax.tree.leaves(state.params)]
    block = 12 * 5120**2 + 13 * 5120
    outer = (50304 + 2048) * 5120 + 2 * 5120  # the head is the embedding
    assert sum(sizes) == 40 * block + outer == 12_853_626_880
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert (batch.shape, batch.dtype) == ((8, 2049), jnp.int32)
    # Traced and lowered, neither compiled nor run.
    assert "stablehlo.while" in step.lower(state, batch).as_text()
