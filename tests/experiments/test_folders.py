"""A folder of images as the source of a run."""

import itertools
import multiprocessing
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from experiments import vit_l
from experiments.data.batches import PADDING, TrainingBatches
from experiments.data.folders import FolderImages, load_folder
from experiments.data.images import Images
from experiments.data.sources import held_out_batches, open_dataset, training_stream
from sfpo_jax.training import Data, ImageStream


def fill(root: Path, *classes: str, count: int = 5) -> Path:
    """Images of class i are grey, 40 + 40 i, give or take a little noise."""
    generator = np.random.default_rng(0)
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = 40 + 40 * label + generator.integers(-9, 10, (12, 12, 3))
            image = Image.fromarray(pixels.astype(np.uint8))
            image.save(root / name / f"{i}.png")
    return root


def test_a_folder_is_split_class_by_class(tmp_path: Path) -> None:
    source = str(fill(tmp_path / "toy", "a", "b"))
    data = load_folder(Data(source=source), 8, 3)
    assert (data.name, data.classes) == ("toy", 2)
    assert data.train.shape == (8, 8, 3)
    assert np.bincount(data.train.labels).tolist() == [4, 4]
    assert np.bincount(data.test.labels).tolist() == [1, 1]
    assert not set(data.train.files.names) & set(data.test.files.names)


@pytest.mark.parametrize("held", ["val", "test"])
def test_train_and_val_are_taken_as_they_are(tmp_path: Path, held: str) -> None:
    fill(tmp_path / "train", "a", "b", "c")
    fill(tmp_path / held, "a", "c", count=2)
    data = load_folder(Data(source=str(tmp_path)), 8, 1)
    assert data.classes == 3
    assert np.bincount(data.train.labels).tolist() == [5, 5, 5]
    # Class c keeps the label that it has in train.
    assert data.test.labels.tolist() == [0, 0, 2, 2]


def test_a_class_of_val_alone_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "train", "a")
    fill(tmp_path / "val", "a", "zebra")
    with pytest.raises(ValueError, match=r"`data.source`.*got zebra in the former"):
        load_folder(Data(source=str(tmp_path)), 8, 3)


def test_a_folder_without_images_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"`data.source`: .* got none in"):
        load_folder(Data(source=str(tmp_path)), 8, 3)


def test_batches_of_a_folder(tmp_path: Path) -> None:
    options = Data(source=str(fill(tmp_path, "a", "b")), test_share=0.4, batch_size=6)
    data = open_dataset(options, 8, 1)
    assert isinstance(data.train, FolderImages)
    stream = training_stream(data.train, options, seed=1)
    assert isinstance(stream, ImageStream)
    with stream:
        for images, labels in itertools.islice(stream, 4):
            assert images.shape == (6, 8, 8, 1)
            np.testing.assert_allclose(images.mean((1, 2, 3)), 40 + 40 * labels, atol=9)
    (batch,) = held_out_batches(data.test, 6)
    assert batch.labels.tolist() == [0, 0, 1, 1, PADDING, PADDING]


def test_the_statistics_come_from_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_folder(Data(source=str(fill(tmp_path, "a", "b", count=20))), 8, 3)
    assert data.train.sample().images.shape == (32, 8, 8, 3)
    monkeypatch.setattr("experiments.data.folders._SAMPLE", 10)
    sample = data.train.sample()
    assert np.bincount(sample.labels).tolist() == [5, 5]
    assert abs(sample.images.mean() - 60) < 3


def test_a_folder_of_damaged_images_is_refused(tmp_path: Path) -> None:
    for path in fill(tmp_path, "a").glob("*/*"):
        path.write_bytes(path.read_bytes()[:-60])
    data = load_folder(Data(source=str(tmp_path)), 8, 3)
    with (
        pytest.warns(UserWarning, match="is damaged and skipped"),
        pytest.raises(ValueError, match=r"`data.source`.* 4 damaged ones"),
    ):
        data.train.sample()


def test_images_in_memory_are_batched_as_ever() -> None:
    images = Images(np.zeros((9, 4, 4, 1), np.uint8), np.zeros(9, np.int32))
    stream = training_stream(images, Data(batch_size=3), seed=0)
    assert isinstance(stream, TrainingBatches)
    assert len(held_out_batches(images, 4)) == 3


def test_a_vision_transformer_trains_on_a_folder(tmp_path: Path) -> None:
    values = {
        "data.source": fill(tmp_path / "toy", "a", "b", count=10),
        "data.batch_size": 8,
        "data.workers": 1,
        "model.image_size": 8,
        "model.patch_size": 4,
        "model.width": 8,
        "model.depth": 1,
        "model.heads": 2,
        "model.mlp_width": 16,
        "model.classes": 2,
        "train.runs": tmp_path / "runs",
        "train.compare": "false",
        "train.steps": 3,
        "communication.compression.algorithm": "none",
    }
    # Optax's own AdamW does not run under the strict rules of the other tests.
    with jax.numpy_dtype_promotion("standard"):
        argv = [f"--{key}={value}" for key, value in values.items()]
        assert vit_l.main(argv) == 0
    (report,) = (tmp_path / "runs").glob("*/report.md")
    words = "16 training and 4 test images of toy, 8 x 8 x 1, 2 classes"
    assert words in report.read_text()
    # The end of a run is the end of its workers.
    assert not multiprocessing.active_children()
