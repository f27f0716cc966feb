"""The rules, against what was published of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sfpo_jax as sfpo


def simulated_bubble(chunk_size: int, depth: int) -> float:
    """Empty places of a pipeline through which pieces move a place a turn."""
    places, waiting, left = [False] * depth, chunk_size, chunk_size
    empty = turns = 0
    while left:
        left -= places[-1]
        places = [waiting > 0, *places[:-1]]
        waiting -= places[0]
        if any(places):
            turns += 1
            empty += places.count(False)
    return empty / (turns * depth)


@pytest.mark.parametrize(("chunk_size", "depth"), [(1, 1), (4, 2), (8, 3), (16, 8)])
def test_the_bubble_is_what_a_pipeline_leaves_empty(
    chunk_size: int, depth: int
) -> None:
    found = sfpo.tuning.bubble_fraction(chunk_size, depth)
    assert found == pytest.approx(simulated_bubble(chunk_size, depth))


@pytest.mark.parametrize("depth", [1, 2, 5, 100])
def test_the_rule_keeps_the_bubble_under_a_third(depth: int) -> None:
    sfpo.tuning.check_chunk_size(2 * depth, depth)
    assert sfpo.tuning.bubble_fraction(2 * depth, depth) < 1 / 3


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((2, 2), r"at least 2 \* `prefetch_depth`, got 2 and 2: cut into 4 .* 1$"),
        ((1, 1), r"got 1 and 1: cut into 2 pieces or more$"),
        ((0, 1), "`chunk_size` must be at least 1, got 0"),
        ((4, 0), "`prefetch_depth` must be at least 1, got 0"),
        ((4, 1, 0), "`op_size` must be at least 1, got 0"),
        ((6, 2, 4), "multiple of the size of the axis op, got 6 and 4: .* take 8$"),
    ],
)
def test_other_numbers_are_refused(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sfpo.tuning.check_chunk_size(*numbers)
    if len(numbers) == 2 and 0 in numbers:
        with pytest.raises(ValueError, match=message):
            sfpo.tuning.bubble_fraction(*numbers)


def test_the_published_row_of_bert_large() -> None:
    # Batch 8 -> 64, learning rate 2e-5 -> 5.6e-5, sparsity 0.7 -> 0.5 on eight cards.
    tuning = sfpo.tuning
    batch = tuning.optimal_batch_size(80e9, 0.9e9, global_batch=64, local_batch_base=8)
    assert batch == 64
    rate = tuning.scale_learning_rate(2e-5, batch, 8)
    assert math.floor(1e6 * rate) == 56
    assert tuning.sparsity_for(1) == 0.7
    assert tuning.sparsity_for(8) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("memory", "each", "fixed", "expected"),
    [
        (80e9, 1e9, 0, 64),  # the square-root rule: sqrt(64) * 8
        (40e9, 1e9, 0, 32),  # 0.8 * 40
        (40e9, 1e9, 12e9, 20),
        (80e9, 0.99e9, 0, 64),
    ],
)
def test_the_batch_is_the_least_of_both_rules(
    memory: float, each: float, fixed: float, expected: int
) -> None:
    found = sfpo.tuning.optimal_batch_size(memory, each, 64, 8, fixed=fixed)
    assert found == expected


def test_sparsity_falls_with_each_doubling_and_no_further_than_published() -> None:
    found = [sfpo.tuning.sparsity_for(n) for n in range(1, 100)]
    assert found == sorted(found, reverse=True)
    assert found[0] - found[1] == pytest.approx(found[1] - found[3])
    assert set(found[7:]) == {found[7]}


@given(st.integers(1, 10**6), st.floats(0.1, 0.2))
def test_steps_grow_by_the_share_and_no_more(steps: int, share: float) -> None:
    more = sfpo.tuning.extend_steps(steps, share) - steps
    assert share * steps - 1e-5 <= more < share * steps + 1


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9))
def test_tuned_pieces_pass_the_rule(chunk: int, depth: int, ranks: int) -> None:
    found = sfpo.tuning.tuned_chunk_size(chunk, depth, ranks)
    sfpo.tuning.check_chunk_size(found, depth, ranks)
    assert found >= chunk
    # One step of the ranks fewer breaks the rule, or is less than was asked for.
    assert found - ranks < max(chunk, 2 * depth)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.optimal_batch_size(0, 1, 1, 1), "`gpu_memory` must lie in"),
        (lambda t: t.optimal_batch_size(10e9, 9e9, 1, 1), "10 GB holds not one sample"),
        (lambda t: t.optimal_batch_size(1e9, 1, 1, 1, fixed=-1), "`fixed` must be at"),
        (lambda t: t.scale_learning_rate(1e-3, 0, 8), "`batch` must lie in"),
        (lambda t: t.sparsity_for(0), "`cards` must be at least 1, got 0"),
        (lambda t: t.extend_steps(100, 0.3), r"`share` must lie in \[0.1, 0.2\]"),
    ],
)
def test_what_no_rule_is_for(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(sfpo.tuning)
