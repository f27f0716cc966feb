"""The GPT by the plain and the layered step, and its full size from shapes alone."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo
from experiments import gpt3_13b
from experiments.layout import make_trainee
from experiments.progress import RunProgress
from experiments.run import DENSE
from experiments.text_run import TextConfig, prepare_text
from sfpo_jax.training import Checkpoints, Record, load_config

LAYERED = "layered AdamW"


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Optax's own AdamW does not run under the strict rules of the other tests."""
    with jax.numpy_dtype_promotion("standard"):
        yield


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
        for name in ("train_loss", "grad_norm", "test_loss"):
            assert a.get(name) == pytest.approx(b.get(name), rel=1e-4)
    text = (folder / "report.md").read_text()
    for words in (LAYERED, "test bytes of stdlib", "gradient_release: true"):
        assert words in text
    assert LAYERED in capsys.readouterr().out


def last_state(argv: list[str], folder: Path) -> Any:
    run = prepare_text(config(argv))
    (own,) = run.contenders
    made = make_trainee(run.task, own.tx, own.release, run.mesh)
    key = jax.random.key(0)
    like = {"train": made.step.init(made.init(0), key), "ema": None}
    restored = Checkpoints(folder / "checkpoints" / "layered_sfpo", 3).restore(like)
    assert restored is not None
    return restored.state


def test_a_stopped_layered_run_goes_on_to_the_last_bit(
    tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [
        *tiny,
        "--communication.compression.algorithm=1bit_adam",
        "--communication.compression.warmup=0.25",
        "--optimizer.clip_norm=1.0",
        "--model.dropout=0.1",
        "--train.compare=false",
    ]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert gpt3_13b.main([*argv, f"--train.folder={whole}"]) == 0

    show = RunProgress.show

    def show_and_stop(progress: RunProgress, record: Record) -> None:
        show(progress, record)
        if record["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "show", show_and_stop)
        assert gpt3_13b.main([*argv, f"--train.folder={broken}"]) == 0
    assert not (broken / "report.md").exists()
    assert gpt3_13b.main([f"--train.resume={broken}"]) == 0

    found, wanted = records(broken), records(whole)
    for record in (*found, *wanted):
        record.pop("step_ms", None)
    assert found == wanted
    sent = {r["step"]: r["wire_bytes"] for r in found if "wire_bytes" in r}
    assert sent[4] < sent[2] / 3
    for a, b in zip(
        jax.tree.leaves(last_state(argv, whole)),
        jax.tree.leaves(last_state(argv, broken)),
        strict=True,
    ):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_stack_is_tested_as_the_model_is(tiny: list[str]) -> None:
    run = prepare_text(config(tiny))
    task, windows = run.task, run.tests()[0]
    windows[-1] = -1  # a row of PADDING
    plain = task.test(task.init(0), windows)
    layered = task.layered.test(task.layered.init(0), windows)
    np.testing.assert_allclose(layered, plain, rtol=1e-6)
    assert plain[2] == (len(windows) - 1) * 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--optimizer.groups", '[{"match": "head", "learning_rate": 0.1}]'],
            ["`optimizer.groups`", "`memory.gradient_release`", "got 1"],
        ),
        (
            [
                "--communication.compression.algorithm=1bit_adam",
                "--communication.compression.warmup=auto",
            ],
            ["`communication.compression.warmup`", "got auto", "0.12"],
        ),
        (["--model.vocabulary=100"], ["`model.vocabulary`", "256", "got 100"]),
    ],
)
def test_what_cannot_run_ends_in_one_line(
    tiny: list[str],
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: list[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        gpt3_13b.main([*tiny, *options])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("python -m experiments.gpt3_13b: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message, message


def test_the_full_size_is_planned_from_shapes() -> None:
    step, state, batch = gpt3_13b.build(sfpo.make_mesh())
    sizes = [x.size for x in jax.tree.leaves(state.params)]
    assert sum(sizes) == 13_109_923_968
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert (batch.shape, batch.dtype) == ((8, 2049), jnp.int32)
    # Traced and lowered, neither compiled nor run.
    assert "stablehlo.while" in step.lower(state, batch).as_text()
