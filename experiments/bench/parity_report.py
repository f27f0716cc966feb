"""The table and the picture of `experiments.bench.parity`."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

Outcome = Mapping[str, Any]

_COLORS = ("#4a5568", "#d9480f", "#862e9c", "#1971c2", "#2f9e44")


class Summary(NamedTuple):
    """A variant at its best rate, over the reported seeds."""

    variant: str
    rate: float
    accuracies: list[float]  # one a seed
    loss: float  # test loss, mean
    bits: float  # wire bits a parameter and step
    sparsity: float  # share masked after the freeze, mean over its steps

    @property
    def accuracy(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.accuracies)


def summarize(
    outcomes: Sequence[Outcome], best: Mapping[str, float], seeds: int
) -> list[Summary]:
    """One summary a variant, in the order of `best`.

    Args:
      outcomes: all runs.
      best: rate of each variant.
      seeds: seeds 1 to this one are reported; seed 0 chose the rate.
    """
    summaries = []
    for variant, rate in best.items():
        runs = [
            o
            for o in outcomes
            if o["variant"] == variant and o["rate"] == rate and 1 <= o["seed"] <= seeds
        ]
        summaries.append(
            Summary(
                variant,
                rate,
                [o["test_accuracy"] for o in runs],
                statistics.fmean(o["test_loss"] for o in runs),
                runs[0]["bits_per_parameter"],
                runs[0]["mean_sparsity"],
            )
        )
    return summaries


def markdown(summaries: Sequence[Summary]) -> str:
    """The table; the first variant is the reference."""
    lines = [
        "| variant | best rate | accuracy | gap, points | test loss | masked "
        "| bits/param |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
    ]
    for s in summaries:
        spread = statistics.stdev(s.accuracies) if len(s.accuracies) > 1 else 0.0
        gap = 100 * (s.accuracy - summaries[0].accuracy)
        lines.append(
            f"| {s.variant} | {s.rate:g} | {100 * s.accuracy:.2f} ± {100 * spread:.2f} "
            f"| {gap:+.2f} | {s.loss:.4f} | {s.sparsity:.0%} | {s.bits:.2f} |"
        )
    seeds = len(summaries[0].accuracies)
    lines += [
        "",
        f"Test accuracy in percent, mean and standard deviation over {seeds} seeds, "
        "none of which chose a rate. Masked: share of gradient entries, mean over the "
        "steps after the freeze. Bits a parameter: sent by a device in a step after "
        "the freeze, all collectives of the compiled program included.",
    ]
    return "\n".join(lines) + "\n"


def save_picture(
    path: Path, outcomes: Sequence[Outcome], summaries: Sequence[Summary]
) -> None:
    """Draws the search over rates, and the seeds at the best rates."""
    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=150)
    search, seeds = figure.subplots(1, 2, width_ratios=(1, 1.3))
    for place, (summary, color) in enumerate(zip(summaries, _COLORS, strict=False)):
        runs = [o for o in outcomes if o["variant"] == summary.variant]
        found = sorted((o["rate"], o["test_accuracy"]) for o in runs if o["seed"] == 0)
        rates, shares = zip(*found, strict=True)
        search.plot(rates, [100 * a for a in shares], marker="o", ms=4, color=color)
        points = [100 * a for a in summary.accuracies]
        seeds.scatter(points, [place] * len(points), color=color, alpha=0.55)
        seeds.scatter([100 * summary.accuracy], [place], color=color, marker="|", s=500)
    search.set_xscale("log")
    search.set_xticks(sorted({o["rate"] for o in outcomes}))
    search.xaxis.set_minor_locator(NullLocator())
    search.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    search.set_xlabel("learning rate")
    search.set_title("search, one seed")
    search.set_ylabel("test accuracy, %")
    seeds.set_yticks(range(len(summaries)), [s.variant for s in summaries])
    seeds.invert_yaxis()
    seeds.set_xlabel("test accuracy, %")
    seeds.set_title(f"best rate, {len(summaries[0].accuracies)} other seeds and mean")
    for axis in (search, seeds):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path)
