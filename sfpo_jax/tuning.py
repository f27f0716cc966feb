"""Rules for the numbers of a run: how finely a product is cut."""

from sfpo_jax._validate import check_at_least


def check_chunk_size(chunk_size: int, prefetch_depth: int, op_size: int = 1) -> None:
    """Refuses a product cut too coarsely for its transfers to hide.

    With fewer than two pieces for each in flight, the pipeline fills and drains for
    more than a third of its time (`bubble_fraction`).

    Args:
      chunk_size: pieces of one product, over all ranks of the axis `op`.
      prefetch_depth: pieces in flight.
      op_size: ranks of the axis `op`; each cuts its part into equally many pieces.

    Raises:
      ValueError: a number below 1, `chunk_size` under 2 * `prefetch_depth`, or no
        multiple of `op_size`.

    Example:
      >>> import sfpo_jax as sfpo
      >>> sfpo.tuning.check_chunk_size(8, 2, op_size=4)
      >>> sfpo.tuning.check_chunk_size(2, 2)
      Traceback (most recent call last):
      ...
      ValueError: `chunk_size` must be at least 2 * `prefetch_depth`, got 2 and 2: cut
      into 4 pieces or more, or prefetch 1
    """
    check_at_least("chunk_size", chunk_size, 1, "the pieces of a product")
    check_at_least("prefetch_depth", prefetch_depth, 1, "the pieces in flight")
    check_at_least("op_size", op_size, 1, "the ranks that share a product")
    if chunk_size < 2 * prefetch_depth:
        lower = f", or prefetch {chunk_size // 2}" if chunk_size > 1 else ""
        raise ValueError(
            f"`chunk_size` must be at least 2 * `prefetch_depth`, got {chunk_size} and "
            f"{prefetch_depth}: cut into {2 * prefetch_depth} pieces or more{lower}"
        )
    if chunk_size % op_size:
        above = -(-chunk_size // op_size) * op_size
        raise ValueError(
            f"`chunk_size` must be a multiple of the size of the axis op, got "
            f"{chunk_size} and {op_size}: each rank cuts its part into equally many "
            f"pieces, take {above}"
        )


def bubble_fraction(chunk_size: int, prefetch_depth: int) -> float:
    r"""Share of a product's pipeline that stands empty while it fills and drains.

    A piece passes through `prefetch_depth` places, one a turn, so n pieces take
    n + d - 1 turns, and of the d (n + d - 1) places in them n d are taken:

    .. math::
        \text{bubble} = \frac{d - 1}{n + d - 1}

    the formula of pipelines of microbatches (Huang et al. 2019, arXiv:1811.06965).
    Pieces twice as many as in flight keep it under a third.

    Args:
      chunk_size: n, pieces of a product, at least 1.
      prefetch_depth: d, pieces in flight, at least 1.

    Returns:
      A share in [0, 1): 0 is a pipeline that is always full.

    Raises:
      ValueError: a number below 1.

    Example:
      >>> import sfpo_jax as sfpo
      >>> sfpo.tuning.bubble_fraction(4, 2), sfpo.tuning.bubble_fraction(16, 1)
      (0.2, 0.0)
    """
    check_at_least("chunk_size", chunk_size, 1, "the pieces of a product")
    check_at_least("prefetch_depth", prefetch_depth, 1, "the pieces in flight")
    return (prefetch_depth - 1) / (chunk_size + prefetch_depth - 1)
