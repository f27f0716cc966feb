"""The data sets: a split that never moves, and files that are checked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.data.images import Images, load_dataset, split


@pytest.fixture
def toy() -> Images:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 4, 4, 1), dtype=np.uint8)
    return Images(images, np.arange(60, dtype=np.int32) % 3)


def save(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def test_mnist_is_split_class_by_class() -> None:
    data = load_dataset("mnist5k", 0.2)
    assert (data.name, data.classes) == ("mnist5k", 10)
    assert data.train.images.shape == (4000, 28, 28, 1)
    assert data.test.images.shape == (1000, 28, 28, 1)
    assert data.train.images.dtype == np.uint8
    assert data.train.labels.dtype == np.int32
    assert set(np.bincount(data.test.labels)) == {100}
    # The sum stands for the images: the split is the same on every machine.
    assert int(data.test.images.sum(dtype=np.int64)) == 26_450_498
    again = load_dataset("mnist5k", 0.2)
    np.testing.assert_array_equal(data.test.images, again.test.images)


def test_no_image_is_on_both_sides(toy: Images) -> None:
    train, test = split(toy, 0.25)
    rows = {x.tobytes() for x in train.images} | {x.tobytes() for x in test.images}
    assert len(rows) == 60
    assert (len(train.labels), len(test.labels)) == (45, 15)
    assert set(np.bincount(test.labels)) == {5}


def test_even_an_extreme_share_leaves_one_of_each(toy: Images) -> None:
    assert set(np.bincount(split(toy, 0.001)[1].labels)) == {1}
    assert set(np.bincount(split(toy, 0.999)[0].labels)) == {1}


@pytest.mark.parametrize("channels", [None, 3])
def test_an_npz_file_is_a_source(tmp_path: Path, channels: int | None) -> None:
    shape = (8, 4, 4) if channels is None else (8, 4, 4, channels)
    path = save(
        tmp_path / "own.npz",
        images=np.zeros(shape, np.uint8),
        labels=np.array([0, 1] * 4, np.int64),
    )
    data = load_dataset(path, 0.25)
    assert (data.name, data.classes) == ("own", 2)
    assert data.train.images.shape == (6, 4, 4, channels or 1)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": np.zeros((2, 4, 4), np.uint8)}, ["images and labels", "missing"]),
        (
            {"images": np.zeros((2, 4, 4), np.float32), "labels": np.zeros(2, int)},
            ["`images`", "uint8", "float32"],
        ),
        (
            {"images": np.zeros((2, 4), np.uint8), "labels": np.zeros(2, int)},
            ["`images`", "[2, 4]"],
        ),
        (
            {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(3, int)},
            ["`labels`", "2 images", "[3]"],
        ),
        (
            {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2)},
            ["`labels`", "integers", "float64"],
        ),
        (
            {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([-1, 0])},
            ["`labels`", "-1"],
        ),
        (
            {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, 1])},
            ["`labels`", "class 0"],
        ),
    ],
)
def test_a_file_that_cannot_be_used(
    tmp_path: Path, arrays: dict[str, np.ndarray], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        load_dataset(save(tmp_path / "own.npz", **arrays), 0.2)
    for word in words:
        assert word in str(caught.value)


def test_a_source_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`data\.source`.*mnist5k.*'cifar'"):
        load_dataset("cifar", 0.2)
    with pytest.raises(ValueError, match=r"`data\.source`.*absent.*No such file"):
        load_dataset(str(tmp_path / "absent.npz"), 0.2)
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"`data\.source`.*text\.npz.*no \.npz file"):
        load_dataset(str(tmp_path / "text.npz"), 0.2)
