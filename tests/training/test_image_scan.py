"""A folder before the run: what is used, what is skipped and why."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfpo_jax.training import ImageFiles, scan_images


def save(path: Path, kind: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (10, 10), "blue").save(path, kind)


def test_classes_and_images_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/2.jpg", "b/1.png", "a/deep/9.JPEG", "a/x.jpg", "b/.hidden.jpg"):
        save(tmp_path / name, "PNG" if name.endswith("png") else "JPEG")
    save(tmp_path / ".cache/1.jpg")
    (tmp_path / "README").write_text("not a class")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = scan_images(tmp_path)
    assert files.classes == ("a", "b")
    assert files.names == ("a/x.jpg", "a/deep/9.JPEG", "b/1.png", "b/2.jpg")
    assert files.labels.tolist() == [0, 0, 1, 1]
    assert (files.skipped, files.empty_classes) == ((), ())


def test_what_is_no_image_is_named_and_what_is_one_used(tmp_path: Path) -> None:
    save(tmp_path / "a/good.jpg")
    save(tmp_path / "a/png_inside.jpg", "PNG")
    save(tmp_path / "a/jpeg_without_a_name", "JPEG")
    save(tmp_path / "a/old.gif", "GIF")
    (tmp_path / "a/text.jpg").write_text("no image")
    (tmp_path / "a/void.png").touch()
    (tmp_path / "a/cut.jpg").write_bytes((tmp_path / "a/good.jpg").read_bytes()[:30])
    (tmp_path / "a/gone.jpg").symlink_to("nowhere")
    (tmp_path / "zebra").mkdir()
    with pytest.warns(UserWarning) as caught:
        files = scan_images(tmp_path)
    used = [Path(name).name for name in files.names]
    assert used == ["good.jpg", "jpeg_without_a_name", "png_inside.jpg"]
    skipped = {Path(path).name: reason for path, reason in files.skipped}
    # Pillow's own words.
    assert skipped.pop("cut.jpg")
    assert skipped == {
        "gone.jpg": "No such file or directory",
        "old.gif": "neither JPEG nor PNG",
        "text.jpg": "neither JPEG nor PNG",
        "void.png": "empty file",
    }
    assert (files.classes, files.empty_classes) == (("a", "zebra"), ("zebra",))
    (warning,) = caught
    message = str(warning.message)
    assert "\n" not in message
    for words in ("5 of 8 files", "cut.jpg: ", "and 2 more", "images (zebra)"):
        assert words in message


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`path` must be a folder.*absent.*no such"):
        scan_images(tmp_path / "absent")
    save(tmp_path / "1.jpg")
    with pytest.raises(ValueError, match=r"`path` must hold a folder.*for each class"):
        scan_images(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"`path` must hold JPEG or PNG.*empty"):
        scan_images(tmp_path)
    (tmp_path / "a/x.jpg").write_text("text")
    with pytest.raises(ValueError, match=r"got none.*x\.jpg: neither JPEG nor PNG"):
        scan_images(tmp_path)


def numbered(*counts: int) -> ImageFiles:
    labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    names = tuple(f"{label}/{i}.jpg" for i, label in enumerate(labels))
    return ImageFiles("/data", tuple(map(str, range(len(counts)))), names, labels)


def test_a_split_holds_out_a_share_of_each_class() -> None:
    files = numbered(20, 2, 10)
    train, test = files.split(0.2)
    assert np.bincount(test.labels).tolist() == [4, 1, 2]
    assert sorted((*train.names, *test.names)) == sorted(files.names)
    assert train.classes == test.classes == files.classes
    for part in (train, test):
        for name, label in zip(part.names, part.labels, strict=True):
            assert name.startswith(f"{label}/")
    again, _ = files.split(0.2)
    assert again.names == train.names


def test_a_split_needs_two_images_of_a_class_and_a_share() -> None:
    with pytest.raises(ValueError, match=r"`test_share`.*one image of class '1'"):
        numbered(3, 1).split(0.5)
    with pytest.raises(ValueError, match=r"`test_share` must lie in \(0, 1\), got 1"):
        numbered(3).split(1.0)


def test_a_digest_tells_lists_apart() -> None:
    digests = {f.digest() for f in (numbered(3), numbered(4), numbered(3, 0))}
    assert len(digests) == 3
    assert numbered(3).digest() in digests
