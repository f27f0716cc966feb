"""What releasing gradients costs: step and compile time of the layered step on a CPU.

    python -m experiments.bench.layered

Times a GPT and a ViT, float32 AdamW on one CPU device, by the layered step and by the
plain step with the same recompute, in interleaved pairs; then with exact clipping. And
compiles 12 and 48 layers. Writes JSON and a table.
"""

import dataclasses
import functools
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import sfpo_jax as sfpo
from experiments.bench.memory_programs import layered, scanned
from experiments.models.gpt import GPTConfig
from experiments.models.layered import Layered, layered_gpt, layered_vit
from experiments.models.vit import ViTConfig
from sfpo_jax.training import exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.layered"


@dataclasses.dataclass(frozen=True)
class Options:
    """How often, and where to."""

    pairs: int = 20
    """Pairs of steps timed one after the other."""
    out: str = "docs/results/layered.json"
    """The file of results; the table lies beside it."""


class Case(NamedTuple):
    """A model and a batch of it."""

    name: str
    make: Callable[[], Layered]
    batch: Any


def gpt_case(depth: int, width: int, length: int, rows: int) -> Case:
    """A GPT on random tokens."""
    config = GPTConfig(
        vocabulary=256,
        length=length,
        width=width,
        depth=depth,
        heads=width // 32,
        mlp_width=4 * width,
        attention="xla",
    )
    ids = np.random.default_rng(0).integers(0, 256, (rows, length + 1))
    batch = ids.astype(np.int32)
    name = f"GPT, {depth} x {width}, {rows} x {length} tokens"
    return Case(name, functools.partial(layered_gpt, config), batch)


def vit_case() -> Case:
    """A ViT on random images."""
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        width=192,
        depth=6,
        heads=6,
        mlp_width=768,
        classes=10,
        attention="xla",
    )
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.normal(size=(16, 32, 32, 3)).astype(np.float32),
        "label": rng.integers(0, 10, 16).astype(np.int32),
    }
    name = "ViT, 6 x 192, 16 x 65 tokens"
    return Case(name, functools.partial(layered_vit, config), batch)


def adamw() -> optax.GradientTransformation:
    """The same for all."""
    return optax.adamw(1e-4)


class Runner:
    """A step and its state."""

    def __init__(self, build: Callable[..., Any], case: Case) -> None:
        mesh = sfpo.make_mesh(devices=jax.devices()[:1])
        self._step = build(mesh)[0]
        params = case.make().init(jax.random.key(0))
        self._state = self._step.init(params)
        self._batch = self._step.shard_batch(case.batch)
        for _ in range(2):
            self.seconds()

    def seconds(self) -> float:
        """Wall time of one step."""
        began = time.perf_counter()
        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - began


def compare(case: Case, pairs: int) -> dict[str, Any]:
    """Ratios of the layered step's time to the plain one's, plain and clipped."""
    plain = Runner(scanned(case.make, case.batch, adamw, recompute=True), case)
    made = functools.partial(layered, case.make, case.batch, adamw, jnp.float32)
    contenders = {
        "layered": Runner(made(), case),
        "clipped": Runner(made(max_norm=1.0), case),
    }
    found: dict[str, list[float]] = {"plain": [], "layered": [], "clipped": []}
    for _ in range(pairs):
        found["plain"].append(plain.seconds())
        for name, runner in contenders.items():
            found[name].append(runner.seconds())
    row: dict[str, Any] = {"case": case.name, "pairs": pairs}
    for name, seconds in found.items():
        row[f"{name}_seconds"] = float(np.median(seconds))
    for name in contenders:
        ratios = np.array(found[name]) / np.array(found["plain"])
        low, high = median_interval(ratios)
        row[name] = {"ratio": float(np.median(ratios)), "low": low, "high": high}
    return row


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    draws = rng.choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(low), float(high)


def compile_seconds(depth: int) -> float:
    """Lowering and compiling the layered step of a GPT of this depth."""
    case = gpt_case(depth, 64, 32, 2)
    mesh = sfpo.make_mesh(devices=jax.devices()[:1])
    build = layered(case.make, case.batch, adamw, jnp.float32, max_norm=1.0)
    step, state, batch = build(mesh)
    began = time.perf_counter()
    step.lower(state, batch).compile()
    return time.perf_counter() - began


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "One CPU device, float32 AdamW, every block recomputed; medians of "
        f"{result['steps'][0]['pairs']} interleaved",
        "pairs, ratios to the plain step with their 95 % bootstrap intervals.",
        "",
        "| model | plain step | layered step | ratio | with exact clipping, ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in result["steps"]:
        ratios = [
            f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
            for r in (row["layered"], row["clipped"])
        ]
        lines.append(
            f"| {row['case']} | {1e3 * row['plain_seconds']:.0f} ms | "
            f"{1e3 * row['layered_seconds']:.0f} ms | {ratios[0]} | {ratios[1]} |"
        )
    shallow, deep = (result["compile_seconds"][k] for k in ("12", "48"))
    lines += [
        "",
        f"Compiling takes {shallow:.1f} s for 12 layers and {deep:.1f} s for 48: "
        f"{deep / shallow:.2f} times.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measures and writes.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status, 0.

    Raises:
      SystemExit: with status 2 for options that cannot be used, 0 after `--help`.
    """
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(),
            argv,
            prog=PROGRAM,
            description="Times the layered step against the plain one.",
        )
    result: dict[str, Any] = {"machine": platform.machine(), "jax": jax.__version__}
    # The first of a process also pays for what all share.
    compile_seconds(2)
    times = {depth: [compile_seconds(depth) for _ in range(3)] for depth in (12, 48)}
    result["compile_seconds"] = {str(d): float(np.median(t)) for d, t in times.items()}
    cases = (gpt_case(6, 256, 128, 8), vit_case())
    result["steps"] = [compare(case, options.pairs) for case in cases]
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    Console().print(markdown(result), markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
