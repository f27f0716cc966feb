"""A run goes on under the configuration it began with."""

import dataclasses
from pathlib import Path

import pytest

from experiments.output import open_folder
from experiments.resume import load_run_config
from experiments.vit_run import Config
from sfpo_jax.training import ConfigError

BEGAN = ["--optimizer.b1=0.8", "--train.steps=50"]


def load(*argv: str) -> Config:
    return load_run_config(Config(), argv, prog="", description="")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that began."""
    argv = [*BEGAN, f"--train.folder={tmp_path / 'run'}"]
    config = load(*argv)
    open_folder(config, config.train).close()
    return tmp_path / "run"


def test_its_folder_is_enough(folder: Path) -> None:
    for key in ("resume", "folder"):
        config = load(f"--train.{key}={folder}")
        assert (config.optimizer.b1, config.train.steps) == (0.8, 50)


def test_the_same_command_goes_on(folder: Path) -> None:
    assert load(*BEGAN, f"--train.folder={folder}").train.steps == 50


def test_what_no_step_depends_on_may_change(folder: Path) -> None:
    config = load(f"--train.resume={folder}", "--train.keep=7")
    assert (config.train.keep, config.train.steps) == (7, 50)


def test_what_makes_another_run_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"--train.resume={folder}", "--train.steps=60")
    message = str(caught.value)
    assert "`train.steps` must stay 50 when a run goes on, got 60" in message
    assert str(folder / "config.yaml") in message


def test_a_new_folder_begins_a_run(tmp_path: Path) -> None:
    assert load(f"--train.folder={tmp_path / 'new'}").optimizer == Config().optimizer
    with pytest.raises(ConfigError, match=r"`train.resume`.*begin with `train.folder`"):
        load(f"--train.resume={tmp_path / 'new'}")


def test_what_the_links_decided_is_not_asked_again(tmp_path: Path) -> None:
    asked = [
        "--communication.compression.algorithm=auto",
        "--communication.links.data=300GB/s",
        f"--train.folder={tmp_path / 'run'}",
    ]
    began = load(*asked)
    communication = began.communication
    settled = dataclasses.replace(
        communication,
        compression=dataclasses.replace(communication.compression, algorithm="int8"),
        links=dataclasses.replace(communication.links, node="1.5GB/s"),
    )
    open_folder(dataclasses.replace(began, communication=settled), began.train).close()
    assert load(*asked).communication == settled
    assert load(f"--train.resume={tmp_path / 'run'}").communication == settled
    with pytest.raises(ConfigError, match=r"`communication.links.node` must stay"):
        load(*asked, "--communication.links.node=2GB/s")
