"""The examples of docs/data.md run as they stand there, one after the other."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

PAGE = Path(__file__).parents[1] / "docs" / "data.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("imagenet/train", "imagenet/val", "flowers"):
        for label in ("a", "b"):
            (tmp_path / folder / label).mkdir(parents=True)
            for i in range(3):
                image = Image.new("RGB", (40, 30), (80 * i, 0, 0))
                image.save(tmp_path / folder / label / f"{i}.jpg")
    (tmp_path / "books").mkdir()
    (tmp_path / "books/one.txt").write_text("call me Ishmael. " * 1000)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 5
    for source in blocks:
        # Eight processes, and large images, would only take longer.
        exec(source.replace("workers=8", "workers=0").replace("224", "32"), names)
    assert names["images"].shape == (128, 32, 32, 3)
    assert [len(batch.labels) for batch in names["tests"]] == [256]
    assert names["batches"].files.classes == ("a", "b")
    assert np.array_equal(names["inputs"][:, 1:], names["targets"][:, :-1])
