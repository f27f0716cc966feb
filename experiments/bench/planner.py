"""Does a program take the memory that was planned for it?

    python -m experiments.bench.planner

Plans a transformer's AdamW step for the CPU of this machine, once with all activations
kept and once with every block recomputed, runs each, and compares the plan with the
highest memory the kernel saw. Only the CPU's plans can be checked on a machine without
a GPU; those for GPUs come from the same reading of the other compiler's assignment.
Linux only: it reads and resets the high-water mark in /proc.
"""

import ctypes
import dataclasses
import gc
import json
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import sfpo_jax as sfpo
from sfpo_jax.training import exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.planner"


@dataclasses.dataclass(frozen=True)
class Options:
    """The model and where the numbers go."""

    width: int = 1024
    """Channels; a head has 64."""
    layers: int = 6
    """Blocks, stacked."""
    length: int = 512
    """Tokens a sequence."""
    batch: int = 4
    """Sequences."""
    vocabulary: int = 8192
    """Tokens there are."""
    out: str = "docs/results/planner.json"
    """The file of results."""


def parameter_shapes(options: Options) -> dict[str, Any]:
    """Shapes of the weights, blocks stacked."""
    depth, width = options.layers, options.width
    sizes = {
        "embed": (options.vocabulary, width),
        "qkv": (depth, width, 3 * width),
        "out": (depth, width, width),
        "up": (depth, width, 4 * width),
        "down": (depth, 4 * width, width),
    }
    return {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in sizes.items()}


def block(x_BxLxD: Any, weights: dict[str, Any]) -> tuple[Any, None]:
    """Attention and a feed-forward part, without a mask: only bytes matter here."""
    scale = jax.lax.rsqrt(jnp.mean(x_BxLxD**2, axis=-1, keepdims=True) + 1e-6)
    parts = jnp.split((x_BxLxD * scale) @ weights["qkv"], 3, axis=-1)
    q, k, v = (part.reshape(*part.shape[:2], -1, 64) for part in parts)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x_BxLxD.shape)
    x_BxLxD = x_BxLxD + mixed @ weights["out"]
    return x_BxLxD + jax.nn.gelu(x_BxLxD @ weights["up"]) @ weights["down"], None


def make_step(recompute: bool) -> tuple[Any, optax.GradientTransformation]:
    """A jitted AdamW step that updates parameters and states in place."""
    tx = optax.adamw(1e-3)
    layer = jax.checkpoint(block) if recompute else block

    def loss_fn(params: dict[str, Any], tokens: Any) -> Any:
        stacked = {k: w for k, w in params.items() if k != "embed"}
        x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], stacked)
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    def step(params: Any, opt_state: Any, tokens: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1)), tx


def resident(field: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most since the last reset."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def run_peak(compiled: Any, shapes: Sequence[Any]) -> int:
    """Bytes that the arguments and one run of a compiled program add at most."""
    gc.collect()
    # What the compiler freed would otherwise be taken again and not be seen.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    # NumPy's memory could not be donated, and the step would copy it.
    make = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.full(x.shape, 0, x.dtype), tuple(shapes))
    )
    arrays = jax.block_until_ready(make())
    Path("/proc/self/clear_refs").write_text("5")
    jax.block_until_ready(compiled(*arrays))
    return resident("VmHWM") - before


def main(argv: Sequence[str]) -> int:
    """Plans, runs, prints and writes the comparison.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status, 0.
    """
    console = Console()
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(), argv, prog=PROGRAM, description="Checks plans by running them."
        )
    params = parameter_shapes(options)
    tokens = jax.ShapeDtypeStruct((options.batch, options.length + 1), jnp.int32)
    rows: dict[str, Any] = {}
    for name, recompute in (("stored", False), ("recomputed", True)):
        step, tx = make_step(recompute)
        shapes = (params, jax.eval_shape(tx.init, params), tokens)
        plan = sfpo.plan(step, *shapes, compiler="cpu", cache=False)
        peak = run_peak(step.lower(*shapes).compile(), shapes)
        ratio = peak / plan.total_bytes
        rows[name] = {"planned": plan.total_bytes, "measured": peak, "ratio": ratio}
        console.print(
            f"{name}: planned {plan.total_bytes / 1e9:.3f} GB, measured "
            f"{peak / 1e9:.3f} GB, ratio {ratio:.3f}"
        )
    results = {"options": dataclasses.asdict(options), "jax": jax.__version__}
    results |= {"machine": platform.machine(), "programs": rows}
    Path(options.out).write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
