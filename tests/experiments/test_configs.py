"""The configuration files are documents that hold what they promise."""

import dataclasses
from pathlib import Path

import jax
import pytest

from experiments.bert_run import BertConfig
from experiments.data.images import load_dataset
from experiments.gpt3_13b import SMALL
from experiments.models.bert import BERTConfig
from experiments.models.resnet import ResNetConfig
from experiments.models.vit import ViTConfig
from experiments.resnet50 import ResNetRun
from experiments.text_run import TextConfig
from experiments.vit_run import Config
from experiments.vit_task import make_task
from sfpo_jax.training import build, dotted_keys, read_yaml

CONFIGS = Path(__file__).parents[2] / "configs"


def given(values: dict, prefix: str = "") -> list[str]:
    keys = []
    for name, value in values.items():
        inner = isinstance(value, dict)
        keys += given(value, f"{prefix}{name}.") if inner else [prefix + name]
    return keys


@pytest.mark.parametrize(
    ("name", "config", "program"),
    [
        ("vit_mnist5k.yaml", Config, "vit_l"),
        ("vit_l.yaml", Config, "vit_l"),
        ("resnet_mnist5k.yaml", ResNetRun, "resnet50"),
        ("resnet50.yaml", ResNetRun, "resnet50"),
        ("bert_stdlib.yaml", BertConfig, "bert_large"),
        ("bert_movies.yaml", BertConfig, "bert_large"),
        ("bert_large.yaml", BertConfig, "bert_large"),
        ("gpt_stdlib.yaml", TextConfig, "gpt3_13b"),
        ("gpt3_13b.yaml", TextConfig, "gpt3_13b"),
    ],
)
def test_a_file_names_every_key_and_how_to_run_it(
    name: str, config: type, program: str
) -> None:
    assert sorted(given(read_yaml(CONFIGS / name))) == sorted(dotted_keys(config))
    text = (CONFIGS / name).read_text(encoding="utf-8")
    assert f"python -m experiments.{program}" in text
    assert "Expect" in text


def test_the_default_of_a_command_is_its_file() -> None:
    assert build(Config, read_yaml(CONFIGS / "vit_mnist5k.yaml")) == Config()
    resnet = build(ResNetRun, read_yaml(CONFIGS / "resnet_mnist5k.yaml"))
    assert resnet == ResNetRun()
    assert build(BertConfig, read_yaml(CONFIGS / "bert_stdlib.yaml")) == BertConfig()
    assert build(TextConfig, read_yaml(CONFIGS / "gpt_stdlib.yaml")) == SMALL


def test_gpt3_13b_is_gpt3_13b() -> None:
    config = build(TextConfig, read_yaml(CONFIGS / "gpt3_13b.yaml"))
    sizes = config.model
    assert (sizes.depth, sizes.width, sizes.heads) == (40, 5120, 40)
    assert (sizes.mlp_width, sizes.length, sizes.vocabulary) == (20480, 2048, 50304)
    assert config.memory.gradient_release


def test_resnet50_is_resnet_50() -> None:
    config = build(ResNetRun, read_yaml(CONFIGS / "resnet50.yaml"))
    assert config.model == ResNetConfig(dtype="bfloat16")
    # test_resnet.py counts its parameters.


def test_bert_large_is_bert_large() -> None:
    config = build(BertConfig, read_yaml(CONFIGS / "bert_large.yaml"))
    plain = dataclasses.replace(config.model, dtype="float32", dropout=0.0)
    assert plain == BERTConfig()
    # test_bert.py counts its parameters.


def test_vit_l_is_vit_l() -> None:
    config = build(Config, read_yaml(CONFIGS / "vit_l.yaml"))
    paper = ViTConfig(dropout=0.1, dtype="bfloat16")
    assert config.model == paper
    assert dataclasses.replace(config.model, dtype="float32", dropout=0.0) == (
        ViTConfig()
    )
    dataset = load_dataset(config.data.source, config.data.test_share)
    task = make_task(config.model, dataset, recompute=True)
    assert task.parameters == 304_326_632
    # Traced, not run: 224 pixels made of 28, one loss, the gradient's shapes.
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((8, *x.shape[1:]), x.dtype), dataset.test
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda: task.init(0))
    loss, aux = jax.eval_shape(task.loss_fn, params, batch, key)
    assert loss.shape == aux["accuracy"].shape == ()
