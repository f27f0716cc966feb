"""From sections of the configuration to an Optax optimizer."""

import functools
from typing import Any

import numpy as np
import optax

from sfpo_jax import compression
from sfpo_jax.collectives import AxisName
from sfpo_jax.schedules import cosine_sparsity
from sfpo_jax.training._groups import decayed, scale_by_groups
from sfpo_jax.training._layout_sections import Communication, Compression, Memory
from sfpo_jax.training._phases import step_phases
from sfpo_jax.training._sections import Optimizer, Sparsity
from sfpo_jax.transforms import (
    adamw8bit,
    clip_by_global_norm,
    compressed_mean,
    low_rank_mean,
    onebit_adam,
    sfpo,
    sparsify,
    zero_one_adam,
)

ONE_BIT = ("1bit_adam", "sparse_1bit")


def make_learning_rate(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """The step size over a run of `steps`: linear rise, then the named fall.

    Example:
      >>> rate = make_learning_rate(Optimizer(learning_rate=1.0, warmup=0.1), 100)
      >>> [round(float(rate(t)), 3) for t in (0, 9, 10, 55, 100)]
      [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    peak, rise = optimizer.learning_rate, round(optimizer.warmup * steps)
    fall = max(1, steps - rise)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, fall),
        "linear": optax.linear_schedule(peak, 0.0, fall),
        "constant": optax.constant_schedule(peak),
    }[optimizer.schedule]
    if rise == 0:
        return after
    # Step 0 already moves: a first step of size 0 would be a step lost.
    before = optax.linear_schedule(peak / rise, peak, max(1, rise - 1))
    return optax.join_schedules([before, after], [rise])


def warmup_steps(communication: Communication, steps: int) -> int | str:
    """Dense steps before the freeze, at least 1, or "auto"."""
    share = communication.compression.warmup
    return share if isinstance(share, str) else max(1, round(share * steps))


def sparsity_curve(
    sparsity: Sparsity, communication: Communication, steps: int, freeze: int | None
) -> np.ndarray:
    """Share of entries that `make_optimizer` masks in each step, for reports.

    Args:
      sparsity: the section.
      communication: the section; only 1bit_adam masks.
      steps: steps of the run.
      freeze: first compressed step, None where there is none (yet).

    Returns:
      float32[steps].
    """
    is_masked = communication.compression.algorithm == "1bit_adam"
    if sparsity.schedule == "none" or not is_masked:
        return np.zeros(steps, np.float32)
    base, final = _ends(sparsity)
    begin = 0
    if sparsity.begin == "freeze":
        begin = steps if freeze is None else min(freeze, steps)
    schedule = cosine_sparsity(base, steps, final, begin=begin)
    curve = np.asarray(schedule(np.arange(steps, dtype=np.int32)))
    if sparsity.begin == "start":
        return curve
    # A step that brings the variance up to date needs the whole gradient.
    names = step_phases(communication, steps, freeze)
    return np.where([name == "compressed" for name in names], curve, 0)


def make_dense_optimizer(
    optimizer: Optimizer, steps: int, memory: Memory | None = None
) -> optax.GradientTransformation:
    """AdamW on the exact mean, which the train step makes: the reference.

    Args:
      optimizer: the section.
      steps: steps of the run.
      memory: dtypes of the moments; None = float32. Those of Optax's AdamW make it,
        others `adamw8bit`.
    """
    adamw = _in_groups(_adamw(optimizer, steps, memory or Memory()), optimizer)
    if optimizer.clip_norm == "none":
        return adamw
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), adamw)


def make_optimizer(
    optimizer: Optimizer,
    sparsity: Sparsity,
    communication: Communication,
    memory: Memory,
    *,
    steps: int,
    axis_name: AxisName,
) -> optax.GradientTransformation:
    """The optimizer that `communication.compression.algorithm` names.

    Args:
      optimizer: step sizes and decays.
      sparsity: masking of gradients, for 1bit_adam.
      communication: what is sent.
      memory: dtypes of the states.
      steps: steps of the run.
      axis_name: mesh axis (or axes) of data parallelism; None is one worker.

    Returns:
      The transformation. All but "none" average over the axis themselves.

    Raises:
      ValueError: values that do not go together, with the reason.
    """
    chosen = communication.compression
    if chosen.algorithm == "auto":
        raise ValueError(
            "`communication.compression.algorithm` is still auto: `settle` replaces it "
            "by what is fastest over the links."
        )
    _check_memory(memory, chosen)
    if chosen.algorithm == "none":
        return make_dense_optimizer(optimizer, steps, memory)
    feedback = {
        "error_feedback": chosen.error_feedback,
        "error_dtype": memory.error_dtype,
    }
    shared = {**feedback, "bucket_size": communication.bucket_size}
    if chosen.algorithm in ONE_BIT:
        shared |= {
            "b1": optimizer.b1,
            "b2": optimizer.b2,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "mask": functools.partial(decayed, optimizer.groups),
            "mu_dtype": _none_if_float32(memory.mu_dtype),
            "nu_dtype": memory.nu_dtype,
            "compressor": _compressor(communication),
            "refresh_every": _none(chosen.refresh_every),
        }
        make = _one_bit if chosen.sync_every == 1 else _zero_one
        reduced = make(optimizer, sparsity, communication, shared, steps, axis_name)
    elif chosen.algorithm == "low_rank":
        mean = low_rank_mean(chosen.rank, axis_name, **feedback)
        reduced = optax.chain(mean, _adamw(optimizer, steps, memory))
    else:
        mean = compressed_mean(_compressor(communication), axis_name, **shared)
        reduced = optax.chain(mean, _adamw(optimizer, steps, memory))
    reduced = _in_groups(reduced, optimizer)
    if optimizer.clip_norm == "none":
        return reduced
    clip = clip_by_global_norm(optimizer.clip_norm, axis_name=axis_name)
    return optax.chain(clip, reduced)


def _in_groups(
    tx: optax.GradientTransformation, optimizer: Optimizer
) -> optax.GradientTransformation:
    """`tx` with the rates of the groups; itself where there are none."""
    return (
        optax.chain(tx, scale_by_groups(optimizer.groups)) if optimizer.groups else tx
    )


def _adamw(
    optimizer: Optimizer, steps: int, memory: Memory
) -> optax.GradientTransformation:
    shared: dict[str, Any] = {
        "learning_rate": make_learning_rate(optimizer, steps),
        "b1": optimizer.b1,
        "b2": optimizer.b2,
        "eps": optimizer.eps,
        "mu_dtype": _none_if_float32(memory.mu_dtype),
        "weight_decay": optimizer.weight_decay,
        "mask": functools.partial(decayed, optimizer.groups),
    }
    # Optax's own where it can, for it is the reference.
    if memory.mu_dtype == "int8" or memory.nu_dtype != "float32":
        return adamw8bit(**shared, nu_dtype=memory.nu_dtype)
    return optax.adamw(**shared)


def _none_if_float32(dtype: str) -> str | None:
    """None, which is float64 where the parameters are, for the default."""
    return None if dtype == "float32" else dtype


def _one_bit(
    optimizer: Optimizer,
    sparsity: Sparsity,
    communication: Communication,
    shared: dict[str, Any],
    steps: int,
    axis_name: AxisName,
) -> optax.GradientTransformation:
    """1-bit Adam, its gradients masked in the order that the configuration asks for."""
    rate = make_learning_rate(optimizer, steps)
    base, final = _ends(sparsity)
    timing: dict[str, Any] = {
        "warmup_steps": warmup_steps(communication, steps),
        "axis_name": axis_name,
    }
    is_sparse_wire = communication.compression.algorithm == "sparse_1bit"
    if is_sparse_wire or sparsity.schedule == "none":
        return onebit_adam(rate, total_steps=steps, **timing, **shared)
    if sparsity.begin == "freeze":
        return sfpo(
            rate,
            steps,
            base_sparsity=base,
            final_sparsity=final,
            min_size=sparsity.min_size,
            sparsity_feedback=sparsity.error_feedback,
            **timing,
            **shared,
        )
    masking = sparsify(
        cosine_sparsity(base, steps, final),
        min_size=sparsity.min_size,
        error_feedback=sparsity.error_feedback,
        error_dtype=shared["error_dtype"],
        axis_name=axis_name,
    )
    return optax.chain(
        masking, onebit_adam(rate, total_steps=steps, **timing, **shared)
    )


def _ends(sparsity: Sparsity) -> tuple[float, float]:
    is_constant = sparsity.schedule == "constant"
    return sparsity.base, sparsity.base if is_constant else sparsity.final


def _compressor(communication: Communication) -> compression.Compressor:
    chosen = communication.compression
    size = {} if chosen.block_size == "auto" else {"block_size": chosen.block_size}
    if chosen.algorithm == "bf16":
        return compression.bfloat16()
    if chosen.algorithm == "int8":
        return compression.int8(**size)
    relaxed = {"relaxation": chosen.relaxation, **size}
    if chosen.algorithm == "sparse_1bit":
        return compression.sparse_sign(chosen.density, **relaxed)
    return compression.sign(**relaxed)


def _none(value: Any) -> Any:
    return None if value == "none" else value


def _zero_one(
    optimizer: Optimizer,
    sparsity: Sparsity,
    communication: Communication,
    shared: dict[str, Any],
    steps: int,
    axis_name: AxisName,
) -> optax.GradientTransformation:
    """0/1 Adam, which sends once for several steps."""
    chosen = communication.compression
    key, is_masked = "communication.compression.sync_every", sparsity.schedule != "none"
    if chosen.algorithm == "1bit_adam" and is_masked:
        raise ValueError(
            f"`sparsity.schedule` must be none with `{key}` {chosen.sync_every}, got "
            f"{sparsity.schedule}: a mask saves signs no bytes, and steps that a rank "
            "takes by itself need its whole gradient."
        )
    states = {name: shared.pop(name) for name in ("mu_dtype", "nu_dtype")}
    for name, dtype in states.items():
        if dtype not in (None, "float32"):
            raise ValueError(
                f"`memory.{name}` must be float32 with `{key}` {chosen.sync_every}, "
                f"got {dtype}."
            )
    return zero_one_adam(
        make_learning_rate(optimizer, steps),
        warmup_steps=warmup_steps(communication, steps),
        total_steps=steps,
        axis_name=axis_name,
        sync_every=chosen.sync_every,
        double_every=_none(chosen.double_every),
        **shared,
    )


def _check_memory(memory: Memory, chosen: Compression) -> None:
    """A packed moment needs a momentum that arrives packed, in each step."""
    algorithm = chosen.algorithm
    if algorithm in ONE_BIT:
        if memory.mu_dtype == "packed" and chosen.refresh_every != "none":
            raise ValueError(
                "`communication.compression.refresh_every` must be none with "
                f"`memory.mu_dtype` packed, got {chosen.refresh_every}: the moment of "
                "a dense step does not fit in one bit."
            )
        return
    names = " or ".join(ONE_BIT)
    if memory.mu_dtype == "packed":
        raise ValueError(
            "`memory.mu_dtype` must be float32, bfloat16 or int8 with "
            f"`communication.compression.algorithm` {algorithm}, got packed: only the "
            f"momentum of {names} arrives packed."
        )
