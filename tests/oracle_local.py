"""0/1 Adam in NumPy, from the equations of Lu et al. 2022, algorithm 1."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.oracle import Codec, Tree, TwoPhaseMean, raise_to_floor


class ZeroOneAdam:
    """Parameters of their own for each rank, between synchronisations.

    As the paper has it, but for bias corrections, a variance that the warm-up and
    refreshes make, decoupled decay, and a floor under the variance. `step` takes the
    gradients of each rank at its own parameters, `local`.
    """

    def __init__(
        self,
        params: Tree,
        ranks: int,
        rate: Callable[[int], float],
        warmup: int,
        interval: Callable[[int], int],
        *,
        decay: float,
        decayed: Sequence[bool],
        codec: Codec,
        nu_floor: float,
        refresh: int | None = None,
    ) -> None:
        self.shared = [p.copy() for p in params]
        self.local = [[p.copy() for p in params] for _ in range(ranks)]
        self.m = [[np.zeros(p.shape) for p in params] for _ in range(ranks)]
        self.u = [[np.zeros(p.shape) for p in params] for _ in range(ranks)]
        self.v = [np.zeros(p.shape) for p in params]
        self.rate, self.warmup, self.interval = rate, warmup, interval
        self.decays = [decay * flag for flag in decayed]
        self.mean, self.floor = TwoPhaseMean(params, ranks, codec), nu_floor
        self.count, self.since, self.total = 0, 0, 0.0
        self.refresh, self.updated = refresh, 0

    def step(self, grads: Sequence[Tree]) -> None:
        rate, t = self.rate(self.count), self.count + 1
        if self.count < self.warmup:
            self._dense(grads, rate, t)
        else:
            self._own(grads, rate, t)
        self.count = t

    def _dense(self, grads: Sequence[Tree], rate: float, t: int) -> None:
        for j, decay in enumerate(self.decays):
            g = np.mean([own[j] for own in grads], axis=0)
            m = 0.9 * self.m[0][j] + 0.1 * g
            v = 0.999 * self.v[j] + 0.001 * g * g
            root = np.sqrt(v / (1 - 0.999**t)) + 1e-8
            u = np.where(v > 0, m / (1 - 0.9**t) / root, 0.0)
            p = self.shared[j] - rate * (u + decay * self.shared[j])
            self.shared[j], self.v[j] = p, v
            for i in range(len(grads)):
                self.m[i][j], self.local[i][j] = m, p
        self.updated = t

    def _own(self, grads: Sequence[Tree], rate: float, t: int) -> None:
        correction = 1 - 0.9**t
        roots = [self._root(v) for v in self.v]
        for i, own in enumerate(grads):
            for j, decay in enumerate(self.decays):
                self.m[i][j] = 0.9 * self.m[i][j] + 0.1 * own[j]
                move = np.where(self.v[j] > 0, rate * self.m[i][j] / correction, 0.0)
                self.u[i][j] = (1 - rate * decay) * self.u[i][j] + move
                self.local[i][j] = (1 - rate * decay) * self.local[i][j] - move / roots[
                    j
                ]
        for j, decay in enumerate(self.decays):
            self.shared[j] = (1 - rate * decay) * self.shared[j]
        self.since, self.total = self.since + 1, self.total + rate
        if self.since < self.interval(t - 1 - self.warmup):
            return
        mean = self.mean(self.u, [v > 0 for v in self.v])
        for j, u in enumerate(mean):
            self.shared[j] = self.shared[j] - np.where(self.v[j] > 0, u / roots[j], 0.0)
            for i in range(len(grads)):
                self.local[i][j] = self.shared[j].copy()
                self.m[i][j] = correction * u / self.total
                self.u[i][j] = np.zeros_like(u)
        self.since, self.total = 0, 0.0
        if self.refresh is not None and t - self.updated >= self.refresh:
            b2 = 0.999 ** (t - self.updated)
            for j, v in enumerate(self.v):
                g = np.mean([own[j] for own in grads], axis=0)
                self.v[j] = b2 * v + (1 - b2) * g * g
            self.updated = t

    def _root(self, v: np.ndarray) -> Any:
        raised = raise_to_floor(v, self.floor, self.mean.codec.block)
        return np.sqrt(raised / (1 - 0.999**self.updated)) + 1e-8
