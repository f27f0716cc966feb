"""A configuration for more devices, its reasons, and the command that prints it."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from sfpo_jax import __main__ as command_line
from sfpo_jax.memory import BatchMemory, measure_batch
from sfpo_jax.training import parse_yaml, tune_yaml

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
BERT = """\
data: {batch_size: 8}
optimizer: {learning_rate: 2e-5}
sparsity:
  base: 0.7    # of one card
  final: 0.3
train:
  steps: 8000
"""


def test_the_published_row_of_bert_large() -> None:
    tuned = tune_yaml(BERT, cards=8, memory=BatchMemory("a100-80gb", 80e9, 0.9e9))
    found = parse_yaml(tuned.text)
    assert found["data"]["batch_size"] == 64
    assert f"{found['optimizer']['learning_rate']:.2g}" == "5.7e-05"
    assert found["sparsity"]["base"] == 0.5
    assert found["train"]["steps"] == 1150
    assert "sqrt(64) x 8 = 64" in tuned.edits["data.batch_size"].reason
    assert "568 fit on 8 x a100-80gb" in tuned.edits["data.batch_size"].reason
    for edit in tuned.edits.values():
        assert edit.reason.split(".")[0][:40] in tuned.text


def test_one_device_keeps_its_numbers_but_the_steps() -> None:
    tuned = tune_yaml(BERT.replace("8}", "1}"), cards=1, extension=0.2)
    values = {key: edit.value for key, edit in tuned.edits.items()}
    assert values["data.batch_size"] == 1
    assert values["optimizer.learning_rate"] == 2e-5
    assert values["sparsity.base"] == 0.7
    assert values["train.steps"] == 9600


def test_memory_and_shares_bound_the_batch() -> None:
    memory = BatchMemory("a100-40gb", 40e9, 3e9, 8e9)
    text = BERT + "parallel: {mesh: {op: 2}, microbatches: 3}\n"
    tuned = tune_yaml(text, cards=8, memory=memory)
    # (0.8 * 40 - 8) / 3 = 8 in each of 4 shares, and 4 x 3 microbatches divide 24.
    assert tuned.edits["data.batch_size"].value == 24
    reason = tuned.edits["data.batch_size"].reason
    assert "32 fit on 4 x (2 x a100-40gb), of which" in reason
    assert "a multiple of 12" in reason


@pytest.mark.parametrize(
    ("op", "wanted"), [(1, {"data": 8}), (2, {"data": 4, "op": 2})]
)
def test_memory_is_measured_on_the_mesh_of_the_run(
    op: int, wanted: dict[str, int]
) -> None:
    asked: list[Mapping[str, int]] = []

    def measure(mesh_shape: Mapping[str, int]) -> BatchMemory:
        asked.append(mesh_shape)
        return BatchMemory("a100-40gb", 40e9, 8e9)

    text = BERT + f"parallel: {{mesh: {{op: {op}}}}}\n"
    tuned = tune_yaml(text, cards=8, memory=measure)
    assert asked == [wanted]
    assert tuned.edits["data.batch_size"].value == 4 * wanted["data"]


def test_dense_runs_are_not_extended() -> None:
    text = BERT + "communication: {compression: {algorithm: none}}\n"
    tuned = tune_yaml(text, cards=8)
    assert tuned.edits["train.steps"].value == 1000
    assert "sparsity.base" not in tuned.edits


@pytest.mark.parametrize(
    ("more", "turns", "said"),
    [
        ("memory: {gradient_release: false}\n", None, ""),
        (
            "memory: {gradient_release: true}\n",
            3,
            "(gradients, signs there, signs back)",
        ),
        (
            "memory: {gradient_release: true, shard: states}\n",
            4,
            "(gradients scattered, signs there, signs back, new weights gathered)",
        ),
        (
            "memory: {gradient_release: true}\n"
            "communication: {compression: {algorithm: none}}\n",
            1,
            "(gradients)",
        ),
    ],
)
def test_a_turn_for_each_transfer(more: str, turns: int | None, said: str) -> None:
    tuned = tune_yaml(BERT + "parallel: {pipeline_depth: 2}\n" + more, cards=8)
    edit = tuned.edits.get("parallel.pipeline_depth")
    if turns is None or edit is None:
        assert turns is None and edit is None
        return
    assert edit.value == turns and said in edit.reason
    assert parse_yaml(tuned.text)["parallel"]["pipeline_depth"] == turns


@pytest.mark.parametrize(
    ("text", "cards", "message"),
    [
        ("data: {batch_size: 8}", 2, "`optimizer.learning_rate` is missing"),
        (BERT.replace("2e-5", "fast"), 2, "must be a positive number, got 'fast'"),
        (BERT + "parallel: {mesh: {op: 3}}\n", 8, "op` 3 does not divide 8 devices"),
        (BERT, 0, "`cards` must be at least 1"),
    ],
)
def test_what_cannot_be_tuned(text: str, cards: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune_yaml(text, cards=cards)


def build(mesh: jax.sharding.Mesh, batch_size: int):
    del mesh
    x = jax.ShapeDtypeStruct((batch_size, 1000), jnp.float32)
    w = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    return jax.jit(lambda w, x: x.sum(1) + w.sum()), w, x


def test_memory_of_a_batch_is_a_line() -> None:
    found = measure_batch(build, (100, 300), compiler="cpu", cache=False)
    assert found.per_sample == pytest.approx(4004, rel=0.01)
    assert found.fixed == pytest.approx(4e6, rel=0.01)
    with pytest.raises(ValueError, match=r"two sizes in order, got \(3, 3\)"):
        measure_batch(build, (3, 3))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_command_prints_what_can_be_read_again(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = ("--memory-per-sample", "100MB", "--fixed", "5GB")
    assert command_line.main(["tune", str(path), "--cards", "8", *memory]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"# {path}, found for 1 device, tuned for 8 x a100-80gb.\n")
    assert parse_yaml(out).keys() == parse_yaml(path.read_text()).keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.yaml", "--cards", "2"), "cannot read 'nowhere.yaml'"),
        (("{}", "--cards", "2", "--device", "a100"), "`device`"),
        (("{}", "--cards", "2", "--extension", "0.5"), "`share` must lie in"),
        (("{}", "--cards", "2", "--target", "a"), "`TARGET` must be module:function"),
        (("{}", "--cards", "2", "--fixed", "5GB"), "`--fixed` goes with"),
    ],
)
def test_one_line_for_what_is_wrong(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [x.format(CONFIGS[-1]) for x in arguments]
    assert command_line.main(["tune", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
