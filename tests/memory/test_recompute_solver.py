"""The solver against all there is to choose from, tried by an oracle in NumPy."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from sfpo_jax.memory._recompute_chain import Chain
from sfpo_jax.memory._recompute_graph import Graph
from sfpo_jax.memory._recompute_solver import Memory
from tests.memory.recompute_models import ROWS, WIDTH, graph_of, two_names

# Six layers that differ, so that which of them are kept matters.
HIDDEN = (64, 512, 32, 256, 128, 384)
LAYERS = len(HIDDEN)
MEMORY = Memory(base=1e6, scale=0.7)
NAMES = [(kind, layer) for layer in range(LAYERS) for kind in ("hidden", "block")]
# Of the first layer the hidden values are a cut, too: only the input flows past them.
PLACE = {("hidden", 0): 0, ("block", 0): 1}
PLACE |= {(kind, i): i + 1 for kind, i in NAMES if i}
CUTS = {("hidden", 0), *((kind, i) for kind, i in NAMES if kind == "block")}
SIZE = {("hidden", i): 4 * ROWS * HIDDEN[i] for i in range(LAYERS)}
SIZE |= {("block", i): 4 * ROWS * WIDTH for i in range(LAYERS)}
LAST = ("block", LAYERS - 1)


class Outcome(NamedTuple):
    saved: frozenset[str]
    peak: float
    flops: int


def outcome(graph: Graph, kept: set[tuple[str, int]]) -> Outcome:
    """What a choice costs, written from the network.

    Layer i is hidden = x up, turn = gelu(hidden) down, block = x + sin(turn); its
    backward pass reads x, hidden and turn, so turn is computed again in any case. That
    of the loss, a mean of squares, reads twice the last block, not the block.
    """
    ends = [PLACE[name] for name in kept & CUTS]
    first = max(ends, default=-1) + 1
    product = 2 * ROWS * WIDTH * np.array(HIDDEN)
    again = [i for i in range(LAYERS) if i + 1 < first]
    flops = sum(product[i] * (1 + (("hidden", i) not in kept)) for i in again)
    if first == 1 and ("hidden", 0) not in kept:
        flops += product[0]
    least = np.zeros(LAYERS + 2)
    for name, place in PLACE.items():
        least[place] += SIZE[name] * (name != LAST)
    held = np.maximum(MEMORY.scale * np.array(graph.residual), least)
    peaks = []
    for now in range(LAYERS + 2):
        if first <= now < LAYERS + 1:
            continue  # all of the last segment is there when the last stretch is
        start = max([end + 1 for end in ends if end < now] + [0])
        left, alive = held.copy(), sum(graph.grads[now:]) + graph.passing[now]
        for name in kept:
            here = PLACE[name]
            if name in CUTS:
                alive += SIZE[name] * (here < now)
            elif here < first:
                alive += SIZE[name] * (here <= now)
            if here < first and name != LAST:
                left[here] -= SIZE[name]
        peaks.append(alive + np.maximum(left[start : now + 1], 0).sum())
    saved = frozenset(f"{kind}/{layer}" for kind, layer in kept)
    return Outcome(saved, MEMORY.base + max(peaks), int(flops))


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain(graph_of(two_names, HIDDEN))


@pytest.fixture(scope="module")
def outcomes(chain: Chain) -> list[Outcome]:
    choices = itertools.product((False, True), repeat=len(NAMES))
    return [
        outcome(
            chain._graph, {n for n, kept in zip(NAMES, choice, strict=True) if kept}
        )
        for choice in choices
    ]


def test_predictions_are_those_of_the_oracle(
    chain: Chain, outcomes: list[Outcome]
) -> None:
    for saved, peak, flops in outcomes[::23]:
        assert chain.predict(saved, MEMORY) == pytest.approx(peak), saved
        assert chain.flops(saved) == flops, saved


def test_the_answer_is_the_best_of_all(chain: Chain, outcomes: list[Outcome]) -> None:
    low = min(outcome.peak for outcome in outcomes)
    high = chain.predict(frozenset(), MEMORY)
    assert low < 0.7 * high
    answer = chain.solve(MEMORY, None)
    assert answer is not None and answer[1] == pytest.approx(low, rel=0.01)
    for part in (0.02, 0.2, 0.4, 0.6, 0.8):
        budget = low + part * (high - low)
        answer = chain.solve(MEMORY, budget)
        assert answer is not None
        saved, peak = answer
        best = min(o.flops for o in outcomes if o.peak <= budget)
        assert peak <= budget * (1 + 1e-6)
        assert best > 0 and chain.flops(saved) <= 1.03 * best
    assert chain.solve(MEMORY, 0.98 * low) is None


def test_all_is_kept_where_all_fits(chain: Chain) -> None:
    answer = chain.solve(MEMORY, 1.01 * chain.predict(frozenset(), MEMORY))
    assert answer is not None and chain.flops(answer[0]) == 0
