"""The command line: a file, then options, and the words of the file for errors."""

from pathlib import Path

import pytest

from experiments.vit_run import Config
from sfpo_jax.training import (
    ConfigError,
    dotted_keys,
    exit_on_config_error,
    load_config,
)


def load(*argv: str) -> Config:
    return load_config(Config(), argv, prog="prog", description="Trains.")


def test_an_option_wins_over_the_file_and_the_file_over_the_default(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("sparsity: {base: 0.6, final: 0.2}\ntrain: {steps: 9}\n")
    config = load("--sparsity.base", "0.5", "--config", str(file))
    assert (config.sparsity.base, config.sparsity.final) == (0.5, 0.2)
    assert (config.train.steps, config.train.seed) == (9, 0)
    assert load(f"--config={file}").sparsity.base == 0.6


def test_every_spelling_of_a_value() -> None:
    key = "--communication.compression.error_feedback"
    assert not load(key, "false").communication.compression.error_feedback
    assert load(key.replace("_", "-"), "true") == Config()
    assert load("--optimizer.clip_norm=2").optimizer.clip_norm == 2.0
    assert load("--optimizer.clip_norm", "none").optimizer.clip_norm == "none"
    assert load("--communication.compression.warmup", "auto") != Config()
    assert load("--optimizer.learning_rate", "1e-3").optimizer.learning_rate == 1e-3
    assert load("--train.name", "7").train.name == "7"


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    # A list of sections is written in a file.
    for key in set(dotted_keys(Config)) - {"optimizer.groups"}:
        assert f"--{key}" in shown
    assert "--config FILE" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sparsity.bse", "0.6"], ["`sparsity.bse`", "0.6", "`sparsity.base`"]),
        (["--sparsity.bse=0.6"], ["`sparsity.bse`", "0.6", "`sparsity.base`"]),
        (["--learning_rate", "1"], ["`learning_rate`", "`optimizer.learning_rate`"]),
        (["--sparsity.base", "abc"], ["`sparsity.base`", "a number", "'abc'", "0.7"]),
        (["--sparsity.base", "-0.1"], ["`sparsity.base`", "[0, 1]", "-0.1"]),
        (["--sparsity.schedule", "cosin"], ["`sparsity.schedule`", "'cosine'?"]),
        (["--train.steps", "1.5"], ["`train.steps`", "a whole number", "1.5"]),
        (["--train.steps"], ["`--train.steps`", "needs a value"]),
        (["--train.steps", "--train.seed=1"], ["`--train.steps`", "needs a value"]),
        (["--train", "1"], ["`train`", "train"]),
        (["--train.compare", "yes"], ["`train.compare`", "true or false", "'yes'"]),
        (["--config"], ["`--config`", "needs a value"]),
        (["--config", "absent.yaml"], ["absent.yaml", "No such file"]),
        (["junk"], ["'junk'", "--section.key"]),
    ],
)
def test_what_is_refused(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_a_refusal_ends_in_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop, exit_on_config_error("prog"):
        raise ValueError("two\n  lines")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "prog: two lines\n"
