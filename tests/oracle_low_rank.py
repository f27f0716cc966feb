"""PowerSGD in NumPy float64, written from the paper's algorithms 1 and 2.

Nothing here is imported from the package, as in `tests.oracle`.
"""

from collections.abc import Sequence

import numpy as np

Tree = list[np.ndarray]


class LowRankMean:
    """Tensors averaged over ranks, those with a cut as factors of low rank.

    Args:
      cuts: for each tensor the axis its columns begin with, None for exactly.
      basis: the first Q of each tensor that has a cut, [cols, rank]; others None.
      ranks: how many.
      feedback: whether what is lost is added to the next gradient.
    """

    def __init__(
        self,
        cuts: Sequence[int | None],
        basis: Sequence[np.ndarray | None],
        ranks: int,
        feedback: bool = True,
    ) -> None:
        self.cuts, self.basis, self.feedback = list(cuts), list(basis), feedback
        self.worker: list[list[np.ndarray | float]] = [[0.0] * len(cuts)] * ranks

    def __call__(self, grads: Sequence[Tree]) -> Tree:
        """The means of a step, from each rank's tensors."""
        ranks, means, worker = len(grads), [], [[] for _ in grads]
        for k, cut in enumerate(self.cuts):
            total = [grads[i][k] + self.worker[i][k] for i in range(ranks)]
            q = self.basis[k]
            if cut is None or q is None:
                mean = np.mean(np.stack(total), axis=0)
                lost: list[np.ndarray | float] = [0.0] * ranks
            else:
                rows = int(np.prod(total[0].shape[:cut]))
                matrices = [x.reshape(rows, -1) for x in total]
                p = np.mean(np.stack([m @ q for m in matrices]), axis=0)
                p, _ = np.linalg.qr(p)
                q = np.mean(np.stack([m.T @ p for m in matrices]), axis=0)
                # The span is all that counts: any lengths will do.
                self.basis[k] = q / np.linalg.norm(q, axis=0)
                mean = (p @ q.T).reshape(total[0].shape)
                lost = [x - mean for x in total]
            means.append(mean)
            for i in range(ranks):
                worker[i].append(lost[i] if self.feedback else 0.0)
        self.worker = worker
        return means
