"""JAX's allocator on GPUs, set before its backend starts, with room left for a pool.

JAX reads these settings from the environment, once, as its CUDA plugin starts:
https://docs.jax.dev/en/latest/gpu_memory_allocation.html. Every JAX of the supported
range reads `XLA_CLIENT_MEM_FRACTION`, and still the older name
`XLA_PYTHON_CLIENT_MEM_FRACTION`; given both, it refuses to start.
"""

import os
from collections.abc import MutableMapping
from typing import Literal, get_args

import jax

from sfpo_jax.memory._devices import DEVICES
from sfpo_jax.units import UnitError, format_bytes, parse_bytes

Allocator = Literal["default", "bfc", "platform", "cuda_async", "vmm", "address"]

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
# What JAX takes of a card where nothing is said.
_DEFAULT = 0.75
_ADDRESS_SINCE = (0, 12)


def configure(
    *,
    allocator: Allocator | None = None,
    fraction: float | None = None,
    preallocate: bool | None = None,
    pool: str = "0B",
    card: str | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> float:
    """Sets JAX's allocator and its share of each GPU, before anything runs.

    Args:
      allocator: JAX's name of it. "platform" gives memory back at once and is slow.
        "address" needs JAX 0.12. None leaves it as it is.
      fraction: of a card, for JAX and the pool together, in (0, 1]. None: what the
        environment says, else JAX's own 0.75; said once, as each call takes the
        pool's part from it.
      preallocate: whether JAX takes its share when it starts. None leaves it.
      pool: what a `Pool` in the card's memory may map; JAX gets so much less.
      card: the card's name, as "a100-80gb", or its memory, as "80GB"; needed with
        `pool`.
      environ: where the settings go.

    Returns:
      The fraction of the card that is left to JAX.

    Raises:
      RuntimeError: a backend runs already, and has read its settings.
      ValueError: a fraction out of range, an unknown allocator, a pool that leaves JAX
        less than a hundredth of the card, or `pool` without `card`.

    Example:
      >>> settings = {}
      >>> configure(fraction=0.9, pool="8GB", card="80GB", environ=settings)
      0.8
      >>> settings
      {'XLA_CLIENT_MEM_FRACTION': '0.8'}
    """
    if allocator is not None:
        _check_allocator(allocator, jax.__version_info__)
    pool_bytes = parse_bytes(pool, name="pool")
    given = environ.get(FRACTION) or environ.get(OLD_FRACTION)
    total = _given_fraction(given) if fraction is None else fraction
    if not 0 < total <= 1:
        raise ValueError(f"`fraction` must be above 0 and at most 1, got {total!r}.")
    left = total
    if pool_bytes:
        left = round(total - pool_bytes / _card_bytes(card), 6)
    if left < 0.01:
        raise ValueError(
            f"`pool` of {format_bytes(pool_bytes)} leaves {left:.1%} of the card to "
            f"JAX: give a smaller one, or a larger `fraction` than {total}."
        )
    if environ is os.environ and _is_running():
        raise RuntimeError(
            "`configure` comes too late: JAX's backend runs and has read its settings; "
            "call it before the first array, or set them in the environment."
        )
    if fraction is not None or pool_bytes:
        environ.pop(OLD_FRACTION, None)
        environ[FRACTION] = f"{left:g}"
    if allocator is not None:
        environ[ALLOCATOR] = allocator
    if preallocate is not None:
        environ[PREALLOCATE] = "true" if preallocate else "false"
    return left


def _check_allocator(allocator: str, version: tuple[int, ...]) -> None:
    names = get_args(Allocator)
    if allocator not in names:
        raise ValueError(
            f"`allocator` must be one of {', '.join(names)}, got {allocator!r}."
        )
    if allocator == "address" and version < _ADDRESS_SINCE:
        raise ValueError(
            "`allocator` 'address' needs JAX 0.12, here is "
            f"{'.'.join(map(str, version))}: use 'vmm'."
        )


def _given_fraction(text: str | None) -> float:
    if not text:
        return _DEFAULT
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"`{FRACTION}` in the environment must be a number, got {text!r}: unset it."
        ) from None


def _card_bytes(card: str | None) -> int:
    if card is None:
        raise ValueError(
            "`pool` needs `card`, to know its share: give 'a100-80gb' or '80GB'."
        )
    if card in DEVICES:
        return DEVICES[card].memory_bytes
    try:
        found = parse_bytes(card, name="card")
    except UnitError:
        found = 0
    if found == 0:
        raise ValueError(
            f"`card` must be a size, as '80GB', or one of {', '.join(DEVICES)}, got "
            f"{card!r}."
        )
    return found


def _is_running() -> bool:
    # JAX has no public name for it.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
