"""Streams of images: the same for any workers, hosts and resumes, damage or not."""

import itertools
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sfpo_jax.training import (
    PADDING,
    Augment,
    ImageBatch,
    ImageStream,
    image_folder,
    scan_images,
)

TEST: dict[str, Any] = {
    "shuffle": False,
    "augment": None,
    "epochs": 1,
    "remainder": "pad",
    "centre_share": 1.0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of 5 images of noise; image i has the mean grey 20 + 15 i."""
    generator = np.random.default_rng(0)
    for i in range(15):
        path = tmp_path / f"class{i // 5}" / f"{i:02}.{'jpg' if i % 2 else 'png'}"
        path.parent.mkdir(exist_ok=True)
        noise = generator.integers(-15, 16, (24, 30, 3))
        Image.fromarray((20 + 15 * i + noise).clip(0, 255).astype(np.uint8)).save(path)
    return tmp_path


def cut(path: Path) -> Path:
    """Takes the last pixels away; the header stays."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 9 // 10])
    return path


def make(source: Any, batch_size: int = 6, **changes: Any) -> ImageStream:
    return image_folder(source, batch_size=batch_size, image_size=8, **changes)


def take(stream: ImageStream, count: int) -> list[ImageBatch]:
    return list(itertools.islice(stream, count))


def assert_equal(first: Sequence[ImageBatch], second: Sequence[ImageBatch]) -> None:
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.images, b.images)
        np.testing.assert_array_equal(a.labels, b.labels)


def shown(images: np.ndarray) -> list[int]:
    """Which image each row shows, by its mean."""
    return np.rint((images.mean((1, 2, 3)) - 20) / 15).astype(int).tolist()


def test_training_batches_show_every_image_once_an_epoch(folder: Path) -> None:
    with make(folder, 5) as stream:
        batches = take(stream, 6)
    for images, labels in batches:
        assert (images.dtype, images.shape) == (np.uint8, (5, 8, 8, 3))
        assert (labels.dtype, labels.shape) == (np.int32, (5,))
        assert [i // 5 for i in shown(images)] == labels.tolist()
    seen = [i for images, _ in batches for i in shown(images)]
    assert sorted(seen[:15]) == sorted(seen[15:]) == list(range(15))
    assert seen[:15] != seen[15:]


def test_a_use_of_an_image_has_its_own_crop(folder: Path) -> None:
    files = scan_images(folder).take([0])
    with make(files, 4) as stream, make(files, 4, augment=None) as still:
        rows = {image.tobytes() for image in next(stream).images}
        assert len(rows) == 4
        assert len({image.tobytes() for image in next(still).images}) == 1


def test_a_test_shows_all_in_order_and_is_padded(folder: Path) -> None:
    with make(folder, 4, channels=1, **TEST) as stream:
        batches = list(stream)
    assert [b.images.shape for b in batches] == [(4, 8, 8, 1)] * 4
    labels = np.concatenate([b.labels for b in batches])
    assert labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [PADDING]
    assert [i for b in batches for i in shown(b.images)][:15] == list(range(15))
    assert not batches[-1].images[-1].any()


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_it_resumes_exactly(folder: Path, taken: int) -> None:
    with make(folder) as stream:
        take(stream, taken)
        state = json.loads(json.dumps(stream.get_state()))
        expected = take(stream, 3)
        with make(folder) as other:
            other.set_state(state)
            assert_equal(take(other, 3), expected)
        stream.set_state(state)
        assert_equal(take(stream, 3), expected)


@pytest.mark.slow
def test_workers_change_nothing(folder: Path) -> None:
    cut(folder / "class1/07.jpg")
    with pytest.warns(UserWarning, match="07.jpg is damaged"):
        with make(folder) as stream:
            expected = take(stream, 7)
        with make(folder, workers=2) as stream:
            assert type(next(stream).images) is np.ndarray
            assert_equal(take(stream, 2), expected[1:3])
            state = json.loads(json.dumps(stream.get_state()))
            assert_equal(take(stream, 1), expected[3:4])
            stream.set_state(state)
            assert_equal(take(stream, 4), expected[3:])
            assert [Path(path).name for path, _ in stream.skipped] == ["07.jpg"]
        with make(folder) as stream:
            stream.set_state(state)
            assert_equal(take(stream, 4), expected[3:])


def test_hosts_share_each_batch(folder: Path) -> None:
    with make(folder, host_index=0, host_count=1) as stream:
        expected = take(stream, 4)
    parts = []
    for host in range(3):
        with make(folder, host_index=host, host_count=3) as stream:
            parts.append(take(stream, 4))
    for batch, *shares in zip(expected, *parts, strict=True):
        joined = ImageBatch(*(np.concatenate(x) for x in zip(*shares, strict=True)))
        assert_equal([joined], [batch])


def test_another_seed_is_another_stream(folder: Path) -> None:
    with make(folder, seed=1) as stream, make(folder, seed=2) as other:
        assert (next(stream).images != next(other).images).any()
        with pytest.raises(ValueError, match=r"`state`.* seed 2, got 1"):
            other.set_state(stream.get_state())


def test_a_state_of_other_files_is_refused(folder: Path) -> None:
    state = make(folder).get_state()
    (folder / "class0/00.png").rename(folder / "class0/zz.png")
    with pytest.raises(ValueError, match=r"`state` must come from a stream with files"):
        make(folder).set_state(state)


def test_a_damaged_file_is_replaced_by_the_next_one(folder: Path) -> None:
    first, second = cut(folder / "class0/01.jpg"), cut(folder / "class0/02.png")
    still = {"shuffle": False, "augment": None, "centre_share": 1.0}
    with pytest.warns(UserWarning) as caught, make(folder, 5, **still) as stream:
        batches = take(stream, 6)
    for epoch in (batches[:3], batches[3:]):
        seen = [i for images, _ in epoch for i in shown(images)]
        assert seen == [0, 3, 3, *range(3, 15)]
    assert [path for path, _ in stream.skipped] == [str(first), str(second)]
    assert all("truncated" in reason for _, reason in stream.skipped)
    (warning,) = caught
    assert str(first) in str(warning.message)


def test_a_damaged_file_leaves_an_empty_row_in_a_test(folder: Path) -> None:
    cut(folder / "class0/01.jpg")
    with pytest.warns(UserWarning), make(folder, 4, **TEST) as stream:
        images, labels = next(stream)
    assert labels.tolist() == [0, PADDING, 0, 0]
    assert not images[1].any()


def test_skipped_files_of_the_scan_come_first(folder: Path) -> None:
    (folder / "class0/text.jpg").write_text("text")
    cut(folder / "class0/00.png")
    with pytest.warns(UserWarning) as caught, make(folder, 15) as stream:
        next(stream)
    assert [Path(p).name for p, _ in stream.skipped] == ["text.jpg", "00.png"]
    assert len(caught) == 2


def test_only_damaged_files_are_an_error(folder: Path) -> None:
    for path in folder.glob("*/*"):
        cut(path)
    with make(folder) as stream, pytest.raises(RuntimeError, match="none of the 15"):
        next(stream)


def test_a_file_that_is_gone_is_an_error(folder: Path) -> None:
    files = scan_images(folder)
    (folder / "class0/03.jpg").unlink()
    with make(files, 15) as stream, pytest.raises(OSError, match=r"03\.jpg"):
        next(stream)


def test_augmentation_can_be_turned_off(folder: Path) -> None:
    off = Augment(min_area=1.0, flip=0.0)
    with make(folder, augment=off) as stream, make(folder, augment=None) as still:
        assert_equal(take(stream, 2), take(still, 2))


def test_a_good_folder_warns_of_nothing(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make(folder) as stream:
            take(stream, 3)
