"""Rules for the numbers of a run: batch, learning rate, sparsity, steps, pieces.

`python -m sfpo_jax tune` applies them to a configuration.
"""

import math

from sfpo_jax._validate import check_at_least, check_positive, check_range

_USABLE = 0.8  # of a device's memory; the rest is for what no plan foresees
_ALONE, _MANY = 0.7, 0.5  # published base sparsities of one device and of eight


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


def optimal_batch_size(
    gpu_memory: float,
    memory_per_sample: float,
    global_batch: float,
    local_batch_base: float,
    *,
    fixed: float = 0.0,
) -> int:
    r"""The batch that memory and the square-root rule allow.

    .. math::
        \min\left(
        \frac{0.8\,\text{gpu\_memory} - \text{fixed}}{\text{memory\_per\_sample}},
        \ \sqrt{\text{global\_batch}}\cdot\text{local\_batch\_base}\right)

    rounded down. The published rule of SFPO is that of `fixed` = 0, which takes
    parameters and optimizer states for a part of the samples;
    `sfpo_jax.memory.measure_batch` finds both numbers.

    Args:
      gpu_memory: bytes of one device; a fifth is left free.
      memory_per_sample: bytes that one more sample takes.
      global_batch: samples of all devices, before it is tuned.
      local_batch_base: samples a device is known to train well with.
      fixed: bytes that are taken whatever the batch.

    Returns:
      Samples, at least 1.

    Raises:
      ValueError: a number that is not positive, or memory for not even one sample.

    Example:
      >>> import sfpo_jax as sfpo
      >>> sfpo.tuning.optimal_batch_size(
      ...     80e9, 0.5e9, global_batch=64, local_batch_base=8
      ... )
      64
      >>> sfpo.tuning.optimal_batch_size(80e9, 2e9, 64, 8, fixed=10e9)
      27
    """
    check_positive("global_batch", global_batch, "samples of all devices")
    check_positive("local_batch_base", local_batch_base, "samples of one device")
    fits = batch_that_fits(gpu_memory, memory_per_sample, fixed=fixed)
    return max(1, min(fits, int(math.sqrt(global_batch) * local_batch_base)))


def batch_that_fits(
    gpu_memory: float, memory_per_sample: float, *, fixed: float = 0.0
) -> int:
    """The first half of `optimal_batch_size`: (0.8 gpu_memory - fixed) / a sample's.

    Args:
      gpu_memory, memory_per_sample, fixed: as there.

    Returns:
      Samples of one device, at least 1.

    Raises:
      ValueError: as there.

    Example:
      >>> import sfpo_jax as sfpo
      >>> sfpo.tuning.batch_that_fits(80e9, 0.5e9, fixed=24e9)
      80
    """
    check_positive("gpu_memory", gpu_memory, "bytes of one device")
    check_positive("memory_per_sample", memory_per_sample, "bytes")
    check_at_least("fixed", fixed, 0, "bytes taken whatever the batch")
    fits = (_USABLE * gpu_memory - fixed) / memory_per_sample
    if fits < 1:
        raise ValueError(
            f"`gpu_memory` {gpu_memory / 1e9:.4g} GB holds not one sample: four fifths "
            f"of it, less `fixed` {fixed / 1e9:.4g} GB, are under `memory_per_sample` "
            f"{memory_per_sample / 1e9:.4g} GB. Shard the states, recompute, or take a "
            "larger device."
        )
    return int(fits)


def scale_learning_rate(base: float, batch: float, base_batch: float) -> float:
    r"""The learning rate for another batch size: base * sqrt(batch / base_batch).

    The rule for optimizers that divide by the gradient's own size, as Adam does
    (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", https://arxiv.org/abs/2205.10287).

    Args:
      base: the learning rate at `base_batch`.
      batch: samples a step.
      base_batch: samples a step that `base` was found for.

    Raises:
      ValueError: a number that is not positive.

    Example:
      >>> import sfpo_jax as sfpo
      >>> f"{sfpo.tuning.scale_learning_rate(2e-5, batch=64, base_batch=8):.3g}"
      '5.66e-05'
    """
    check_positive("base", base, "a learning rate")
    check_positive("batch", batch, "samples a step")
    check_positive("base_batch", base_batch, "samples a step")
    return base * math.sqrt(batch / base_batch)


def sparsity_for(cards: int) -> float:
    """The base sparsity for a number of devices: 0.7 for one, 0.5 from eight on.

    The mean over more devices has less noise, and masks lose more of it. The two ends
    are published; between them it falls by 1/15 with each doubling.

    Args:
      cards: devices of the batch axes, at least 1.

    Raises:
      ValueError: less than one.

    Example:
      >>> import sfpo_jax as sfpo
      >>> [round(sfpo.tuning.sparsity_for(n), 3) for n in (1, 2, 4, 8, 64)]
      [0.7, 0.633, 0.567, 0.5, 0.5]
    """
    check_at_least("cards", cards, 1, "devices that share the batch")
    doublings = min(math.log2(cards), 3.0)
    return _ALONE - (_ALONE - _MANY) * doublings / 3.0


def extend_steps(steps: int, share: float = 0.15) -> int:
    """Steps of a run that reaches with SFPO what `steps` reach densely.

    Published: 10 to 20 % more.

    Args:
      steps: of the dense run.
      share: what is added, from 0.1 to 0.2.

    Raises:
      ValueError: `steps` under 1 or a share outside the published range.

    Example:
      >>> import sfpo_jax as sfpo
      >>> sfpo.tuning.extend_steps(1000), sfpo.tuning.extend_steps(1000, share=0.1)
      (1150, 1100)
    """
    check_at_least("steps", steps, 1, "the steps of the dense run")
    check_range("share", share, 0.1, 0.2, "of the steps, which is added")
    # Floats such as 0.1 are a little more than they say.
    return math.ceil(round(steps * (1 + share), 6))


def layer_transfers(shard: str = "none", *, is_compressed: bool, is_exact: bool) -> int:
    """Transfers of one layer in a layered step, and so the `pipeline_depth` to take.

    Two transfers of a layer in the same turn of the backward loop wait for each other,
    and the second has no product to run under: each wants a turn of its own. A depth
    beyond them changes nothing.

    Args:
      shard: "none", "states" or "weights", as the step takes it.
      is_compressed: whether signs go there and back over some axis.
      is_exact: whether gradients are reduced exactly over some axis; shards are.

    Raises:
      ValueError: another `shard`.

    Example:
      >>> import sfpo_jax as sfpo
      >>> sfpo.tuning.layer_transfers(is_compressed=False, is_exact=True)
      1
      >>> sfpo.tuning.layer_transfers("states", is_compressed=True, is_exact=False)
      4
    """
    if shard not in ("none", "states", "weights"):
        raise ValueError(
            f'`shard` must be "none", "states" or "weights", got {shard!r}.'
        )
    scattered = int(is_exact or shard != "none")
    return scattered + 2 * is_compressed + int(shard == "states")


def tuned_chunk_size(chunk_size: int, prefetch_depth: int, op_size: int = 1) -> int:
    """The smallest number of pieces from `chunk_size` on that the chunk rule allows.

    Args:
      chunk_size, prefetch_depth, op_size: as in `check_chunk_size`.

    Raises:
      ValueError: a number below 1.

    Example:
      >>> import sfpo_jax as sfpo
      >>> sfpo.tuning.tuned_chunk_size(2, prefetch_depth=3, op_size=4)
      8
    """
    check_at_least("chunk_size", chunk_size, 1, "the pieces of a product")
    check_at_least("prefetch_depth", prefetch_depth, 1, "the pieces in flight")
    check_at_least("op_size", op_size, 1, "the ranks that share a product")
    return -(-max(chunk_size, 2 * prefetch_depth) // op_size) * op_size
