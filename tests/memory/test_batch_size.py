"""The largest batch, and how few programs it takes to find it."""

from collections.abc import Callable

import pytest

import sfpo_jax as sfpo
from sfpo_jax.memory._batch_size import round_down, search
from tests.memory import programs

SPREAD = 10**12


def found(measure: Callable[[int], int], allowed: int, limit: int) -> tuple[int, int]:
    """The answer and how often it measured; no size twice."""
    asked: list[int] = []

    def counted(n: int) -> int:
        assert 1 <= n <= limit
        asked.append(n)
        return measure(n)

    answer = search(counted, allowed, limit)
    assert len(set(asked)) == len(asked)
    return answer, len(asked)


@pytest.mark.parametrize("best", [0, 1, 2, 3, 7, 63, 64, 100, 1000, 4097, 10**6])
@pytest.mark.parametrize("fixed", [0, 10**6])
def test_affine_memory_takes_few_measurements(best: int, fixed: int) -> None:
    def measure(n: int) -> int:
        return fixed + 1000 * n

    answer, times = found(measure, fixed + 1000 * best + 500, 2**20)
    assert answer == round_down(best)
    assert times <= 21 if best == 0 else times <= 9


@pytest.mark.parametrize(
    "measure",
    [
        lambda n: n**2,
        lambda n: 100 * (n // 50),
        lambda n: 10 if n < 300 else 10**6 + n,
        lambda n: int(50 * n**0.5),
    ],
)
@pytest.mark.parametrize("allowed", [900, 5000])
def test_other_memory_is_bisected(measure: Callable[[int], int], allowed: int) -> None:
    sizes = sorted({round_down(n) for n in range(1, 2001)})
    best = max((n for n in sizes if measure(n) <= allowed), default=0)
    answer, times = found(measure, allowed, 2000)
    assert answer == best
    assert times <= 20


def test_the_limit_is_looked_at_and_not_passed() -> None:
    assert found(lambda n: 5, 10, 100)[0] == 100
    assert found(lambda n: 5, 10, 1)[0] == 1
    assert found(lambda n: 5, 4, 100)[0] == 0


def test_a_real_program_fits_and_the_next_does_not() -> None:
    options = {"compiler": "cpu", "cache": False}

    def bytes_of(size: int) -> int:
        return sfpo.plan(
            lambda mesh: programs.build_small(mesh, size),
            mesh_shape={"data": 2},
            **options,
        ).total_bytes

    budget = bytes_of(3000)
    size = sfpo.max_batch_size(
        programs.build_small,
        mesh_shape={"data": 2},
        budget=f"{budget}B",
        multiple_of=100,
        **options,
    )
    assert size % 100 == 0
    assert bytes_of(size) <= budget < bytes_of(size + 100)


def test_what_divides_the_batch_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="`multiple_of` must be at least 1, got 0"):
        sfpo.max_batch_size(programs.build, multiple_of=0)
