"""What lives when: the curves, the fullest moment, the picture."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax import __main__ as command_line
from sfpo_jax.memory import LifetimesError, save_lifetimes
from sfpo_jax.memory._origins import NOWHERE, Origin
from sfpo_jax.memory._timeline import Value, make_timeline
from tests.memory.programs import ARGS, LAYERS, STEP, WIDTH, plan_on_cpu

PNG = b"\x89PNG\r\n\x1a\n"
TARGET = "tests.memory.programs:build"
FORWARD = Origin("jit(f)/jvp()/dot", "", 0)


@pytest.fixture(scope="module")
def plan() -> sfpo.Plan:
    return plan_on_cpu(STEP, *ARGS)


def test_the_fullest_moment_is_the_ledgers(plan: sfpo.Plan) -> None:
    lives = plan.lifetimes
    assert lives is not None
    at_peak = {name: int(held[lives.peak]) for name, held in lives.held.items()}
    # What the ledger counts as temporaries besides are the holes between them.
    at_peak["other temporaries"] += lives.holes
    assert at_peak == plan.ledger
    assert lives.reserved_bytes == plan.total_bytes
    assert lives.peak_bytes == lives.total.max()
    # The allocator packs what lives together: the curve explains what it reserved.
    assert 0 <= lives.holes < 0.01 * plan.temporary_bytes
    # Arguments are there all the time; activations come and go.
    assert np.unique(lives.held["parameters"]).tolist() == [LAYERS * WIDTH**2 * 4]
    activations = lives.held["activations"]
    assert activations[0] == activations[-1] == 0 and activations.max() > 0


def test_the_order_is_forward_then_backward_with_the_sources(plan: sfpo.Plan) -> None:
    lives = plan.lifetimes
    assert lives is not None
    # Where each begins for the last time: gradients may be cleared before all.
    starts = {name: start for start, name in lives.phases}
    assert starts["forward"] < starts["backward"]
    assert lives.peak >= starts["forward"]
    kept = [value for value in lives.values if value.is_activation]
    assert kept and all("programs.py" in value.origin.file for value in kept)
    longest = max(kept, key=lambda value: value.dies - value.born)
    assert longest.born < starts["backward"] < longest.dies
    assert all(v.born <= v.dies < len(lives.total) for v in lives.values)


def test_values_in_one_place_count_once() -> None:
    """Against a count of every byte at every position."""
    rng = np.random.default_rng(0)
    values, length, arena = [], 30, 64
    for _ in range(40):
        offset, born = int(rng.integers(0, 48)), int(rng.integers(0, 24))
        size, lives = int(rng.integers(1, 16)), int(rng.integers(0, 6))
        origin = FORWARD if rng.random() < 0.5 else NOWHERE
        values.append(Value(size, "u8", offset, born, born + lives, origin))
    held = np.zeros((2, length, arena), bool)
    for v in values:
        place = slice(v.born, v.dies + 1), slice(v.offset, v.offset + v.size)
        held[(1, *place)] = True
        if v.is_activation:
            held[(0, *place)] = True
    activations, total = held.sum(2)
    timeline = make_timeline(values, [NOWHERE] * length)
    found = np.zeros((2, length), int)
    for moment in timeline.moments:
        found[:, moment.position :] = [[moment.activations], [moment.others]]
    np.testing.assert_array_equal(found[0], activations)
    np.testing.assert_array_equal(found.sum(0), total)
    assert timeline.peak == total.argmax()


def test_a_picture_from_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lives.png"
    options = ["--compiler", "cpu", "--no-cache", "--mesh", "data=2"]
    argv = ["plan", TARGET, *options, "--budget", "3MB", f"--lifetimes={path}"]
    assert command_line.main(argv) in (0, 1)
    assert path.read_bytes().startswith(PNG)
    assert "held by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lifetimes=absent/x.png"], "no folder"),
        (["--lifetimes=x.png", "--max-batch-size"], "leave `--max-batch-size` away"),
    ],
)
def test_what_cannot_be_drawn_is_said_before_anything_compiles(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["plan", TARGET, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


def test_without_matplotlib_the_command_to_install_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command_line.main(["plan", TARGET, "--lifetimes=x.png"]) == 2
    assert "needs matplotlib: pip install" in capsys.readouterr().err


def test_a_plan_that_does_not_know_is_not_drawn(plan: sfpo.Plan, tmp_path: Any) -> None:
    import dataclasses

    blind = dataclasses.replace(plan, timeline=None)
    assert blind.lifetimes is None
    with pytest.raises(LifetimesError, match="cannot be drawn"):
        save_lifetimes(tmp_path / "x.png", blind)
    with pytest.raises(LifetimesError, match="cannot be written"):
        save_lifetimes(tmp_path / "absent" / "x.png", plan)
