"""Faults are told while a run goes, once each."""

from typing import Any

from experiments.watch import Watch


def records(name: str, input_ms: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(10, 101, 10):
        timed = {"step_ms": 50.0, "input_ms": input_ms}
        found.append({"contender": name, "step": step, "train_loss": 1 / step, **timed})
        if step % 20 == 0:
            found.append({"contender": name, "step": step, "test_accuracy": 0.5})
    return found


def test_a_fault_is_told_once_and_only_after_a_test() -> None:
    watch = Watch({"train": {"steps": 100}}, records("dense AdamW", 20.0))
    told = [[f.kind for f in watch.see(r)] for r in records("SFPO", 20.0)]
    # Three records of the second half are there at the test after step 80.
    assert [step for step, kinds in enumerate(told) if kinds] == [11]
    assert told[11] == ["input"]


def test_a_healthy_run_is_left_alone() -> None:
    watch = Watch({"train": {"steps": 100}}, [])
    assert not any(watch.see(r) for r in records("SFPO", 1.0))
