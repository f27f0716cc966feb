"""What a batch takes, and the largest that fits, by few compilations."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sfpo_jax._validate import check_at_least
from sfpo_jax.memory._devices import find_device
from sfpo_jax.memory._plan import Plan
from sfpo_jax.memory._planner import budget_bytes, plan

Build = Callable[[Any, int], Any]


def max_batch_size(
    build: Build,
    *,
    device: str = "a100-80gb",
    mesh_shape: Mapping[str, int] | None = None,
    budget: str | None = None,
    multiple_of: int = 1,
    limit: int = 2**20,
    compiler: str = "auto",
    cache: bool | str | Path = True,
) -> int:
    """The largest global batch whose program fits.

    Memory is nearly affine in the batch: two measurements predict the size that fits,
    and the prediction is measured until a size fits and the next one does not. Should
    memory not grow steadily, the interval is halved instead. From 64 multiples on only
    numbers with six leading binary digits are tried, so the answer is at most 1/32 too
    small: odd sizes do not tile, and may take more than larger round ones.

    Args:
      build: ``build(mesh, batch_size) -> (step, *args)``, as `plan` has it.
      device: as in `plan`.
      mesh_shape: as in `plan`; None is one device.
      budget: what a device may hold, e.g. "40GB"; None is all its memory.
      multiple_of: what the batch must be a multiple of, e.g. devices x microbatches.
      limit: where to stop looking, of a program whose memory the batch does not change.
      compiler: as in `plan`.
      cache: as in `plan`.

    Returns:
      The batch size, a multiple of `multiple_of`; 0 when not even that fits.

    Raises:
      ValueError: `multiple_of` below 1, or what `plan` raises.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> def build(mesh, batch_size):
      ...     x = jax.ShapeDtypeStruct((batch_size, 250), jnp.float32)
      ...     return jax.jit(lambda x: x.sum(axis=1)), x
      >>> options = {"compiler": "cpu", "cache": False}
      >>> sfpo.max_batch_size(build, budget="1MB", multiple_of=8, **options)
      992
    """
    check_at_least("multiple_of", multiple_of, 1, "what divides every batch")
    card = find_device(device)
    allowed = budget_bytes(card, budget)

    def measure(units: int) -> int:
        def build_one(mesh: Any) -> Any:
            return build(mesh, units * multiple_of)

        made: Plan = plan(
            build_one,
            device=device,
            mesh_shape=mesh_shape or {"data": 1},
            budget=budget,
            compiler=compiler,
            cache=cache,
        )
        return made.total_bytes

    return multiple_of * search(measure, allowed, max(1, limit // multiple_of))


def search(measure: Callable[[int], int], allowed: int, limit: int) -> int:
    """The largest n of 0..limit with measure(n) <= allowed, of a growing measure.

    From 64 on only n with six leading binary digits are looked at.

    Args:
      measure: bytes for n >= 1; expensive.
      allowed: bytes.
      limit: the largest n that is looked at.
    """
    sizes: dict[int, int] = {}
    fits, fails = 0, limit + 1
    guess, poor = 1, 0
    while round_down(fails - 1) > fits:
        sizes[guess] = measure(guess)
        width = fails - fits
        if sizes[guess] <= allowed:
            fits = guess
        else:
            fails = guess
        # A prediction may end one beside the answer, which the neighbour settles; two
        # that leave most of the interval show that memory is not affine here.
        poor = poor + 1 if 2 * (fails - fits) > width else 0
        is_bracketed = fails in sizes
        if is_bracketed and poor >= 2:
            guess, poor = (fits + fails) // 2, 0
        else:
            guess = _predict(sizes, fits, fails, allowed)
        following = fits + (1 << max(0, fits.bit_length() - 6))
        guess = min(max(round_down(guess), following), round_down(fails - 1))
    return fits


def round_down(n: int) -> int:
    """`n` with all but its six leading binary digits cleared.

    Example:
      >>> [round_down(n) for n in (63, 65, 127, 1000)]
      [63, 64, 126, 992]
    """
    shift = max(0, n.bit_length() - 6)
    return n >> shift << shift


def _predict(sizes: Mapping[int, int], fits: int, fails: int, allowed: int) -> int:
    """Where the line through two measurements meets what is allowed."""
    if fits == 0:
        return fails // 2
    if fails in sizes:
        low, high = fits, fails
    else:
        smaller = [n for n in sizes if n < fits]
        if not smaller:
            return 2 * fits
        low, high = max(smaller), fits
    slope = (sizes[high] - sizes[low]) / (high - low)
    if slope <= 0:
        return 2 * fits
    guess = fits + int((allowed - sizes[fits]) / slope)
    # From small programs the slope is a poor guide to far larger ones.
    return min(guess, 16 * fits)


class BatchMemory(NamedTuple):
    """What a batch takes of one device, an affine function of its size.

    Attributes:
      device: the device's name.
      available: bytes the device has.
      per_sample: bytes that one more sample on this device takes.
      fixed: bytes taken whatever the batch.
    """

    device: str
    available: float
    per_sample: float
    fixed: float = 0.0


def measure_batch(
    build: Build,
    batches: tuple[int, int],
    *,
    device: str = "a100-80gb",
    mesh_shape: Mapping[str, int] | None = None,
    compiler: str = "auto",
    cache: bool | str | Path = True,
) -> BatchMemory:
    """Plans a program at two batch sizes and draws the line through them.

    Args:
      build: ``build(mesh, batch_size) -> (step, *args)``, as in `max_batch_size`.
      batches: two global batch sizes, the smaller first; the closer to the one in
        question, the truer the line.
      device, mesh_shape, compiler, cache: as in `plan`.

    Raises:
      ValueError: sizes that are not two in order, memory that does not grow from one
        to the other, or what `plan` raises.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def build(mesh, batch_size):
      ...     x = jax.ShapeDtypeStruct((batch_size, 250), jnp.float32)
      ...     return jax.jit(lambda x: x.sum(axis=1)), x
      >>> measure_batch(build, (64, 128), compiler="cpu", cache=False).per_sample
      1004.0
    """
    few, many = batches
    if not 1 <= few < many:
        raise ValueError(f"`batches` must be two sizes in order, got {batches}.")
    shape = dict(mesh_shape or {"data": 1})
    totals = []
    for size in batches:

        def build_one(mesh: Any, size: int = size) -> Any:
            return build(mesh, size)

        made = plan(
            build_one, device=device, mesh_shape=shape, compiler=compiler, cache=cache
        )
        totals.append(made.total_bytes)
    # Ranks of `op` work on the same samples.
    shares = math.prod(n for axis, n in shape.items() if axis != "op")
    slope = (totals[1] - totals[0]) / (many - few)
    if slope <= 0:
        raise ValueError(
            f"`build` takes {totals[0]:,} bytes with {few} samples and {totals[1]:,} "
            f"with {many}: no memory of a sample follows, take larger batches."
        )
    card = find_device(device)
    return BatchMemory(
        card.name, card.memory_bytes, slope * shares, max(0.0, totals[0] - slope * few)
    )
