"""The stream of batches: in order, and exactly resumed."""

import json

import pytest

from sfpo_jax.training import BatchStream


def squares(batches: int | None = None, **identity: int) -> BatchStream[int]:
    return BatchStream(lambda k: k * k, batches, identity)


@pytest.mark.parametrize("taken", [0, 1, 3, 6])
def test_it_goes_on_where_it_stood(taken: int) -> None:
    with squares(6, size=3) as stream, squares(6, size=3) as other:
        for _ in range(taken):
            next(stream)
        state = json.loads(json.dumps(stream.get_state()))
        expected = [k * k for k in range(taken, 6)]
        assert list(stream) == expected
        # Onto a new one, onto one that is further, and onto one that is exhausted.
        other.set_state(state)
        assert list(other) == expected
        stream.set_state(state)
        assert list(stream) == expected


def test_asking_for_the_state_changes_nothing() -> None:
    with squares() as stream:
        seen = []
        for _ in range(4):
            stream.get_state()
            seen.append(next(stream))
        assert seen == [0, 1, 4, 9]


def test_a_closed_stream_opens_again() -> None:
    with squares() as stream:
        assert next(stream) == 0
        stream.close()
        assert next(stream) == 1


def test_the_state_of_another_stream_is_refused() -> None:
    state = squares(size=3).get_state()
    with pytest.raises(ValueError, match=r"`state`.* size 4, got 3: .*start anew"):
        squares(size=4).set_state(state)
    with pytest.raises(ValueError, match=r"`state`.* size None, got 3"):
        squares().set_state(state)
    with pytest.raises(ValueError, match=r"`state` must hold.*got \['step'\]"):
        squares().set_state({"step": 3})


def test_what_making_raises_is_raised_by_next() -> None:
    def fail(batch: int) -> int:
        raise OSError(f"batch {batch} is gone")

    with BatchStream(fail, None, {}) as stream, pytest.raises(OSError, match="batch 0"):
        next(stream)


def test_fewer_workers_than_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`workers` must be at least 0, got -1"):
        BatchStream(lambda k: k, None, {}, workers=-1)
