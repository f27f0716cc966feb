"""The contenders of `bench.kernels`: a native kernel, its twin, a user's own code."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.contender import Contender, Run, in_place, normal, twin
from experiments.bench.select_cases import SELECT_CASES
from sfpo_jax.collectives import plan_buckets
from sfpo_jax.compression import sign
from sfpo_jax.kernels import (
    AdamFactors,
    AdamwNumbers,
    Bucket,
    adamw8bit_parameters,
    encode_signs,
    make_seed,
    onebit_apply,
    quantize,
    serve_signs,
)

_FACTORS = AdamFactors(0.5, 0.1, 1e-8, 0.01)


def _arrays(size: int, count: int) -> list[jax.Array]:
    """Random arrays, the last of squares."""
    found = [jnp.asarray(normal(size, seed)) for seed in range(count)]
    return [*found[:-1], jnp.square(found[-1]) + 1e-6]


def _bucket(size: int) -> Bucket:
    (bucket,) = plan_buckets([size], sign(), 1, size)
    return bucket


def encode(size: int) -> Run:
    """Gradient, momentum and error to bits and a new error, in place."""
    bucket, (x, m, e, v) = _bucket(size), _arrays(size, 4)

    def step(error: Any, x: Any, m: Any, v: Any) -> Any:
        found = encode_signs(
            bucket, [x], momentum=[m], b1=0.9, error=[error], variance=[v]
        )
        return found.error[0], (found.signs, found.live, found.scales)

    return in_place(step, e, x, m, v)


def encode_sum(size: int) -> Run:
    """Input and worker error alone: what `compressed_mean` sends."""
    bucket, (x, e) = _bucket(size), _arrays(size, 2)

    def step(error: Any, x: Any) -> Any:
        found = encode_signs(bucket, [x], error=[error])
        return found.error[0], (found.signs, found.scales)

    return in_place(step, e, x)


def encode_numpy(size: int) -> Run:
    """The sum's signs, scales and error as NumPy does them, in one thread."""
    x, e = normal(size), normal(size, 1)
    width = 2048
    rows = size // width

    def run() -> None:
        np.add(e, x, out=e)
        blocks = e[: rows * width].reshape(rows, width)
        scales = np.abs(blocks).mean(1)
        np.packbits(np.signbit(blocks), axis=1, bitorder="little")
        blocks -= np.copysign(scales[:, None], blocks)

    return run


def _served(size: int, ranks: int) -> tuple[Bucket, Any, Any, Any, Any]:
    bucket = _bucket(size)
    group = max(bucket.groups, key=lambda group: group.rows)
    bucket = Bucket(bucket.leaves, bucket.sizes, (group,))
    rng = np.random.default_rng(0)
    signs = rng.integers(0, 256, (ranks * group.rows, group.width // 8), np.uint8)
    live = np.full((group.rows, group.width // 8), 255, np.uint8)
    scales = rng.random(ranks * group.rows, np.float32)
    error = rng.standard_normal((group.rows, group.width), np.float32)
    return bucket, *map(jnp.asarray, (signs, scales, live, error))


def serve(size: int) -> Run:
    """What two ranks have sent, and the server's error, to bits and a new error."""
    bucket, signs, scales, live, error = _served(size, 2)

    def step(error: Any, signs: Any, scales: Any, live: Any) -> Any:
        found = serve_signs(bucket, [signs], [scales], [live], [error], 2, 1.0)
        return found.error[0], (found.signs, found.scales)

    return in_place(step, error, signs, scales, live)


def onebit(size: int) -> Run:
    """The update of 1-bit Adam from packed momentum, parameters in place."""
    bucket, (p, v) = _bucket(size), _arrays(size, 2)
    sent = jax.jit(lambda x: encode_signs(bucket, [x]))(p)

    def step(p: Any, v: Any, signs: Any, scales: Any) -> Any:
        new, _ = onebit_apply(
            bucket,
            signs,
            scales,
            [v],
            [p],
            _FACTORS,
            1e-3,
            0.1,
            (True,),
            has_momentum=False,
        )
        return new[0], None

    return in_place(step, p, v, sent.signs, sent.scales)


def exchange(size: int) -> Run:
    """Encode, serve (one rank) and update: all of a compressed step but the wire."""
    bucket, (x, m, e, v) = _bucket(size), _arrays(size, 4)
    server = [jnp.zeros((g.rows, g.width)) for g in bucket.groups]

    def step(state: Any, x: Any, v: Any) -> Any:
        p, m, e, server = state
        sent = encode_signs(bucket, [x], momentum=[m], b1=0.9, error=[e], variance=[v])
        reply = serve_signs(bucket, sent.signs, sent.scales, sent.live, server, 1, 1.0)
        new, mu = onebit_apply(
            bucket, reply.signs, reply.scales, [v], [p], _FACTORS, 1e-3, 0.1, (True,)
        )
        return (new[0], mu[0], sent.error[0], list(reply.error)), None

    return in_place(step, (jnp.array(x), m, e, server), x, v)


def one_byte(size: int) -> Run:
    """AdamW with moments of one byte, parameters in place."""
    p, g = (x.reshape(-1, 1000) for x in _arrays(size, 2))
    zeros = jnp.zeros_like(p)
    mu, nu = quantize(zeros), quantize(zeros, signed=False)
    numbers = AdamwNumbers(0.9, 0.999, 0.5, 1e-8, 1e-3, 0.1)

    def step(state: Any, g: Any) -> Any:
        p, mu, nu = state
        found = adamw8bit_parameters(
            [g],
            [mu],
            [nu],
            [p],
            numbers,
            make_seed(jnp.int32(1)),
            jnp.array(True),
            is_decayed=(True,),
        )
        return (found.values[0], found.mu[0], found.nu[0]), None

    return in_place(step, (p, mu, nu), g)


def optax_adamw(size: int) -> Run:
    """`optax.adamw` and `apply_updates`, fused by XLA, everything donated."""
    p, g = _arrays(size, 2)
    tx = optax.adamw(1e-3, weight_decay=0.1)

    def step(state: Any, g: Any) -> Any:
        p, held = state
        updates, held = tx.update(g, held, p)
        return (optax.apply_updates(p, updates), held), None

    return in_place(step, (p, tx.init(p)), g)


def torch_adamw(size: int) -> Run | None:
    """PyTorch's fused AdamW on the CPU, where PyTorch is installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch: Any = importlib.import_module("torch")
    p = torch.nn.Parameter(torch.from_numpy(normal(size)))
    p.grad = torch.from_numpy(normal(size, 1))
    optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1, fused=True)
    return optimizer.step


CASES: dict[str, list[Contender]] = {
    **SELECT_CASES,
    "sign encode": [
        Contender("native: x + e", encode_sum),
        Contender("jnp twin: x + e", twin(encode_sum)),
        Contender("NumPy: x + e", encode_numpy),
        Contender("native: b1 m + (1 - b1) x + e", encode),
        Contender("jnp twin: b1 m + (1 - b1) x + e", twin(encode)),
    ],
    "server": [Contender("native", serve), Contender("jnp twin", twin(serve))],
    "1-bit update": [
        Contender("native", onebit),
        Contender("jnp twin", twin(onebit)),
        Contender("optax.adamw", optax_adamw),
        Contender("torch.optim.AdamW, fused", torch_adamw),
    ],
    "one-byte AdamW update": [
        Contender("native", one_byte),
        Contender("jnp twin", twin(one_byte)),
        Contender("optax.adamw", optax_adamw),
        Contender("torch.optim.AdamW, fused", torch_adamw),
    ],
    "encode, server and update": [
        Contender("native", exchange),
        Contender("jnp twin", twin(exchange)),
        Contender("optax.adamw", optax_adamw),
    ],
}
