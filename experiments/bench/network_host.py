"""What the JAX hosts and the PyTorch hosts of `experiments.bench.network` share.

Data, learning rate, counters and the loop that is timed are the same code for both, so
that nothing but the contender differs. Imports NumPy only: PyTorch may live in an
interpreter of its own.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np

WARMUP_SHARE = 0.1  # of a run, in which the learning rate rises


class Spec(NamedTuple):
    """What a run of a contender is told."""

    rate: float  # peak learning rate
    steps: int  # of the whole run; 0: the rate is constant
    warmup: int  # dense steps of 1-bit Adam


class Contestant(Protocol):
    """One process' part of a contender."""

    def begin(self, name: str, spec: Spec) -> None:
        """Makes a fresh start; what takes long is done once for each name and spec."""
        ...

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """One step on this host's part of a batch, waited for; the loss."""
        ...

    def test(self) -> tuple[float, float]:
        """Test accuracy and loss of this host's parameters."""
        ...

    def barrier(self) -> None:
        """Waits for all hosts."""
        ...


class Digits(NamedTuple):
    """The task, as the file holds it."""

    images: np.ndarray  # float32[n, 28, 28], normalised
    labels: np.ndarray  # int32[n]
    test_images: np.ndarray
    test_labels: np.ndarray
    config: Mapping[str, Any]  # the fields of `ViTConfig`
    weights: Mapping[str, np.ndarray]  # of the first step, by JAX's names


def read_digits(path: Path) -> Digits:
    """The file that `network_task.write_digits` wrote."""
    with np.load(path) as held:
        arrays: dict[str, Any] = {name: held[name] for name in held.files}
    config = json.loads(str(arrays.pop("config")))
    weights = {
        name.removeprefix("w/"): arrays.pop(name)
        for name in list(arrays)
        if name.startswith("w/")
    }
    return Digits(**arrays, config=config, weights=weights)


class Batches:
    """This host's part of endless shuffled batches.

    Args:
      digits: the task.
      size: of one host's part.
      host: the place of this host.
      hosts: their number.
    """

    def __init__(self, digits: Digits, size: int, host: int, hosts: int) -> None:
        self._digits = digits
        self._part = slice(host * size, (host + 1) * size)
        self._total = hosts * size
        self._order = np.zeros(0, np.int64)
        self._generator = np.random.default_rng(0)

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        while len(self._order) < self._total:
            more = self._generator.permutation(len(self._digits.labels))
            self._order = np.concatenate([self._order, more])
        places, self._order = self._order[: self._total], self._order[self._total :]
        mine = places[self._part]
        return self._digits.images[mine], self._digits.labels[mine]


def learning_rate(spec: Spec, step: int) -> float:
    """Rises over a tenth of the run, then falls as a cosine; constant without a run.

    Example:
      >>> spec = Spec(rate=1.0, steps=20, warmup=0)
      >>> [round(learning_rate(spec, t), 2) for t in (0, 1, 11, 20)]
      [0.5, 1.0, 0.5, 0.0]
    """
    if not spec.steps:
        return spec.rate
    rise = max(1, round(WARMUP_SHARE * spec.steps))
    if step < rise:
        return spec.rate * (step + 1) / rise
    done = min(1.0, (step - rise) / max(1, spec.steps - rise))
    return spec.rate * 0.5 * (1 + math.cos(math.pi * done))


class Sent(NamedTuple):
    """What an interface has sent since it exists."""

    bytes: int
    packets: int


def read_sent(interface: str, table: str | None = None) -> Sent:
    """The interface's own counters.

    Args:
      interface: its name, in the network namespace of this process.
      table: the text of /proc/net/dev; None reads it.

    Raises:
      ValueError: no such interface.
    """
    if table is None:
        table = Path("/proc/net/dev").read_text(encoding="utf-8")
    for line in table.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            numbers = [int(x) for x in counters.split()]
            return Sent(numbers[8], numbers[9])
    raise ValueError(f"`interface` must be one of this host, got {interface!r}.")


def take_turn(
    contestant: Contestant, batches: Batches, interface: str, steps: int
) -> dict[str, list[float]]:
    """Times so many steps; the hosts start each at once, and end it before they count.

    Returns:
      Of each step `seconds`, and `bytes` and `packets` that the interface sent.
    """
    found: dict[str, list[float]] = {"seconds": [], "bytes": [], "packets": []}
    for _ in range(steps):
        images, labels = next(batches)
        contestant.barrier()
        before, began = read_sent(interface), time.perf_counter()
        loss = contestant.step(images, labels)
        found["seconds"].append(time.perf_counter() - began)
        if not math.isfinite(loss):
            # SFPO sends nothing in such a step, and would seem fast.
            raise RuntimeError("the loss is not finite: nothing can be timed")
        contestant.barrier()
        after = read_sent(interface)
        found["bytes"].append(after.bytes - before.bytes)
        found["packets"].append(after.packets - before.packets)
    return found


def train(
    contestant: Contestant, batches: Batches, spec: Spec, every: int, host: int
) -> list[dict[str, float]]:
    """Trains to the end; tests on the first host, while the clock stands.

    Returns:
      Of each test `step`, `seconds` trained so far, `accuracy`, `loss` of the test and
      `train_loss` of the last step.
    """
    points, clock, loss = [], 0.0, math.nan
    for step in range(spec.steps + 1):
        if step % every == 0 or step == spec.steps:
            accuracy, test_loss = contestant.test() if host == 0 else (0.0, 0.0)
            point = {"step": step, "seconds": clock, "accuracy": accuracy}
            points.append(point | {"loss": test_loss, "train_loss": loss})
        if step < spec.steps:
            images, labels = next(batches)
            contestant.barrier()
            began = time.perf_counter()
            loss = contestant.step(images, labels)
            clock += time.perf_counter() - began
    return points


def serve(
    handlers: Mapping[str, Callable[..., Any]],
    reads: TextIO = sys.stdin,
    writes: TextIO = sys.stdout,
) -> None:
    """Answers each line of JSON, {"do": a handler's name, ...its arguments}, by one."""
    for line in reads:
        order = json.loads(line)
        answer = handlers[order.pop("do")](**order)
        print(json.dumps({"answer": answer}), file=writes, flush=True)
