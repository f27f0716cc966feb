"""An iterator of batches that resumes exactly, made by threads or worker processes."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from sfpo_jax._validate import check_at_least

T = TypeVar("T")
# What a `with` block gets: the class itself, which the run-time checks of annotations
# can only be told so.
S = TypeVar("S", bound=Iterator[Any])

# Batches each maker holds ready. More of them only take memory: one that is always
# behind stays behind.
_READY = 2


class BatchStream(Iterator[T], Generic[T]):
    """Batches 0, 1, 2, ..., each made from its number, ahead of time and in order.

    Args:
      make: batch number -> batch (arrays in dicts, lists and tuples); pure, and
        picklable where there are workers.
      batches: how many there are; None: endless.
      identity: what the batches depend on, as JSON has it; a state of another stream is
        refused by it.
      workers: processes that make the batches; 0: threads of this process.

    Processes are spawned: a script that asks for workers needs the usual
    `if __name__ == "__main__":`. `close` ends them, as does leaving a `with` block.

    Raises:
      ValueError: `workers` below 0.

    Example:
      >>> with BatchStream(lambda k: 10 * k, 3, {}) as stream:
      ...     first, state = next(stream), stream.get_state()
      ...     rest = list(stream)
      ...     stream.set_state(state)
      ...     print(first, rest, list(stream))
      0 [10, 20] [10, 20]
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        batches: int | None,
        identity: Mapping[str, Any],
        workers: int = 0,
    ) -> None:
        check_at_least("workers", workers, 0, "a number of processes")
        self._make, self._batches, self._workers = make, batches, workers
        self._identity = dict(identity)
        self._next = 0
        # Made at the first batch, so that a state set before it costs nothing.
        self._source: Any = None

    def __next__(self) -> T:
        if self._batches is not None and self._next >= self._batches:
            self.close()
            raise StopIteration
        if self._source is None:
            self._source = self._start()
        batch = self._receive(next(self._source))
        self._next += 1
        return batch

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands: a few numbers and words that JSON can hold.

        It does not depend on workers and hosts: the same state goes to every host, and
        may be set on a stream with other numbers of them.
        """
        return {"next_batch": self._next, "stream": dict(self._identity)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on as the stream did that `get_state` was asked.

        Raises:
          ValueError: the state of a stream of other batches.
        """
        check_identity(state, self._identity)
        self.close()
        self._next = int(state["next_batch"])

    def close(self) -> None:
        """Ends workers and drops the batches made ahead; `next` makes them again."""
        if self._source is None:
            return
        self._source.close()
        self._source = None
        if self._workers:
            # Grain's iterators refer to each other and, with them, to the shared memory
            # of the last batches, which would outlive the program.
            gc.collect()

    def _receive(self, made: Any) -> T:
        """What `next` returns for what `make` made."""
        return made

    def _start(self) -> Any:
        import grain

        # No dataset is as long as this endless one.
        stop = 2**62 if self._batches is None else self._batches
        numbers = grain.MapDataset.range(self._next, stop)
        # Decoding and resizing let go of the interpreter's lock, so threads share the
        # cores; beside worker processes one thread each is enough.
        threads = 1 if self._workers else min(4, os.cpu_count() or 1)
        made = numbers.map(self._make).to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        )
        if self._workers:
            _settle_flags()
            made = made.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=self._workers, per_worker_buffer_size=_READY
                )
            )
        return iter(made)


def _settle_flags() -> None:
    """Lets Grain read its flags in a program that does not parse any.

    Without it Grain 0.2.18 cannot start a worker (google/grain#1355).
    """
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises ValueError where a state comes from a stream of other batches.

    Args:
      state: what `get_state` returned.
      identity: what the batches of this stream depend on.
    """
    if not {"next_batch", "stream"} <= set(state):
        raise ValueError(
            f"`state` must hold next_batch and stream, got {sorted(state)}: pass what "
            "`get_state` returned."
        )
    saved = state["stream"]
    for name in [*identity, *saved]:
        if saved.get(name) != identity.get(name):
            raise ValueError(
                f"`state` must come from a stream with {name} {identity.get(name)}, "
                f"got {saved.get(name)}: make the stream as it was, or start anew."
            )
