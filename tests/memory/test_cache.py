"""Measurements kept on disk: found again, and never believed when damaged."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from sfpo_jax.memory import _compile
from sfpo_jax.memory._cache import Cache, cache_folder
from tests.memory.programs import ARGS, STEP, plan_on_cpu


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each program that is compiled."""
    done: list[int] = []
    compile_program = _compile._compile

    def counted(*args: Any) -> Any:
        done.append(1)
        return compile_program(*args)

    monkeypatch.setattr(_compile, "_compile", counted)
    return done


def test_the_second_plan_compiles_nothing_and_is_the_same(
    tmp_path: Path, compilations: list[int]
) -> None:
    first = plan_on_cpu(STEP, *ARGS, cache=tmp_path)
    second = plan_on_cpu(STEP, *ARGS, cache=str(tmp_path))
    assert first == second
    assert len(compilations) == 1
    # The budget is no part of what is measured.
    assert not plan_on_cpu(STEP, *ARGS, cache=tmp_path, budget="1KB").fits
    assert len(compilations) == 1


def test_another_shape_is_another_program(
    tmp_path: Path, compilations: list[int]
) -> None:
    plan_on_cpu(STEP, *ARGS, cache=tmp_path)
    plan_on_cpu(STEP, ARGS[0], ARGS[0].update(shape=(64, 256)), cache=tmp_path)
    assert len(compilations) == 2


def test_other_options_for_the_compiler_make_another_program(
    tmp_path: Path, compilations: list[int]
) -> None:
    options: dict[str, Any] = {"xla_cpu_enable_fast_math": True}
    for step in (jax.jit(jnp.tanh), jax.jit(jnp.tanh, compiler_options=options)):
        plan_on_cpu(step, ARGS[1], cache=tmp_path)
    assert len(compilations) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace("argument_bytes", "argument_byte"),
        lambda text: text.replace('"buffers": [', '"buffers": [7, '),
        # The program is the same and a line it came from is another now.
        lambda text: text.replace("scan(layer", "scan(other"),
    ],
)
def test_a_damaged_entry_is_measured_again(
    damage: Any, tmp_path: Path, compilations: list[int]
) -> None:
    first = plan_on_cpu(STEP, *ARGS, cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    text = entry.read_text()
    entry.write_text(damage(text))
    assert entry.read_text() != text
    assert plan_on_cpu(STEP, *ARGS, cache=tmp_path) == first
    assert len(compilations) == 2
    assert entry.read_text() == text


def test_the_folder_is_the_users_and_can_be_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sfpo_jax" / "plans"
    plan_on_cpu(STEP, *ARGS, cache=False)
    assert list(tmp_path.iterdir()) == []
    plan_on_cpu(STEP, *ARGS, cache=True)
    assert len(list(cache_folder().glob("*.json"))) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "sfpo_jax" / "plans"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert Cache(file).load("key") is None
    assert plan_on_cpu(STEP, *ARGS, cache=file / "below").fits
