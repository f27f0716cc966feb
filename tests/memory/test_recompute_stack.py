"""The search over stacks against all there is to choose from, tried by an oracle."""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from sfpo_jax.memory import Recorder
from sfpo_jax.memory._recompute_stack import Base, Runs, Stacks, Way
from tests.memory.recompute_models import ROWS, WIDTH, block

DEPTH, HIDDEN = 6, 4 * ROWS * 128
# Bytes that a layer keeps and products of its two that run again, by what it keeps.
BLOCK = 4 * ROWS * WIDTH
WAYS: dict[Way, tuple[float, int]] = {
    "full": (0, 2),
    ("hidden",): (HIDDEN, 1),
    ("turn",): (BLOCK, 1),
    ("hidden", "turn"): (HIDDEN + BLOCK, 0),
}
PRODUCT = 2 * ROWS * WIDTH * 128
# What the last layers need to be made again; two of the ways are not known.
BASE = Base({("full", False): 3.0e6, (("turn",), True): 1.5e6}, 2.0e6)


@pytest.fixture(scope="module")
def stacks() -> Stacks:
    recorder = Recorder()

    def run(layer: object, floats: list[jax.Array]) -> tuple[list[jax.Array], list]:
        return [block(layer, floats[0], None)], []

    layer = {"up": jnp.zeros((WIDTH, 128)), "down": jnp.zeros((128, WIDTH))}
    args = layer, [jnp.zeros((ROWS, WIDTH))]
    recorder.record_block("", run, args, DEPTH, microbatches=1)
    return Stacks(recorder.stacks)


def choices() -> Iterator[tuple[Way, ...]]:
    """The ways of all layers, those that keep least first."""
    order = sorted(WAYS, key=lambda way: WAYS[way][0])
    yield from itertools.combinations_with_replacement(order, DEPTH)


def peak(ways: tuple[Way, ...]) -> float:
    top = ways[-1], ways.count(ways[-1]) == 1
    flipped = top[0], not top[1]
    beside = BASE.known.get(top, BASE.known.get(flipped, BASE.other))
    return beside + sum(WAYS[way][0] for way in ways)


def test_the_answer_is_the_best_of_all(stacks: Stacks) -> None:
    low, high = min(map(peak, choices())), max(map(peak, choices()))
    assert low < 0.5 * high
    for part in (0.02, 0.2, 0.4, 0.6, 0.8):
        budget = low + part * (high - low)
        answer = stacks.solve(BASE, budget)
        assert answer is not None
        runs, size = answer
        fits = [ways for ways in choices() if peak(ways) <= budget]
        best = PRODUCT * min(sum(WAYS[way][1] for way in ways) for ways in fits)
        assert size == pytest.approx(peak(_spread(runs))) and size <= budget + 1
        assert best > 0 and stacks.flops(runs) <= 1.03 * best
    assert stacks.solve(BASE, 0.98 * low) is None


def test_what_xla_merges_is_not_counted(stacks: Stacks) -> None:
    """A compiled step tells what a layer keeps that keeps all."""
    asked = stacks.stacks[""].options[-1].bytes
    assert stacks.nothing == (("", ((DEPTH, "none"),)),)
    learned = Stacks(stacks.stacks)
    base = learned.calibrate(held=1.0e6, temporary=0.5 * DEPTH * asked)
    total = 1.0e6 + 0.5 * DEPTH * asked
    assert learned.predict(stacks.nothing, base) == pytest.approx(total)
    # Layers made again take what one takes that keeps all, and what is held.
    nothing = (("", ((DEPTH, "full"),)),)
    assert learned.predict(nothing, base) == pytest.approx(1.0e6 + 0.5 * asked)
    half = (("", ((2, "full"), (4, "none"))),)
    assert learned.predict(half, base) == pytest.approx(1.0e6 + 2.0 * asked)


def test_more_than_was_asked_for_lies_beside_the_layers(stacks: Stacks) -> None:
    asked = stacks.stacks[""].options[-1].bytes
    learned = Stacks(stacks.stacks)
    base = learned.calibrate(held=1.0e6, temporary=2.0 * DEPTH * asked)
    assert learned.stacks == stacks.stacks
    half = (("", ((2, "full"), (4, "none"))),)
    assert learned.predict(half, base) == pytest.approx(
        1.0e6 + DEPTH * asked + 4 * asked
    )


def _spread(runs: Runs) -> tuple[Way, ...]:
    ((_, own),) = runs
    return tuple(way for layers, way in own for _ in range(layers))
