"""The algorithms in NumPy float64, written from the papers' equations.

Nothing here is imported from the package: it is what the package is compared with. A
tree is a list of arrays; what differs from rank to rank is a list over ranks. Which
rank serves which block of the second phase is left out, because no result depends on
it: scales belong to blocks and residuals to entries.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Tree = list[np.ndarray]


def kept_count(n: int, sparsity: float) -> int:
    """Entries that survive: n - ceil(s (n - 1)), exact on the float32 value of s."""
    exact = Fraction(float(np.float32(sparsity)))
    return n - math.ceil(exact * (n - 1)) if n else 0


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """bool like x: its k largest magnitudes, ties to the lower index."""
    order = np.argsort(-np.abs(x), axis=None, kind="stable")
    chosen = np.zeros(x.size, bool)
    chosen[order[:k]] = True
    return chosen.reshape(x.shape)


def keep(x: np.ndarray, sparsity: float) -> np.ndarray:
    """x with all but its largest entries set to zero."""
    return np.where(largest(x, kept_count(x.size, sparsity)), x, 0.0)


class Sparsify:
    """One worker's sparsification of one leaf, with what it has not sent.

    `momentum` is the factor mu of Deep Gradient Compression (Lin et al. 2018).
    """

    def __init__(self, feedback: bool = False, momentum: float | None = None) -> None:
        self.feedback, self.mu = feedback or momentum is not None, momentum
        self.residual: np.ndarray | float = 0.0
        self.velocity: np.ndarray | float = 0.0

    def step(self, g: np.ndarray, sparsity: float) -> np.ndarray:
        g = g.astype(np.float64)
        if not self.feedback:
            return keep(g, sparsity)
        if self.mu is not None:
            self.velocity = self.mu * self.velocity + g
            g = self.velocity
        total = self.residual + g
        chosen = largest(total, kept_count(total.size, sparsity))
        self.residual = np.where(chosen, 0.0, total)
        if self.mu is not None:
            self.velocity = np.where(chosen, 0.0, self.velocity)
        return np.where(chosen, total, 0.0)


class Codec(NamedTuple):
    """sign (density 1) or sparse_sign: scale * sign on the support of each block."""

    density: float = 1.0
    block: int = 2048
    relaxation: float = 1.0

    def __call__(self, x: np.ndarray, live: np.ndarray) -> np.ndarray:
        """What the receiver knows of x; entries that are not live are zero."""
        flat, alive = x.ravel(), live.ravel()
        out = np.zeros_like(flat)
        for start in range(0, flat.size, self.block):
            here = slice(start, start + self.block)
            out[here] = self._block(flat[here], alive[here])
        return out.reshape(x.shape)

    def _block(self, x: np.ndarray, live: np.ndarray) -> np.ndarray:
        if self.density < 1.0:
            product = np.float32(self.density) * np.float32(live.sum())
            chosen = largest(np.where(live, x, 0.0), max(1, int(np.round(product))))
            live = live & chosen & (x != 0.0)
        if not live.any():
            return np.zeros_like(x)
        scale = self.relaxation * np.abs(x[live]).mean()
        return np.where(live, np.copysign(scale, x), 0.0)


class TwoPhaseMean:
    """The compressed mean over N ranks, error feedback on both sides.

    `codec` is a function (x, live) -> what the receiver knows of x.
    """

    def __init__(
        self, shapes: Tree, ranks: int, codec: Any, feedback: bool = True
    ) -> None:
        self.codec, self.feedback = codec, feedback
        self.worker = [[np.zeros(x.shape) for x in shapes] for _ in range(ranks)]
        self.server = [np.zeros(x.shape) for x in shapes]

    def __call__(
        self,
        sent: Sequence[Tree],
        live: Sequence[np.ndarray],
    ) -> Tree:
        mean = []
        for j, alive in enumerate(live):
            total = np.zeros_like(self.server[j])
            for own, error in zip(sent, self.worker, strict=True):
                c = own[j] + error[j]
                q = self.codec(c, alive)
                if self.feedback:
                    error[j] = np.where(alive, c - q, 0.0)
                total += q
            h = total / len(sent) + self.server[j]
            mean.append(self.codec(h, alive))
            if self.feedback:
                self.server[j] = h - mean[j]
        return mean


def raise_to_floor(v: np.ndarray, share: float, block: int) -> np.ndarray:
    """v where it is not 0, at least `share` of the mean of these in its block."""
    flat = v.ravel().copy()
    for start in range(0, flat.size, block):
        part = flat[start : start + block]
        live = part != 0.0
        if live.any():
            part[live] = np.maximum(part[live], share * part[live].mean())
    return flat.reshape(v.shape)


class OnebitAdam:
    """1-bit Adam (Tang et al. 2021), bias-corrected, decay decoupled.

    `step` takes each rank's gradients and moves `params`, which all ranks share. The
    paper has no floor under the frozen v, and freezes it for good: `nu_floor=0`,
    `refresh_every=0`.
    """

    def __init__(
        self,
        params: Tree,
        ranks: int,
        learning_rate: Callable[[int], Any],
        warmup_steps: int,
        *,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decayed: Sequence[bool] | None = None,
        codec: Codec | None = None,
        feedback: bool = True,
        nu_floor: float = 0.0,
        refresh_every: int = 0,
    ) -> None:
        self.params = [p.astype(np.float64) for p in params]
        self.m = [np.zeros(p.shape) for p in params]
        self.v = [np.zeros(p.shape) for p in params]
        self.count, self.warmup, self.updated = 0, warmup_steps, 0
        self.rate = learning_rate
        self.b1, self.b2, self.eps, self.nu_floor = b1, b2, eps, nu_floor
        self.decay = [weight_decay * on for on in (decayed or [True] * len(params))]
        self.every = refresh_every
        self.mean = TwoPhaseMean(self.params, ranks, codec or Codec(), feedback)

    def step(self, grads: Sequence[Tree]) -> None:
        t = self.count + 1
        is_warmup = self.count < self.warmup
        is_refresh = (
            not is_warmup and self.every and (t - self.warmup) % self.every == 0
        )
        if is_warmup or is_refresh:
            g = [np.mean(leaf, axis=0) for leaf in zip(*grads, strict=True)]
            self.m = [self._ema(self.b1, m, x) for m, x in zip(self.m, g, strict=True)]
            b2 = self.b2 ** (self.every if is_refresh else 1)
            self.v = [self._ema(b2, v, x * x) for v, x in zip(self.v, g, strict=True)]
            self.updated = t
        else:
            own = [
                [self._ema(self.b1, m, x) for m, x in zip(self.m, g, strict=True)]
                for g in grads
            ]
            self.m = self.mean(own, [v != 0.0 for v in self.v])
        rate = (
            self.rate if isinstance(self.rate, float) else float(self.rate(self.count))
        )
        for i, (m, v) in enumerate(zip(self.m, self.v, strict=True)):
            m_hat = m / (1.0 - self.b1**t)
            root = self._root(v, 0.0 if is_warmup else self.nu_floor)
            direction = np.where(v != 0.0, m_hat / root, 0.0)
            self.params[i] = self.params[i] - rate * (
                direction + self.decay[i] * self.params[i]
            )
        self.count = t

    def _root(self, v: np.ndarray, floor: float) -> np.ndarray:
        """The denominator, v worth `updated` steps."""
        raised = raise_to_floor(v, floor, self.mean.codec.block)
        return np.sqrt(raised / (1.0 - self.b2**self.updated)) + self.eps

    @staticmethod
    def _ema(b: float, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return b * old + (1.0 - b) * new
