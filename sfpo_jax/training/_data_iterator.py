"""Training data that can say where it is and go there."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DataIterator(Protocol):
    """Batches in an order that a resumed run repeats.

    After ``other.set_state(it.get_state())`` the two give equal batches.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]:
        """Where the iterator is, in what JSON has a form for."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called."""
        ...


class ReplayedIterator:
    """Makes a `DataIterator` of any iterator that is the same whenever it is made.

    It finds its place by taking as many batches again: simple, and slow where a batch
    is dear.

    Args:
      make: () -> iterator, from the start.

    Example:
      >>> it = ReplayedIterator(lambda: iter("abcd"))
      >>> next(it), next(it), it.get_state()
      ('a', 'b', {'taken': 2})
      >>> it.set_state({"taken": 1})
      >>> next(it)
      'b'
    """

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make
        self._iterator = make()
        self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._taken += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The number of batches taken."""
        return {"taken": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes that number of batches from a new iterator."""
        self._iterator, self._taken = self._make(), 0
        while self._taken < state["taken"]:
            next(self)
