"""What goes wrong in a run, read from its records and its configuration.

Each rule looks for one fault and gives what it saw and the line of YAML to change. The
thresholds are set so that a healthy run, with the noise of small batches, gives none.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sfpo_jax.tuning._rules import bubble_fraction, tuned_chunk_size

Record = Mapping[str, Any]

_LATE = 0.6  # of the run, from where the published advice on oscillation applies
_CURE = 0.3  # published final sparsity against it
_BUSY = 0.8  # share of a pipeline's places, below which the chunk rule is advised
_FULL = 0.92  # of a device's memory
_WAITING = 0.2  # of a step, spent on the next batch


class Finding(NamedTuple):
    """A fault, as one rule sees it.

    Attributes:
      kind: "oscillation", "bubble", "residual", "variance", "still", "input", "memory".
      contender: of which optimizer's training; "" where it is the run's.
      evidence: what was seen, with numbers.
      advice: the line of YAML to change, and why it may help.
    """

    kind: str
    contender: str
    evidence: str
    advice: str

    def __str__(self) -> str:
        who = f" ({self.contender})" if self.contender else ""
        return f"{self.kind}{who}: {self.evidence}\n  -> {self.advice}"


class _Run(NamedTuple):
    """One contender's records, and those of the dense one beside it."""

    name: str
    records: list[Record]
    dense: list[Record]
    config: Mapping[str, Any]
    steps: int

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the records that have a number of this name."""
        return _series(self.records, name)

    def option(self, key: str, default: Any = None) -> Any:
        """A value of the configuration by dotted key."""
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    @property
    def freeze(self) -> int | None:
        """The first step that a record says was compressed, None for none."""
        steps = [r["step"] for r in self.records if r.get("is_compressed")]
        return min(steps) if steps else None


def diagnose(
    records: Sequence[Record], config: Mapping[str, Any] | None = None
) -> list[Finding]:
    """The faults that the records of a run show.

    Args:
      records: as `metrics.jsonl` of a run has them: `step`, `contender`, and numbers;
        those that a rule needs and does not find are no fault.
      config: the run's `config.yaml`, as nested mappings.

    Returns:
      One finding for each fault of each contender, none for a healthy run.

    Example:
      >>> import sfpo_jax as sfpo
      >>> records = [
      ...     {"step": t, "train_loss": 1 / t, "step_ms": 10.0, "input_ms": 6.0}
      ...     for t in range(1, 30)
      ... ]
      >>> print(sfpo.tuning.diagnose(records)[0])
      input: a step of 10 ms waits 6 ms for its batch (median of the second half)
        -> data.workers: more of them decode and shuffle while the devices compute
    """
    config = config or {}
    names = list(dict.fromkeys(r.get("contender", "") for r in records))
    mine = {n: [r for r in records if r.get("contender", "") == n] for n in names}
    dense = next((n for n in names if n.lower().startswith("dense")), None)
    found: list[Finding] = []
    for name in names:
        last = max((r["step"] for r in mine[name]), default=0)
        train = config.get("train", {})
        steps = max(last, train.get("steps", 0) if isinstance(train, Mapping) else 0)
        beside = [] if dense in (None, name) else mine[dense]
        run = _Run(name, mine[name], beside, config, steps)
        found += [f for rule in _RULES if (f := rule(run)) is not None]
    if (bubble := _bubble(_Run("", [], [], config, 0))) is not None:
        found.append(bubble)
    return found


def _oscillation(run: _Run) -> Finding | None:
    amplitude = _late_amplitude(run.records, run.steps)
    if amplitude is None:
        return None
    late, before = amplitude
    seen = (
        f"the loss swings by {late:.3g} after {100 * _LATE:.0f} % of the run, by "
        f"{before:.3g} in the part before"
    )
    rate = run.option("optimizer.learning_rate")
    lower = f"optimizer.learning_rate: {rate / 2:g}" if rate else "a lower rate"
    final = run.option("sparsity.final", _CURE)
    if not run.dense:
        is_dense = run.name.lower().startswith("dense")
        advice = f"{lower}: nothing is masked here"
        if not is_dense:
            advice = (
                "train.compare: true, to see if dense training swings too; if not, "
                f"sparsity.final: {max(_CURE, final):g}"
            )
    elif _late_amplitude(run.dense, run.steps) is not None:
        seen += "; dense training swings as well, so that masking is not the cause"
        advice = f"{lower}, or a longer decay"
    else:
        seen += "; dense training does not"
        if final < _CURE:
            advice = f"sparsity.final: {_CURE}, the published cure (it is {final:g})"
        else:
            advice = (
                "communication.compression.refresh_every: 16, or half of what it is: "
                f"the floor of the sparsity is {final:g} already"
            )
    return Finding("oscillation", run.name, seen, advice)


def _late_amplitude(
    records: Sequence[Record], steps: int
) -> tuple[float, float] | None:
    """(late, before) where the loss swings late and more than it did."""
    at, loss = _series(records, "train_loss")
    late = loss[at > _LATE * steps]
    before = loss[(at > (1 - _LATE) / 2 * steps) & (at <= _LATE * steps)]
    if len(late) < 8 or len(before) < 8:
        return None
    swings, other = _detrended(late), _detrended(before)
    turns = np.mean(np.diff(np.sign(np.diff(swings))) != 0)
    is_wide = swings.std() > 2 * other.std() and swings.std() > 0.05 * abs(late.mean())
    return (swings.std(), other.std()) if is_wide and turns >= 0.4 else None


def _detrended(values: np.ndarray) -> np.ndarray:
    places = np.arange(len(values))
    return values - np.polyval(np.polyfit(places, values, 2), places)


def _residual(run: _Run) -> Finding | None:
    freeze = run.freeze
    if freeze is None:
        return None
    at, residual = run.series("residual")
    _, momentum = run.series("momentum")
    if len(residual) != len(momentum):
        return None
    ratio = (residual / np.maximum(momentum, 1e-30))[at > freeze]
    if len(ratio) < 6:
        return None
    first, middle, last = (np.median(part) for part in np.array_split(ratio, 3))
    # It rises at first in every run, until as much leaves it as comes in.
    if last < 3 * first or last < 1.4 * middle:
        return None
    relaxation = run.option("communication.compression.relaxation", 1.0)
    advice = (
        "communication.compression.relaxation: 1.5, so that errors leave sooner"
        if relaxation < 1.5
        else "communication.compression.block_size: 512, for scales that fit "
        "better, or a lower optimizer.learning_rate"
    )
    seen = (
        f"what compression holds back grew from {first:.3g} to {last:.3g} times the "
        f"momentum since step {freeze}"
    )
    return Finding("residual", run.name, seen, advice)


def _variance(run: _Run) -> Finding | None:
    freeze = run.freeze
    refresh = run.option("communication.compression.refresh_every")
    # Without a configuration nothing says that the variance is not refreshed.
    if freeze is None or refresh != "none":
        return None
    at, variance = run.series("variance")
    warm = at < freeze
    if warm.sum() < 2:
        return None
    b2 = run.option("optimizer.b2", 0.999)
    corrected = variance[warm] / (1 - b2 ** at[warm])
    half = np.interp(at[warm][-1] / 2, at[warm], corrected)
    ratio = min(half, corrected[-1]) / max(half, corrected[-1], 1e-30)
    if ratio >= 0.5:
        return None
    return Finding(
        "variance",
        run.name,
        f"it was frozen at step {freeze} while it still changed: it was {ratio:.2f} of "
        f"its size between step {at[warm][-1] / 2:.0f} and {at[warm][-1]:.0f}",
        "communication.compression.refresh_every: 16, or warmup: auto",
    )


def _still(run: _Run) -> Finding | None:
    held = [r for r in run.records if isinstance(r.get("still"), list)]
    if not held or held[-1]["step"] < 2 or not held[-1]["still"]:
        return None
    names = held[-1]["still"]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return Finding(
        "still",
        run.name,
        f"never updated in {held[-1]['step']} steps: {', '.join(names[:3])}{more}",
        "model: find why their gradient is zero (a branch that is not used, a "
        "stop_gradient), or leave them out by optimizer.groups",
    )


def _input(run: _Run) -> Finding | None:
    at, waiting = run.series("input_ms")
    _, step = run.series("step_ms")
    half = at > run.steps / 2
    if len(waiting) != len(step) or half.sum() < 3:
        return None
    waits, takes = float(np.median(waiting[half])), float(np.median(step[half]))
    if waits < _WAITING * takes:
        return None
    return Finding(
        "input",
        run.name,
        f"a step of {takes:.3g} ms waits {waits:.3g} ms for its batch (median of the "
        "second half)",
        "data.workers: more of them decode and shuffle while the devices compute",
    )


def _memory(run: _Run) -> Finding | None:
    _, share = run.series("memory_share")
    if not len(share) or share.max() < _FULL:
        return None
    return Finding(
        "memory",
        run.name,
        f"the fullest device came to {100 * share.max():.0f} % of what JAX may use",
        "parallel.time.recompute: full, or parallel.microbatches: twice as many; a "
        "longer sequence or another batch may not fit",
    )


def _bubble(run: _Run) -> Finding | None:
    pieces = run.option("parallel.operator.chunk_size")
    depth = run.option("parallel.operator.prefetch_depth")
    ranks = run.option("parallel.mesh.op", 1)
    if not (isinstance(pieces, int) and isinstance(depth, int)) or ranks <= 1:
        return None
    busy = 1 - bubble_fraction(pieces, depth)
    if busy >= _BUSY:
        return None
    # n pieces with d in flight are busy for n / (n + d - 1).
    wanted = next(
        n
        for n in itertools.count(tuned_chunk_size(pieces, depth, ranks), ranks)
        if 1 - bubble_fraction(n, depth) >= _BUSY
    )
    return Finding(
        "bubble",
        "",
        f"{pieces} pieces with {depth} in flight keep the devices {100 * busy:.0f} % "
        "busy",
        f"parallel.operator.chunk_size: {wanted}",
    )


_RULES: tuple[Callable[[_Run], Finding | None], ...] = (
    _oscillation,
    _residual,
    _variance,
    _still,
    _input,
    _memory,
)


def _series(records: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [
        (r["step"], r[name])
        for r in records
        if isinstance(r.get(name), (int, float)) and np.isfinite(r[name])
    ]
    if not pairs:
        return np.zeros(0), np.zeros(0)
    at, values = np.array(pairs, float).T
    return at, values
