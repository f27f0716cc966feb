"""Narrow states in NumPy float64, written from the equations of their docstrings.

Nothing here is imported from the package, as in `tests.oracle`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_MASK = 0xFFFFFFFF


def finalise(x: Any) -> Any:
    """MurmurHash3's, of Python integers or uint64 arrays of 32-bit numbers."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def random_bits(words: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """32 bits for each entry, from its number and a seed of words."""
    seeds = []
    for start in (0x9E3779B9, 0x7F4A7C15):
        seed = start
        for word in words:
            seed = (finalise(seed ^ (word & _MASK)) + start) & _MASK
        seeds.append(seed)
    number = np.arange(int(np.prod(shape)), dtype=np.uint64) & np.uint64(_MASK)
    return finalise(finalise(number ^ seeds[0]) ^ seeds[1]).reshape(shape)


def random_units(words: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Of [0, 1), from the upper 24 bits."""
    return (random_bits(words, shape) >> np.uint64(8)) / 2.0**24


def block_size(n: int) -> int:
    """256, or what divides the axis if it is long enough."""
    if n <= 256:
        return n
    divisors = [d for d in range(32, 257) if n % d == 0]
    return max(divisors, default=256)


class Bytes(NamedTuple):
    """One byte an entry and one scale a block of the last axis."""

    values: np.ndarray
    scales: np.ndarray


def quantize(
    x: np.ndarray, signed: bool = True, chance: np.ndarray | None = None
) -> Bytes:
    """`chance` in [0, 1) of each entry: rounded up where the remainder is above it."""
    x = x.astype(np.float64)
    width = block_size(x.shape[-1])
    values, scales = [], []
    for start in range(0, x.shape[-1], width):
        here = np.s_[..., start : start + width]
        power = 0.5 if signed else 0.25
        block = np.sign(x[here]) * np.abs(x[here]) ** power
        scale = np.abs(block).max(axis=-1, keepdims=True) / (127 if signed else 255)
        units = block / np.where(scale > 0, scale, 1)
        if signed or chance is None:
            units = np.rint(units)
        else:
            units = np.floor(units + chance[here])
        if not signed:
            units = np.minimum(np.maximum(units, x[here] > 0), 255)
        values.append(units)
        scales.append(scale)
    return Bytes(np.concatenate(values, -1), np.concatenate(scales, -1))


def dequantize(kept: Bytes, signed: bool = True) -> np.ndarray:
    """The array again."""
    width = block_size(kept.values.shape[-1])
    scales = np.repeat(kept.scales, width, axis=-1)[..., : kept.values.shape[-1]]
    roots = kept.values * scales
    return roots * np.abs(roots) if signed else roots**4


def is_quantized(shape: tuple[int, ...]) -> bool:
    """Arrays of 4,096 entries in rows of 16."""
    return int(np.prod(shape)) >= 4096 and shape[-1] >= 16


class Adamw8bit:
    """AdamW, bias-corrected, its moments rounded to bytes between the steps."""

    def __init__(
        self,
        params: Sequence[np.ndarray],
        learning_rate: Callable[[int], float],
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decayed: Sequence[bool] | None = None,
        nu: str = "int8",
    ) -> None:
        self.params = [p.astype(np.float64) for p in params]
        self.m: list[Any] = [np.zeros(p.shape) for p in params]
        self.v: list[Any] = [np.zeros(p.shape) for p in params]
        # Of the moments as they are kept.
        self.bytes: list[Any] = [None] * len(params)
        self.factors: list[Any] = [(0.0, 0.0)] * len(params)
        self.rate, self.b1, self.b2, self.eps = learning_rate, b1, b2, eps
        self.decay = [weight_decay * on for on in (decayed or [True] * len(params))]
        self.count, self.nu = 0, nu

    def step(self, grads: Sequence[np.ndarray]) -> None:
        rate = self.rate(self.count)
        self.count = t = self.count + 1
        for i, g in enumerate(grads):
            g = g.astype(np.float64)
            m = self.b1 * self.m[i] + (1 - self.b1) * g
            v = self.b2 * self.v[i] + (1 - self.b2) * g * g
            is_factored = self.nu == "factored" and g.ndim >= 2 and g.size >= 4096
            if is_factored:
                v = self._factored(i, g)
            m_hat, v_hat = m / (1 - self.b1**t), v / (1 - self.b2**t)
            direction = np.where(v > 0, m_hat / (np.sqrt(v_hat) + self.eps), 0.0)
            if is_factored:
                direction = np.clip(direction, -1, 1)
            p = self.params[i]
            self.params[i] = p - rate * (direction + self.decay[i] * p)
            self.m[i], self.v[i] = m, v
            if is_quantized(g.shape):
                self._round(i, m, v)

    def _factored(self, i: int, g: np.ndarray) -> np.ndarray:
        r, c = self.factors[i]
        r = self.b2 * r + (1 - self.b2) * (g**2).mean(axis=-1)
        c = self.b2 * c + (1 - self.b2) * (g**2).mean(axis=-2)
        self.factors[i] = (r, c)
        mean = r.mean(axis=-1)[..., None, None]
        outer = r[..., :, None] * c[..., None, :]
        return np.divide(outer, mean, out=np.zeros_like(outer), where=mean > 0)

    def _round(self, i: int, m: np.ndarray, v: np.ndarray) -> None:
        mu = quantize(m)
        self.m[i], nu = dequantize(mu), None
        if self.nu == "int8":
            nu = quantize(v, False, random_units([self.count], v.shape))
            self.v[i] = dequantize(nu, False)
        self.bytes[i] = (mu, nu)
