"""Does a program take the memory that was planned for it?

    python -m experiments.bench.planner

Plans AdamW steps of a transformer and of ResNet-50 for the CPU of this machine, once
with all activations kept and once with every block recomputed, runs each in a process
of its own, and compares the plan with the highest memory the kernel saw. Only the CPU's
plans can be checked on a machine without a GPU; those for GPUs come from the same
reading of the other compiler's assignment. Linux only: it reads and resets the
high-water mark in /proc.
"""

import ctypes
import dataclasses
import gc
import json
import multiprocessing
import platform
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import sfpo_jax as sfpo
from experiments.models.resnet import ResNetConfig, make_classifier
from sfpo_jax.training import exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.planner"


Name = Literal["stored", "recomputed", "resnet50_stored", "resnet50_recomputed"]


class Case(NamedTuple):
    """A jitted step and the shapes of its arguments."""

    step: Any
    shapes: tuple[Any, ...]


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
    images: int = 16
    """Images of the ResNet-50."""
    image_size: int = 224
    """Pixels along each side of one."""
    only: Name | Literal["all"] = "all"
    """One program, or all."""
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


def transformer(options: Options, recompute: bool) -> Case:
    """The step of the transformer."""
    layer = jax.checkpoint(block) if recompute else block

    def loss_fn(params: dict[str, Any], tokens: Any) -> Any:
        stacked = {k: w for k, w in params.items() if k != "embed"}
        x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], stacked)
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    tokens = jax.ShapeDtypeStruct((options.batch, options.length + 1), jnp.int32)
    return adamw_case(loss_fn, parameter_shapes(options), tokens)


def resnet50(options: Options, recompute: bool) -> Case:
    """The step of ResNet-50; the running statistics of a step are dropped."""
    net = make_classifier(ResNetConfig(), recompute="full" if recompute else "none")
    params, stats = jax.eval_shape(net.init, jax.random.key(0))

    def loss_fn(params: Any, batch: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)
        return net.loss_fn(params, batch, model_state=zeros)[0]

    side = options.image_size
    batch = {
        "image": jax.ShapeDtypeStruct((options.images, side, side, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((options.images,), jnp.int32),
    }
    return adamw_case(loss_fn, params, batch)


def adamw_case(loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> Case:
    """A step that updates parameters and states in place, and its arguments' shapes."""
    tx = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    shapes = (params, jax.eval_shape(tx.init, params), batch)
    return Case(jax.jit(step, donate_argnums=(0, 1)), shapes)


CASES: dict[Name, Callable[[Options], Case]] = {
    "stored": partial(transformer, recompute=False),
    "recomputed": partial(transformer, recompute=True),
    "resnet50_stored": partial(resnet50, recompute=False),
    "resnet50_recomputed": partial(resnet50, recompute=True),
}


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
    names = list(CASES) if options.only == "all" else [options.only]
    out = Path(options.out)
    rows: dict[str, Any] = {}
    if options.only != "all" and out.exists():
        rows = json.loads(out.read_text())["programs"]
    for name in names:
        # What one program leaves behind would be taken again by the next.
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(1) as pool:
            rows[name] = pool.apply(measure, (name, options))
        row = rows[name]
        console.print(
            f"{name}: planned {row['planned'] / 1e9:.3f} GB, measured "
            f"{row['measured'] / 1e9:.3f} GB, ratio {row['ratio']:.3f}"
        )
    results = {"options": dataclasses.asdict(options), "jax": jax.__version__}
    results |= {"machine": platform.machine(), "programs": rows}
    out.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def measure(name: Name, options: Options) -> dict[str, Any]:
    """Plans and runs one program."""
    step, shapes = CASES[name](options)
    plan = sfpo.plan(step, *shapes, compiler="cpu", cache=False)
    peak = run_peak(step.lower(*shapes).compile(), shapes)
    ratio = peak / plan.total_bytes
    return {"planned": plan.total_bytes, "measured": peak, "ratio": ratio}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
