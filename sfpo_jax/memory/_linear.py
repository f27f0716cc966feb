"""Linear programs some of whose variables are integers.

Solved exactly by HiGHS (Huangfu and Hall 2018, "Parallelizing the dual revised simplex
method") through `scipy.optimize.milp`; SciPy comes with JAX.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Terms = Sequence[tuple[float, int]]
# A number, not seconds: hosts that plan alike must choose alike.
_NODES = 1000


class Linear:
    """Minimises sum(cost * x) where least <= sum(factor * x[place]) <= most, x >= 0."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self._bounds: list[float] = []
        self._integer: list[int] = []
        self._entries: list[tuple[int, int, float]] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def variable(
        self, *, cost: float = 0.0, most: float = 1.0, is_integer: bool = False
    ) -> int:
        """The place of a new variable."""
        self.costs.append(cost)
        self._bounds.append(most)
        self._integer.append(int(is_integer))
        return len(self.costs) - 1

    def row(self, terms: Terms, least: float, most: float = np.inf) -> None:
        """A new row; places may come more than once."""
        merged: dict[int, float] = {}
        for factor, place in terms:
            merged[place] = merged.get(place, 0.0) + factor
        self._entries += [
            (len(self._least), place, factor) for place, factor in merged.items()
        ]
        self._least.append(least)
        self._most.append(most)

    def solve(self, gap: float) -> Any:
        """x, as an array; None where there is none.

        Args:
          gap: to what the best could have, as a share of the objective.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        rows, columns, entries = zip(*self._entries, strict=True)
        shape = len(self._least), len(self.costs)
        matrix = coo_array((entries, (rows, columns)), shape=shape)
        # SciPy takes arrays for bounds and says numbers.
        least, most, bounds = (
            np.array(x, float) for x in (self._least, self._most, self._bounds)
        )
        limits: Any = (least, most, bounds)
        result = milp(
            np.array(self.costs),
            constraints=LinearConstraint(matrix, limits[0], limits[1]),
            integrality=np.array(self._integer),
            bounds=Bounds(0.0, limits[2]),
            options={"mip_rel_gap": gap, "node_limit": _NODES},
        )
        return result.x
