"""`python -m experiments.bert_large`: pretraining, classification, adapters."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import bert_large
from experiments.bert_run import BertConfig, prepare_bert
from sfpo_jax.training import load_config

pytestmark = pytest.mark.usefixtures("standard_promotion", "compile_once")

PEER = Path(__file__).with_name("bert_peer.safetensors")
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
GOOD, BAD = ("fine", "great", "warm"), ("dull", "flat", "cold")


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Options of a run that takes seconds, of the peer's sizes and weights."""
    held = load_file(PEER)
    weights = {name: x for name, x in held.items() if not name.startswith("peer.")}
    folder = tmp_path / "peer"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    pieces = [*MARKS, "a", "film", *GOOD, *BAD]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    generator = np.random.default_rng(0)
    lines = ["label\ttext"]
    for i in range(120):
        word = generator.choice(BAD if i % 2 else GOOD)
        lines.append(f"{i % 2}\ta {word} film {'a ' * (i // 2 % 3)}")
    (tmp_path / "films.tsv").write_text("\n".join(lines))
    values = {
        "model.task": "classify",
        "model.vocabulary": 29,
        "model.length": 8,
        "model.width": 16,
        "model.heads": 2,
        "model.mlp_width": 32,
        "model.classes": 2,
        "pretrained.folder": folder,
        "data.source": tmp_path / "films.tsv",
        "data.batch_size": 16,
        "data.test_share": 0.3,
        "sparsity.min_size": 16,
        "train.runs": tmp_path / "runs",
        "train.steps": 4,
        "train.evaluate_every": 4,
        "train.log_every": 1,
        "communication.compression.warmup": 0.5,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def config(argv: list[str]) -> BertConfig:
    return load_config(BertConfig(), argv, prog="", description="")


def test_adapters_beside_pretrained_weights(tmp_path: Path, tiny: list[str]) -> None:
    folder = tmp_path / "mine"
    argv = [*tiny, "--lora.rank=2", "--lora.match=mlp_in", "--train.compare=false"]
    argv.append(f"--train.folder={folder}")
    assert bert_large.main(argv) == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    made: list[dict[str, Any]] = [json.loads(line) for line in lines]
    # Two adapters, pooler and head.
    trained = 2 * 2 * (16 + 32) + 17 * 16 + 17 * 2
    (result,) = json.loads((folder / "results.json").read_text())
    assert result["parameters"] == trained
    dense, compressed = result["wire_bytes"]
    assert 4 * trained <= dense / (2 * 7 / 8) < 4 * trained + 64
    assert compressed < dense / 3

    # The base in no checkpoint, and merged into what is written for others.
    newest = sorted((folder / "checkpoints" / "sfpo").iterdir())[-1]
    manifest = (newest / "MANIFEST").read_text()
    assert "lora_a" in manifest and "base_module" not in manifest
    weights = folder / "weights" / "sfpo"
    merged = load_file(weights / "model.safetensors")
    base = load_file(tmp_path / "peer" / "model.safetensors")
    adapters = load_file(weights / "adapters.safetensors")
    assert sum(x.size for x in adapters.values()) == trained
    for name, before in base.items():
        if name.startswith("bert.") and "pooler" not in name:
            same = merged[name].tobytes() == before.tobytes()
            assert same != name.endswith("intermediate.dense.weight"), name
    a, b = (adapters[f"blocks.1.mlp_in.lora_{x}"] for x in "ab")
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    np.testing.assert_allclose(merged[name], base[name] + (a @ b).T, atol=1e-6)

    # What was written begins another run where this one ended.
    start = [f"--pretrained.folder={weights}", "--train.compare=false"]
    start += [f"--data.vocabulary={tmp_path / 'peer'}"]
    run = prepare_bert(config([*tiny, *start]))
    sums = [jax.device_get(run.task.test(run.task.init(0), x)) for x in run.tests()]
    correct, loss, count = np.sum(sums, axis=0)
    last = made[-1]
    assert count == 36
    assert loss / count == pytest.approx(last["test_loss"], rel=1e-4)
    assert correct / count == pytest.approx(last["test_accuracy"])


def test_pretraining_is_tested_alike_layer_by_layer(
    tmp_path: Path, tiny: list[str]
) -> None:
    (tmp_path / "text.txt").write_text("a fine film a dull film a flat warm film " * 99)
    options = [
        "--model.task=pretrain",
        f"--data.source={tmp_path / 'text.txt'}",
        "--data.test_rows=64",
        "--train.compare=false",
        "--memory.gradient_release=true",
        "--communication.compression.algorithm=none",
    ]
    run = prepare_bert(config([*tiny, *options]))
    batch = run.tests()[0]
    layered = run.task.layered
    assert layered is not None
    plain = run.task.test(run.task.init(0), batch)
    stacked = layered.test(layered.init(0), batch)
    np.testing.assert_allclose(stacked, plain, rtol=1e-5)
    assert plain[2] == (batch["labels"] != -1).sum()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model.vocabulary=12"], ["`model.vocabulary`", "at least 13", "got 12"]),
        (["--model.classes=1"], ["`model.classes`", "at least 2", "got 1"]),
        (
            ["--model.width=18"],
            ["`pretrained.folder`", "[18, 18], got [16, 16]"],
        ),
        (["--pretrained.folder=absent"], ["`data.vocabulary`", "'absent'"]),
        (["--data.source=one.tsv"], ["`data.source`", "two classes", "all are 1"]),
        (["--model.init=0"], ["model.init", "positive", "got 0"]),
        (
            ["--lora.rank=2", "--memory.gradient_release=true"],
            ["`memory.gradient_release`", "adapters"],
        ),
        (["--lora.rank=2", "--model.task=pretrain"], ["`lora.rank`", "classify"]),
        (["--lora.rank=2", "--lora.match=mpl"], ["`lora.match`", "'mpl'", "blocks/0"]),
        (["--lora.also=("], ["`lora.also`", "regular expression", "'('"]),
        (
            ["--model.task=pretrain", "--data.source=empty"],
            ["`data.source`", "'empty'"],
        ),
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
    Path("empty").mkdir()
    Path("one.tsv").write_text("label\ttext\n1\ta\n1\tb\n")
    message = refused(bert_large, [*tiny, *options])
    for word in words:
        assert word in message, message
