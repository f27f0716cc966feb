"""Does a folder of JPEG files keep the default step fed?

    python -m experiments.bench.data

Writes 10,000 small JPEG files into a temporary folder and streams them as training
does, decoded, cropped, mirrored and resized, in threads and in worker processes. Then
it times the step of `python -m experiments.vit_l` (dense AdamW, the faster one) on
images in memory, which says how many images a second are needed, and on the folder.
"""

import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.vit_run import Config, prepare
from sfpo_jax.training import (
    ConfigError,
    ImageFiles,
    build,
    exit_on_config_error,
    image_folder,
    load_config,
    scan_images,
)

PROGRAM = "python -m experiments.bench.data"

_CLASSES = 10
_BATCH = Config().data.batch_size


@dataclasses.dataclass(frozen=True)
class Options:
    """What to make, how to stream it, and where the numbers go."""

    images: int = 10_000
    """Files to make."""
    file_size: int = 64
    """Pixels along each side of a file."""
    workers: int = 2
    """Measure 0 to this many worker processes."""
    steps: int = 40
    """Steps to time on either source; 0: only the reading is timed."""
    out: str = "docs/results/data_rate.json"
    """The file of results."""

    def __post_init__(self) -> None:
        least = {"images": 2 * _BATCH, "file_size": 1, "workers": 0, "steps": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(
                    f"`{name}` must be at least {low}, got {getattr(self, name)}"
                )


def write_jpegs(root: Path, count: int, size: int) -> int:
    """Makes class folders of JPEG files with edges, gradients and noise in them.

    Args:
      root: an empty folder.
      count: files, spread over ten classes.
      size: pixels along each side.

    Returns:
      Bytes of all files.
    """
    from PIL import Image

    for label in range(_CLASSES):
        (root / f"class{label}").mkdir()

    def write(index: int) -> int:
        generator = np.random.default_rng(index)
        ramp = np.linspace(0, generator.uniform(60, 200, 3), size)
        pixels = ramp[:, None] + generator.normal(0, 8, (size, size, 3))
        low, high = np.sort(generator.integers(0, size, 2))
        pixels[low : high + 1, low : high + 1] += generator.uniform(20, 55, 3)
        path = root / f"class{index % _CLASSES}" / f"{index:05}.jpg"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
        return path.stat().st_size

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(write, range(count)))


def measure(files: ImageFiles, workers: int) -> dict[str, Any]:
    """Streams the folder once, as training does.

    Returns:
      `workers`; `images_per_second` without the first batch; `start_seconds` until the
      first batch, the start of the workers included; `cpu_us_per_image`, microseconds
      of one core, None where other processes do the work.
    """
    began = time.perf_counter()
    model = Config().model
    batches = image_folder(
        files,
        batch_size=_BATCH,
        image_size=model.image_size,
        channels=model.channels,
        epochs=1,
        workers=workers,
        host_index=0,
        host_count=1,
    )
    with batches:
        next(batches)
        started, busy = time.perf_counter(), time.process_time()
        count = sum(len(batch.labels) for batch in batches)
        seconds = time.perf_counter() - started
        busy = time.process_time() - busy
    return {
        "workers": workers,
        "images_per_second": round(count / seconds),
        "start_seconds": round(started - began, 2),
        "cpu_us_per_image": None if workers else round(1e6 * busy / count),
    }


def step_seconds(source: str, steps: int, workers: int = 0) -> float:
    """Median time of the default step, dense, on a source; the wait for data in it."""
    changes = {
        "data": {"source": source, "workers": workers},
        "communication": {"compression": {"algorithm": "none"}},
        "train": {"steps": steps, "evaluate_every": steps, "compare": False},
    }
    run = prepare(build(Config, changes, base=Config()))
    return run.start(run.contenders[-1]).step_seconds


def main(argv: Sequence[str]) -> int:
    """Makes the files, measures, prints a table and writes the results.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status, 0.
    """
    console = Console()
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(), argv, prog=PROGRAM, description="Times the reading of images."
        )
    results: dict[str, Any] = {
        "options": dataclasses.asdict(options),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        # What else ran: the numbers mean little where it is not near 0.
        "load_before": round(os.getloadavg()[0], 1),
    }
    with tempfile.TemporaryDirectory() as name:
        size = write_jpegs(Path(name), options.images, options.file_size)
        console.print(f"{options.images} JPEG files, {size / 1e6:.0f} MB")
        began = time.perf_counter()
        files = scan_images(name)
        results["scan_seconds"] = round(time.perf_counter() - began, 2)
        console.print(f"listed and checked in {results['scan_seconds']} s")
        rows = [measure(files, workers) for workers in range(options.workers + 1)]
        results["reading"] = rows
        console.print(_table(rows))
        if options.steps:
            results["step"] = _steps(name, rows, options.steps)
            console.print(_sentence(results["step"]))
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _steps(folder: str, rows: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Times the default step in memory and on the folder, read the fastest way."""
    workers = max(rows, key=lambda row: row["images_per_second"])["workers"]
    memory = step_seconds(Config().data.source, steps)
    return {
        "memory_ms": round(1e3 * memory, 1),
        "needed_images_per_second": round(_BATCH / memory),
        "workers": workers,
        "folder_ms": round(1e3 * step_seconds(folder, steps, workers), 1),
    }


def _sentence(step: dict[str, Any]) -> str:
    return (
        f"the default step takes {step['memory_ms']} ms on images in memory and so "
        f"needs {step['needed_images_per_second']:,} images/s; on the folder, "
        f"{step['workers']} workers, it takes {step['folder_ms']} ms"
    )


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("workers", "images/s", "first batch", "CPU/image"):
        table.add_column(column, justify="right")
    for row in rows:
        busy = row["cpu_us_per_image"]
        table.add_row(
            f"{row['workers']}" if row["workers"] else "0 (threads)",
            f"{row['images_per_second']:,}",
            f"{row['start_seconds']} s",
            "" if busy is None else f"{busy} us",
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
