"""The table and the picture of `experiments.bench.convergence`."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

Outcome = Mapping[str, Any]

_CONFIDENCE = 0.95
_NEAR, _FAR, _DENSE = "#d9480f", "#1971c2", "#868e96"


class Interval(NamedTuple):
    """A mean and the 95 % interval of Student's t around it."""

    low: float
    mean: float
    high: float


class Summary(NamedTuple):
    """A contender at its best rate, over the paired seeds."""

    task: str
    contender: str
    rate: float
    extension: float  # steps over those of the reference
    seeds: int
    accuracy: float  # mean over the seeds
    loss: float  # likewise, of the test
    gap: Interval  # accuracy minus that of the reference, points
    ratio: Interval  # test loss over that of the reference
    bits: float  # wire bits a parameter, of a compressed step
    mean_bits: float  # likewise, of all steps
    dense_share: float  # of the steps
    sparsity: float  # share masked, mean from the first masked step on


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % interval of two or more independent values.

    Example:
      >>> low, mean, high = interval([1.0, 2.0, 3.0])
      >>> round(low, 2), mean, round(high, 2)
      (-0.48, 2.0, 4.48)
    """
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)) * error
    return Interval(mean - half, mean, mean + half)


def summarize(outcomes: Sequence[Outcome]) -> list[Summary]:
    """One summary a contender and length, in the order they were first run.

    The reference of a task is what was run first. Seed 0 chose the rates and is left
    out; each other run is compared with the reference's of the same seed.
    """
    tasks = list(dict.fromkeys(o["task"] for o in outcomes))
    return [
        summary
        for task in tasks
        for summary in _summarize_task([o for o in outcomes if o["task"] == task])
    ]


def _summarize_task(outcomes: Sequence[Outcome]) -> list[Summary]:
    reference = outcomes[0]["contender"]
    reported = [o for o in outcomes if o["seed"] > 0]
    twins = {o["seed"]: o for o in reported if o["contender"] == reference}
    names = list(dict.fromkeys(o["contender"] for o in outcomes))
    summaries = []
    for name in names:
        mine = [o for o in reported if o["contender"] == name]
        for steps in sorted({o["steps"] for o in mine}):
            runs = [o for o in mine if o["steps"] == steps and o["seed"] in twins]
            if len(runs) < 2:
                continue
            pairs = [(o, twins[o["seed"]]) for o in runs]
            gap = interval(
                [100 * (o["test_accuracy"] - t["test_accuracy"]) for o, t in pairs]
            )
            logs = interval(
                [math.log(o["test_loss"] / t["test_loss"]) for o, t in pairs]
            )
            summaries.append(
                Summary(
                    task=runs[0]["task"],
                    contender=name,
                    rate=runs[0]["rate"],
                    extension=steps / outcomes[0]["steps"],
                    seeds=len(runs),
                    accuracy=statistics.fmean(o["test_accuracy"] for o in runs),
                    loss=statistics.fmean(o["test_loss"] for o in runs),
                    gap=gap,
                    ratio=Interval(*map(math.exp, logs)),
                    bits=runs[0]["bits"],
                    mean_bits=runs[0]["mean_bits"],
                    dense_share=runs[0]["dense_share"],
                    sparsity=runs[0]["mean_sparsity"],
                )
            )
    return summaries


def label(summary: Summary) -> str:
    """The contender, and how many steps more it had."""
    more = round(100 * (summary.extension - 1))
    is_named = "more steps" in summary.contender
    return summary.contender + (f", +{more} % steps" if more and not is_named else "")


def _fewer(summary: Summary, reference: Summary) -> str:
    """Says where a row stands on other seeds than the reference does."""
    return "" if summary.seeds == reference.seeds else f" ({summary.seeds} seeds)"


def markdown(summaries: Sequence[Summary]) -> str:
    """A table for each task; its first row is the reference."""
    parts = []
    for task in dict.fromkeys(s.task for s in summaries):
        lines = [
            "| contender | best rate | accuracy, % | gap, points | test loss "
            "| loss ratio | masked | dense steps | bits/param | mean bits |",
            "| :-- | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
        ]
        mine = [s for s in summaries if s.task == task]
        for s in mine:
            is_reference = s is mine[0]
            gap = "" if is_reference else _signed(s.gap)
            ratio = "" if is_reference else _ratio(s.ratio)
            lines.append(
                f"| {label(s)}{_fewer(s, mine[0])} | {s.rate:g} "
                f"| {100 * s.accuracy:.2f} | {gap} | {s.loss:.4f} | {ratio} "
                f"| {s.sparsity:.0%} | {s.dense_share:.0%} "
                f"| {s.bits:.2f} | {s.mean_bits:.1f} |"
            )
        parts.append(
            f"**{task.capitalize()}**, {mine[0].seeds} paired seeds\n\n"
            + "\n".join(lines)
        )
    parts.append(
        "Means over seeds that chose no rate; differences to dense AdamW of the same "
        'seed, with the 95 % interval of the mean. Rows that begin with "SFPO:" change '
        "one thing, at SFPO's rate. Masked: share of gradient entries, from the first "
        "masked step on. Dense steps: warm-up and refreshes. Bits: what a device sends "
        "for each parameter in a compressed step, and in the mean over the run."
    )
    return "\n\n".join(parts) + "\n"


def overview(summaries: Sequence[Summary]) -> str:
    """One table of all contenders and tasks, for a reader in a hurry."""
    tasks = list(dict.fromkeys(s.task for s in summaries))
    first = {task: next(s for s in summaries if s.task == task) for task in tasks}
    heads = ["image: accuracy, points" if t == "image" else f"{t}: loss" for t in tasks]
    lines = [
        f"| | {' | '.join(heads)} | bits/param | over the run |",
        f"| :-- |{' --: |' * (len(tasks) + 2)}",
    ]
    for name in dict.fromkeys(label(s) for s in summaries):
        if name.startswith("SFPO: "):
            continue
        found = {s.task: s for s in summaries if label(s) == name}
        cells = [_cell(found.get(task), first[task]) for task in tasks]
        bits = max(s.bits for s in found.values())
        mean_bits = max(s.mean_bits for s in found.values())
        fewer = "".join({_fewer(s, first[task]) for task, s in found.items()})
        lines.append(
            f"| {name}{fewer} | {' | '.join(cells)} | {bits:.1f} | {mean_bits:.1f} |"
        )
    seeds = ", ".join(f"{first[task].seeds} on {task}" for task in tasks)
    lines += [
        "",
        f"Test results over paired seeds ({seeds}) with the 95 % interval of the mean, "
        "each contender at its own best learning rate. Bits a parameter: what a device "
        "sends in a compressed step, and in the mean over all steps.",
    ]
    return "\n".join(lines) + "\n"


def _cell(summary: Summary | None, reference: Summary) -> str:
    """What counts in a task: accuracy of images, otherwise the loss."""
    if summary is None:
        return "not run"
    is_image = summary.task == "image"
    if summary is reference:
        return f"{100 * summary.accuracy:.2f} %" if is_image else f"{summary.loss:.4f}"
    return _signed(summary.gap) if is_image else "x " + _ratio(summary.ratio)


def save_picture(path: Path, summaries: Sequence[Summary]) -> None:
    """Draws the intervals: accuracy gaps of the images, loss ratios of the text."""
    tasks = list(dict.fromkeys(s.task for s in summaries))
    rows = max(sum(s.task == task for s in summaries) for task in tasks)
    size = (6.4 * len(tasks), 1.5 + 0.27 * rows)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    for task, axis in zip(
        tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True
    ):
        mine = [s for s in summaries if s.task == task][1:]
        if task == "image":
            spans = [s.gap for s in mine]
            _forest(axis, mine, spans, 0.0, (-0.5, -1.0))
            axis.set_xlabel("test accuracy minus dense AdamW's, points")
        else:
            spans = [s.ratio for s in mine]
            _forest(axis, mine, spans, 1.0, (1.01, 1.02))
            axis.set_xlabel("test loss over dense AdamW's")
        axis.set_title(task)
        # Rows of all tasks are as far apart.
        axis.set_ylim(rows - 1.5, -0.5)
    figure.legend(
        handles=_legend(),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path)


def _legend() -> list[Line2D]:
    span = {"lw": 2, "marker": "o", "ms": 4.5}
    return [
        Line2D([], [], color=_DENSE, lw=1, label="dense AdamW"),
        Line2D([], [], color=_NEAR, **span, label="as many steps, 95 % interval"),
        Line2D([], [], color=_FAR, **span, label="with more steps"),
        Line2D([], [], color=_NEAR, lw=1, ls=":", label="wanted of as many steps"),
        Line2D([], [], color=_FAR, lw=1, ls=":", label="wanted of 15 % more"),
    ]


def _forest(
    axis: Axes,
    summaries: Sequence[Summary],
    spans: Sequence[Interval],
    origin: float,
    bounds: tuple[float, float],
) -> None:
    for place, (s, span) in enumerate(zip(summaries, spans, strict=True)):
        color = _FAR if s.extension > 1 else _NEAR
        axis.plot([span.low, span.high], [place, place], color=color, lw=2, alpha=0.7)
        axis.plot([span.mean], [place], marker="o", ms=4.5, color=color)
    axis.axvline(origin, color=_DENSE, lw=1)
    for bound, color in zip(bounds, (_FAR, _NEAR), strict=True):
        axis.axvline(bound, color=color, lw=1, ls=":")
    axis.set_yticks(range(len(summaries)), [label(s) for s in summaries], fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)


def _signed(span: Interval) -> str:
    return f"{span.mean:+.2f} [{span.low:+.2f}, {span.high:+.2f}]"


def _ratio(span: Interval) -> str:
    return f"{span.mean:.3f} [{span.low:.3f}, {span.high:.3f}]"
