"""Sums over a test set, and what has none."""

import numpy as np
import pytest

from sfpo_jax.training import evaluate


def test_batches_are_added_up() -> None:
    sums = evaluate(
        lambda scale, batch: (scale * batch.sum(), batch.size),
        2.0,
        [np.arange(3), np.arange(4)],
    )
    assert sums is not None and sums.dtype == np.float64
    assert sums.tolist() == [18.0, 7.0]


def test_an_empty_test_set_is_refused() -> None:
    with pytest.raises(ValueError, match="`batches` must hold at least one") as error:
        evaluate(lambda *_: (1.0,), None, iter(()))
    assert "\n" not in str(error.value)
