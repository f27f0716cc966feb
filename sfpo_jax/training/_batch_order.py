"""Which examples make a batch: shuffled by a seed, shared out among hosts.

Batch k is a pure function of k. So a stream resumes from one number, and the same
examples come whatever the number of worker processes or hosts.
"""

from typing import Any, Literal

import jax
import numpy as np

from sfpo_jax._validate import check_at_least

# The label, and the token, of rows that only fill up a batch.
PADDING = -1

Remainder = Literal["drop", "pad"]


class BatchOrder:
    """The rows of every batch that one host reads.

    The examples stand in a row, epoch after epoch, every one once before any comes
    again. Global batch k is the k-th piece of it, and host h reads the h-th part of
    each batch: their parts, put together in order, are the batch of a single host.

    Args:
      examples: how many there are.
      batch_size: rows of a batch over all hosts.
      seed: of the order.
      shuffle: False: in order, the same in each epoch.
      epochs: None: endless.
      remainder: what becomes of the last rows that fill no batch: left out, or
        completed by rows without an example.
      host_index: which host this is; None: the index of this JAX process.
      host_count: how many there are; None: the number of JAX processes.

    Attributes:
      batches: how many there are, None: endless.
      local_size: rows of a batch on this host.

    Raises:
      ValueError: a count below 1, a negative seed, hosts that do not divide the batch,
        or no batch at all.

    Example:
      >>> order = BatchOrder(
      ...     5,
      ...     4,
      ...     seed=0,
      ...     shuffle=False,
      ...     epochs=1,
      ...     remainder="pad",
      ...     host_index=1,
      ...     host_count=2,
      ... )
      >>> [order.rows(k)[1].tolist() for k in range(order.batches)]
      [[2, 3], [-1, -1]]
    """

    def __init__(
        self,
        examples: int,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        remainder: Remainder,
        host_index: int | None,
        host_count: int | None,
    ) -> None:
        hosts = jax.process_count() if host_count is None else host_count
        host = jax.process_index() if host_index is None else host_index
        _check(batch_size, seed, epochs, host, hosts)
        self.local_size = batch_size // hosts
        self._examples, self._batch_size, self._host = examples, batch_size, host
        self._total = None if epochs is None else examples * epochs
        self.batches = self._count(remainder)
        self._shuffled = _shuffled(examples, seed) if shuffle else None

    def rows(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions, examples), both int64[local_size], of a batch on this host.

        A position counts the rows since the start, over all hosts and epochs, and so
        names a use of an example. The example is PADDING after the last one.
        """
        start = batch * self._batch_size + self._host * self.local_size
        positions = np.arange(start, start + self.local_size)
        if self._shuffled is None:
            examples = positions % self._examples
        else:
            examples = np.array([self._shuffled[p] for p in positions.tolist()])
        if self._total is not None:
            examples = np.where(positions < self._total, examples, PADDING)
        return positions, examples

    def _count(self, remainder: Remainder) -> int | None:
        if self._total is None:
            return None
        whole, rest = divmod(self._total, self._batch_size)
        batches = whole + (rest > 0 and remainder == "pad")
        if not batches:
            raise ValueError(
                f"`batch_size` must be at most {self._total}, the examples of all "
                f"epochs, got {self._batch_size}: take fewer, or remainder='pad'."
            )
        return batches


def _shuffled(examples: int, seed: int) -> Any:
    """Position -> example, another permutation each epoch; nothing is stored."""
    import grain

    return grain.MapDataset.range(examples).seed(seed).shuffle().repeat()


def _check(
    batch_size: int, seed: int, epochs: int | None, host: int, hosts: int
) -> None:
    check_at_least("batch_size", batch_size, 1, "the rows of a batch")
    check_at_least("seed", seed, 0, "a seed")
    if epochs is not None:
        check_at_least("epochs", epochs, 1, "how often each example comes")
    check_at_least("host_count", hosts, 1, "a number of hosts")
    if not 0 <= host < hosts:
        raise ValueError(
            f"`host_index` must lie in [0, {hosts}), got {host}: hosts count from 0."
        )
    if batch_size % hosts:
        below = batch_size // hosts * hosts
        choices = f"{below} or {below + hosts}" if below else f"{hosts}"
        raise ValueError(
            f"`batch_size` must be divisible by the {hosts} hosts that share it, got "
            f"{batch_size}: take {choices}."
        )
