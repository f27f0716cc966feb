"""What the planned programs and the native kernels do on a real GPU.

    python -m experiments.bench.gpu --part memory
    python -m experiments.bench.gpu --part kernels

The first trains GPT-3 13B under a limit of 80 GB, and ViT-L/16 by dense AdamW and by
the layered step at the same batch, each in a process of its own: step time, tokens or
images a second, share of the card's arithmetic, and the peak of memory beside the
planned one.
The second compares each kernel with its jnp twin, and its time with that of a copy.
Five minutes at most each; needs jax with CUDA, flax, optax and numpy. Without a GPU it
shows that the programs compile for one, which needs the extra `plan`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sfpo_jax as sfpo
from experiments.bench import gpu_kernels
from experiments.bench.memory_programs import (
    SAVED,
    Program,
    gpt,
    images_of,
    layered,
    layered_gpt_step,
    unrolled_vit,
)
from experiments.models.layered import layered_vit
from experiments.models.vit import ViTConfig

PROGRAM = "python -m experiments.bench.gpu"
LIMIT = 80e9
# Dense products in bfloat16 with float32 sums, by the makers' data sheets; FLOP/s.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
_WARM, _STEPS = 2, 5
_VIT_BATCH = 64

Row = dict[str, Any]


def programs() -> dict[str, Program]:
    """What is run, by name."""
    vit = ViTConfig(attention="xla", dtype="bfloat16")
    batch = images_of(vit, _VIT_BATCH)
    return {
        p.name: p
        for p in (
            Program(
                "gpt_13b",
                "GPT-3 13B, 1 x 2048 tokens, 80 GB",
                layered_gpt_step(gpt(), 1),
            ),
            Program(
                "gpt_13b_batch_4",
                "GPT-3 13B, 4 x 2048 tokens, 80 GB",
                layered_gpt_step(gpt(), 4),
            ),
            Program(
                "vit_l_dense",
                f"ViT-L/16, batch {_VIT_BATCH}, bfloat16: `optax.adamw`",
                unrolled_vit(vit, batch),
            ),
            Program(
                "vit_l",
                f"ViT-L/16, batch {_VIT_BATCH}, bfloat16: layered, `adamw8bit`",
                layered(
                    lambda: layered_vit(vit),
                    batch,
                    lambda: sfpo.adamw8bit(1e-4, weight_decay=0.1),
                    jnp.float32,
                    recompute=SAVED,
                ),
            ),
        )
    }


def run(program: Program) -> Row:
    """Trains a few steps on the first device, in this process."""
    device = jax.devices()[0]
    step, shapes, batch = program.build(sfpo.make_mesh(devices=[device]))
    stats = step.lower(shapes, batch).compile().memory_analysis()
    planned = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    planned += stats.output_size_in_bytes - stats.alias_size_in_bytes
    params = jax.jit(lambda: jax.tree.map(_random, shapes.params))()
    state = step.init(params)
    del params
    batch = step.shard_batch(jax.tree.map(_zeros, batch))
    seconds, losses = [], []
    for _ in range(_WARM + _STEPS):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
        losses.append(float(metrics["loss"]))
    rows, length = _size(batch)
    weights = sum(x.size for x in jax.tree.leaves(state.params))
    used = device.memory_stats() or {}
    median = float(np.median(seconds[_WARM:]))
    peak = next((f for n, f in PEAKS.items() if n in device.device_kind), None)
    # What the model needs, recomputation not counted: 6 a weight and token.
    needed = 6 * weights * rows * length
    return {
        "title": program.title,
        "device": device.device_kind,
        "step_seconds": median,
        "rows_per_second": rows / median,
        "tokens_per_second": rows * length / median,
        "mfu": needed / median / peak if peak else None,
        "planned_bytes": planned,
        "peak_bytes": used.get("peak_bytes_in_use"),
        "loss": losses[-1],
    }


def compile_only(program: Program) -> Row:
    """Plans for an A100 in place of running."""
    began = time.perf_counter()
    plan = sfpo.plan(program.build, mesh_shape=program.mesh_shape, compiler="gpu")
    seconds = time.perf_counter() - began
    return {
        "title": program.title,
        "device": f"{plan.device}, compiled only",
        "planned_bytes": plan.total_bytes,
        "compile_seconds": seconds,
    }


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| program | device | step | rows/s | tokens/s | MFU | planned | peak |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["title"], row.get("device", "")]
        if "problem" in row:
            lines.append(f"| {row['title']} | {row['problem']} | | | | | | |")
            continue
        if "step_seconds" in row:
            mfu = f"{row['mfu']:.1%}" if row["mfu"] else ""
            cells += [
                f"{1e3 * row['step_seconds']:.0f} ms",
                f"{row['rows_per_second']:.1f}",
                f"{row['tokens_per_second']:.0f}",
                mfu,
            ]
        else:
            cells += [""] * 4
        peak = row.get("peak_bytes")
        cells.append(f"{row['planned_bytes'] / 1e9:.2f} GB")
        cells.append(f"{peak / 1e9:.2f} GB" if peak else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Runs or compiles every program and writes JSON and a table.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status: 0, or 1 where a program failed.

    Raises:
      SystemExit: with status 2 for options that cannot be used, 0 after `--help`.
    """
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--part", choices=["memory", "kernels"], default="memory")
    parser.add_argument("--out", help="default: docs/results/gpu_PART.json")
    parser.add_argument("--only", help="one program, in this process; prints JSON")
    options = parser.parse_args(argv)
    memory = _gpu_memory()
    if options.part == "kernels":
        rows = gpu_kernels.rows(has_gpu=memory is not None)
        table = gpu_kernels.markdown(rows)
    else:
        known = programs()
        if options.only:
            print(json.dumps(run(known[options.only])))
            return 0
        rows = [
            compile_only(program) if memory is None else _apart(program, memory)
            for program in known.values()
        ]
        table = markdown(rows)
    out = Path(options.out or f"docs/results/gpu_{options.part}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(table, encoding="utf-8")
    print(table)
    return int(any("problem" in row for row in rows))


def _apart(program: Program, memory: float) -> Row:
    """`run` in a process that may take 80 GB, its peak its own."""
    share = min(0.95, LIMIT / memory)
    environment = os.environ | {"XLA_CLIENT_MEM_FRACTION": f"{share:.4f}"}
    command = [sys.executable, "-m", "experiments.bench.gpu", "--only", program.name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return {"title": program.title, "problem": last[:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _gpu_memory() -> float | None:
    """Bytes of the first GPU, None without one; JAX must not start in this process."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return float(done.stdout.split()[0]) * 2**20


def _random(x: Any) -> jax.Array:
    return (0.02 * jax.random.normal(jax.random.key(0), x.shape)).astype(x.dtype)


def _zeros(x: Any) -> np.ndarray:
    return np.zeros(x.shape, x.dtype)


def _size(batch: Any) -> tuple[int, int]:
    """(rows, tokens a row) of windows or of images cut into patches of 16."""
    if isinstance(batch, dict):
        return batch["label"].shape[0], (batch["image"].shape[1] // 16) ** 2 + 1
    return batch.shape[0], batch.shape[1] - 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
