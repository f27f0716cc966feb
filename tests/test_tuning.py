"""The chunk rule and the bubble."""

import pytest

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
