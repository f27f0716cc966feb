"""The order of examples: a permutation each epoch, shared out without a gap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfpo_jax.training import PADDING
from sfpo_jax.training._batch_order import BatchOrder, Remainder


def make(
    examples: int,
    batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    remainder: Remainder = "drop",
    host: tuple[int, int] = (0, 1),
) -> BatchOrder:
    return BatchOrder(
        examples,
        batch_size,
        seed=seed,
        shuffle=shuffle,
        epochs=epochs,
        remainder=remainder,
        host_index=host[0],
        host_count=host[1],
    )


def examples_of(order: BatchOrder, batches: int) -> list[int]:
    return [e for k in range(batches) for e in order.rows(k)[1].tolist()]


# Each lookup goes through Grain, a hundred times slower under the checks of types.
@settings(max_examples=15)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31))
def test_every_example_comes_once_an_epoch(
    examples: int, batch_size: int, seed: int
) -> None:
    order = make(examples, batch_size, seed=seed)
    seen = examples_of(order, -(-3 * examples // batch_size))
    for epoch in range(3):
        part = seen[epoch * examples : (epoch + 1) * examples]
        assert sorted(part) == list(range(examples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = np.split(np.array(examples_of(make(50, 10), 10)), 2)
    assert (first != second).any()
    assert examples_of(make(50, 10, seed=1), 5) != first.tolist()
    assert examples_of(make(50, 10), 5) == first.tolist()


@pytest.mark.parametrize("hosts", [1, 2, 3, 6])
@pytest.mark.parametrize("epochs", [None, 2])
def test_the_hosts_parts_are_the_batch_of_one_host(
    hosts: int, epochs: int | None
) -> None:
    whole = make(20, 12, epochs=epochs, remainder="pad")
    parts = [
        make(20, 12, epochs=epochs, remainder="pad", host=(host, hosts))
        for host in range(hosts)
    ]
    assert {part.batches for part in parts} == {whole.batches}
    for k in range(4):
        for column in (0, 1):
            joined = np.concatenate([part.rows(k)[column] for part in parts])
            np.testing.assert_array_equal(joined, whole.rows(k)[column])


def test_the_last_rows_are_dropped_or_padded() -> None:
    kept = make(5, 4, epochs=2, shuffle=False)
    assert (kept.batches, examples_of(kept, 2)) == (2, [0, 1, 2, 3, 4, 0, 1, 2])
    padded = make(5, 4, epochs=2, shuffle=False, remainder="pad")
    assert padded.batches == 3
    assert padded.rows(2)[1].tolist() == [3, 4, PADDING, PADDING]
    assert make(8, 4, epochs=1, remainder="pad").batches == 2
    assert make(3, 8).batches is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"seed": -1}, "`seed` must be at least 0, got -1"),
        ({"epochs": 0}, "`epochs` must be at least 1, got 0"),
        ({"host": (0, 0)}, "`host_count` must be at least 1, got 0"),
        ({"host": (2, 2)}, r"`host_index` must lie in \[0, 2\), got 2"),
        ({"host": (0, 3)}, "`batch_size`.*3 hosts.*got 8: take 6 or 9"),
        ({"epochs": 1}, "`batch_size` must be at most 5.*got 8.*remainder='pad'"),
    ],
)
def test_what_has_no_batches_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**{"examples": 5, "batch_size": 8, **changes})
