"""An estimate of a step's time from arithmetic and bandwidth; nothing is measured.

Two ways to train a GPT on eight A100s. Pure data parallelism: whole gradients in
float32, summed by a ring after the backward pass, nothing hidden. Three levels:
operators split over `op` ranks, signs between the others under the backward pass.
Elementwise work, the optimizer's own passes over memory, latencies and the encoding of
signs count as nothing in either, which favours the second.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.models.gpt import GPTConfig
from experiments.models.layered import layered_gpt
from sfpo_jax.memory import count_flops

GPUS = 8
PEAK = 312e12  # FLOP/s of an A100 in bfloat16, dense (NVIDIA's data sheet)
EFFICIENCY = 0.5  # share of it that large products reach; 0.4 to 0.6 are usual
LINKS = {"NVLink": 300e9, "PCIe": 25e9}  # bytes/s that one GPU sends
HALF = 2  # bytes of an activation
PAYLOAD = 1 / 8 + 4 / 2048  # bytes of a sign and its part of a block's scale
PIECES = 8  # of a product; a rank sends (op - 1) / op of them
TURNS = 2  # layers whose signs are still on their way when the backward loop ends
BACKWARD = 3 / 4  # of the arithmetic, layers computed again included
# The cut side of the kernels multiplied while one ring turns, in widths of the model:
# twice forward, for layers are computed again, then back. A product cut by rows has
# one ring back under two products, one by columns two under one each.
RINGS = (3, 1, 4, 4) * 2 + (2 * 1, 2 * 4, 3, 3, 4, 4)


class Load(NamedTuple):
    """What one GPU has to do in a step, its share of the batch being `rows`."""

    name: str
    flops: float
    layer_params: int  # of all layers
    outer_params: int
    depth: int
    width: int
    tokens: int  # of its share


class Estimate(NamedTuple):
    """Seconds of a step."""

    arithmetic: float
    transfers: float  # all, hidden or not
    exposed: float  # those that the GPU waits for

    @property
    def step(self) -> float:
        return self.arithmetic + self.exposed

    @property
    def share(self) -> float:
        return self.exposed / self.step


def load_of(name: str, config: GPTConfig, rows: int) -> Load:
    """Counts a GPT's step in its jaxpr, every layer computed twice.

    Args:
      name: what the table calls it.
      config: the model.
      rows: sequences of one GPU.
    """
    made = layered_gpt(config)
    model: Any = made.model
    block = jax.checkpoint(model.block)

    def loss(params: Any, batch: Any) -> Any:
        x = model.embed(params["outer"], batch, None)
        x, _ = lax.scan(lambda x, w: (block(w, x, None), None), x, params["layers"])
        return model.loss(params["outer"], x, batch, None)[0]

    params = jax.eval_shape(made.init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((rows, config.length + 1), jnp.int32)
    flops = count_flops(jax.make_jaxpr(jax.grad(loss))(params, batch)).total
    sizes = {k: sum(x.size for x in jax.tree.leaves(v)) for k, v in params.items()}
    tokens = rows * config.length
    layers, outer = sizes["layers"], sizes["outer"]
    return Load(name, flops, layers, outer, config.depth, config.width, tokens)


def pure_data(load: Load, bandwidth: float) -> Estimate:
    """All gradients in float32 after the backward pass."""
    params = load.layer_params + load.outer_params
    seconds = 2 * (GPUS - 1) / GPUS * 4 * params / bandwidth
    return Estimate(load.flops / (PEAK * EFFICIENCY), seconds, seconds)


def three_levels(load: Load, bandwidth: float, op: int) -> Estimate:
    """Operators over `op` ranks, one bit between the GPUS / op others, overlapped."""
    arithmetic = load.flops / (PEAK * EFFICIENCY)
    data = GPUS // op
    to_bits = 2 * (data - 1) / data * PAYLOAD / bandwidth
    layer = to_bits * load.layer_params / op / load.depth
    outer = to_bits * load.outer_params
    looped = (load.depth - TURNS) * layer
    exposed = outer + TURNS * layer + max(0.0, looped - BACKWARD * arithmetic)
    transfers = outer + load.depth * layer
    if op > 1:
        # Its ranks share the tokens of op GPUs.
        ring = (op - 1) / op * op * load.tokens * load.width * HALF / bandwidth
        permutes = PIECES * (op - 1) // op
        for side in RINGS:
            # Of op GPUs' tokens by 1 / op of the kernel.
            product = 2 * load.tokens * load.width * side * load.width
            product /= PEAK * EFFICIENCY
            # The last piece of a ring has no product to run under.
            exposed += load.depth * (max(0.0, ring - product) + ring / permutes)
            transfers += load.depth * ring
    return Estimate(arithmetic, transfers, max(exposed, transfers - arithmetic))


def bandwidth_where(reached: Callable[[float], bool]) -> float | None:
    """The highest bandwidth, bytes/s, at which something holds that holds below it.

    None where it does not hold anywhere from 0.01 to 1,000 GB/s.
    """
    low, high = 1e7, 1e12
    if not reached(low):
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if reached(middle) else (low, middle)
    return low


def estimates(load: Load) -> dict[str, Any]:
    """All that the table says of one model."""
    rows = []
    for link, bandwidth in LINKS.items():
        base = pure_data(load, bandwidth)
        ways = {"data 8, float32": base}
        ways |= {
            f"data {GPUS // op}, op {op}, one bit": three_levels(load, bandwidth, op)
            for op in (1, 2, 4)
        }
        for way, found in ways.items():
            row = {"link": link, "way": way, **found._asdict()}
            row |= {"step": found.step, "share": found.share}
            rows.append(row | {"speedup": base.step / found.step})

    def speedup(bandwidth: float) -> float:
        ways = [three_levels(load, bandwidth, op).step for op in (1, 2, 4)]
        return pure_data(load, bandwidth).step / min(ways)

    return {
        "load": load._asdict(),
        "rows": rows,
        "bandwidth_3.8": bandwidth_where(lambda b: speedup(b) >= 3.8),
        "bandwidth_35": bandwidth_where(lambda b: pure_data(load, b).share >= 0.35),
    }
