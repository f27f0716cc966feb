"""The timing of the reading of images: what it makes, measures and says."""

import json
from pathlib import Path

import pytest

from experiments.bench import data


def test_it_streams_what_it_made_and_says_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def step_seconds(source: str, steps: int, workers: int = 0) -> float:
        seen.append((Path(source).exists(), steps, workers))
        return 0.064

    monkeypatch.setattr(data, "step_seconds", step_seconds)
    out = tmp_path / "results" / "rate.json"
    values = {"images": 300, "file_size": 16, "workers": 0, "steps": 7, "out": out}
    assert data.main([f"--{key}={value}" for key, value in values.items()]) == 0
    # The images in memory first, then the folder, while it exists.
    assert seen == [(False, 7, 0), (True, 7, 0)]
    results = json.loads(out.read_text())
    assert results["step"]["needed_images_per_second"] == 2000
    (row,) = results["reading"]
    assert row["workers"] == 0
    assert row["images_per_second"] > 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "300 JPEG files" in shown
    assert "takes 64.0 ms on images in memory and so needs 2,000 images/s" in shown


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--images=100", "`images` must be at least 256, got 100"),
        ("--file_size=0", "`file_size` must be at least 1"),
        ("--workers=-1", "`workers` must be at least 0"),
    ],
)
def test_what_cannot_be_measured(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        data.main([option])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
