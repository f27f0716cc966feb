"""Batches: the same for equal seeds, every image once an epoch, shifted in place."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.data.batches import (
    PADDING,
    Normalization,
    check_shapes,
    normalization,
    preprocess,
    training_batches,
)
from experiments.data.batches import test_batches as batches_in_order
from experiments.data.images import Images


def numbered(count: int, size: int = 5) -> Images:
    """Image i holds the value i everywhere."""
    values = np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1)
    images = np.broadcast_to(values, (count, size, size, 1)).copy()
    return Images(images, np.arange(count, dtype=np.int32))


def take(data: Images, count: int, **arguments: int) -> list[tuple[np.ndarray, ...]]:
    batches = training_batches(data, 8, **arguments)
    return [tuple(map(np.asarray, b)) for b in itertools.islice(batches, count)]


def test_equal_seeds_give_equal_batches_and_others_do_not() -> None:
    data = numbered(20)
    first, again = take(data, 6, seed=3, shift=1), take(data, 6, seed=3, shift=1)
    other = take(data, 6, seed=4, shift=1)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])
    assert any((a[1] != b[1]).any() for a, b in zip(first, other, strict=True))


def test_every_image_comes_once_before_any_comes_again() -> None:
    labels = np.concatenate([b[1] for b in take(numbered(20), 10, seed=0)])
    for epoch in range(4):
        assert sorted(labels[20 * epoch : 20 * epoch + 20]) == list(range(20))


@pytest.mark.parametrize("batch_size", [3, 8, 45])
@pytest.mark.parametrize("shift", [0, 2])
def test_the_order_of_draws_is_what_published_results_were_made_with(
    batch_size: int, shift: int
) -> None:
    data = numbered(20, size=1)
    generator, order = np.random.default_rng(7), np.zeros(0, np.int64)
    batches = training_batches(data, batch_size, seed=7, shift=shift)
    for batch in itertools.islice(batches, 9):
        while len(order) < batch_size:
            order = np.concatenate([order, generator.permutation(20)])
        places, order = order[:batch_size], order[batch_size:]
        if shift:
            generator.integers(-shift, shift + 1, (2, batch_size, 1))
        np.testing.assert_array_equal(batch.labels, places)


@pytest.mark.parametrize("batch_size", [8, 45])
@pytest.mark.parametrize("taken", [0, 1, 5, 11])
def test_they_resume_exactly(batch_size: int, taken: int) -> None:
    data = numbered(20)
    data.images[:, 2:] = np.arange(5, dtype=np.uint8)[:, None]
    first, other = (
        training_batches(data, batch_size, seed=3, shift=1) for _ in range(2)
    )
    for _ in range(taken):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    expected = list(itertools.islice(first, 4))
    next(other)
    for batches in (other, first):
        batches.set_state(state)
        for a, b in zip(expected, itertools.islice(batches, 4), strict=True):
            np.testing.assert_array_equal(a.images, b.images)
            np.testing.assert_array_equal(a.labels, b.labels)


def test_a_state_of_other_batches_is_refused() -> None:
    state = training_batches(numbered(20), 8, seed=3).get_state()
    with pytest.raises(ValueError, match=r"`state`.* seed 4, got 3"):
        training_batches(numbered(20), 8, seed=4).set_state(state)


def test_a_batch_may_be_larger_than_the_data() -> None:
    (_, labels), *_ = take(numbered(3), 1, seed=0)
    assert sorted(np.bincount(labels)) == [2, 3, 3]


def test_shifts_move_an_image_by_up_to_so_many_pixels() -> None:
    images = np.zeros((1, 7, 7, 1), np.uint8)
    images[0, 3, 3] = 200
    data = Images(images, np.zeros(1, np.int32))
    places = set()
    for moved, _ in take(data, 40, seed=0, shift=2):
        for image in moved:
            (place,) = np.argwhere(image[..., 0] == 200)
            places.add(tuple(place - 3))
    assert places == set(itertools.product(range(-2, 3), repeat=2))


def test_a_test_set_comes_in_order_and_is_filled_up() -> None:
    batches = batches_in_order(numbered(10), 4)
    labels = np.concatenate([np.asarray(b.labels) for b in batches])
    assert labels.tolist() == [*range(10), PADDING, PADDING]
    assert {b.images.shape for b in batches} == {(4, 5, 5, 1)}


def test_normalization_is_that_of_each_channel() -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (9, 4, 4, 2), dtype=np.uint8)
    images[..., 1] = 51
    scale = normalization(images)
    np.testing.assert_allclose(scale.mean, [(images[..., 0] / 255).mean(), 0.2])
    np.testing.assert_allclose(scale.std, [(images[..., 0] / 255).std(), 1.0])
    scaled = preprocess(images, scale, 4, 2)
    np.testing.assert_allclose(scaled.mean((0, 1, 2)), 0.0, atol=1e-6)
    np.testing.assert_allclose(scaled.std((0, 1, 2)), [1.0, 0.0], atol=1e-6)


def test_pixels_are_repeated_and_a_grey_image_gets_its_colours() -> None:
    images = np.arange(4, dtype=np.uint8).reshape(1, 2, 2, 1)
    large = preprocess(images, Normalization((0.0,), (1 / 255,)), 6, 3)
    assert (large.shape, large.dtype) == ((1, 6, 6, 3), jnp.float32)
    expected = np.kron([[0, 1], [2, 3]], np.ones((3, 3)))
    for channel in range(3):
        np.testing.assert_allclose(large[0, ..., channel], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "size", "channels", "words"),
    [
        ((1, 28, 24, 1), 28, 1, "`data.source`.*28 x 24"),
        ((1, 28, 28, 1), 32, 1, "`model.image_size`.*28 pixels.*got 32.*take 28"),
        ((1, 28, 28, 1), 14, 1, "`model.image_size`.*got 14.*take 28"),
        ((1, 28, 28, 3), 28, 1, "`model.channels` must be 3.*got 1"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    shape: tuple[int, ...], size: int, channels: int, words: str
) -> None:
    data = Images(np.zeros(shape, np.uint8), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=words):
        check_shapes(data, size, channels)
