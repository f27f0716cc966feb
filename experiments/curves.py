"""The picture of a run: loss, accuracy, masking and wire bytes over the steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.contender import Result
from sfpo_jax.units import format_bytes


class _Style(NamedTuple):
    color: str
    linestyle: str


# Apart for eyes that do not tell red from green, and in print without colour.
_STYLES = (_Style("#4a5568", "--"), _Style("#d9480f", "-"))


def save_curves(path: Path, results: Sequence[Result], title: str) -> None:
    """Draws the contenders of one run into a PNG.

    Args:
      path: where to.
      results: one or two, the reference first.
      title: above the panels.
    """
    # A figure of its own, not pyplot's: no display, and nothing global is touched.
    figure = Figure(figsize=(10, 7), layout="constrained", dpi=150)
    figure.suptitle(title, fontsize=13)
    axes = figure.subplots(2, 2, sharex=True)
    styled = list(zip(results, _STYLES[-len(results) :], strict=True))
    for result, style in styled:
        _loss(axes[0, 0], result, style)
        _accuracy(axes[0, 1], result, style)
        _sparsity(axes[1, 0], result, style)
        _wire(axes[1, 1], result, style)
    # Where in its panel the mark of the freeze crosses no curve.
    for axis, place in zip(
        axes.flat, ("bottom", "top", "bottom", "center"), strict=True
    ):
        _dress(axis, results, place)
    axes[0, 0].legend(frameon=False)
    axes[0, 1].legend(frameon=False, loc="lower right")
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(path)


def _series(result: Result, name: str) -> tuple[list[int], list[float]]:
    found = [r for r in result.records if name in r]
    return [r["step"] for r in found], [r[name] for r in found]


def _loss(axis: Axes, result: Result, style: _Style) -> None:
    steps, losses = _series(result, "train_loss")
    axis.plot(steps, losses, label=result.name, color=style.color, ls=style.linestyle)
    axis.set_title("training loss")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _accuracy(axis: Axes, result: Result, style: _Style) -> None:
    steps, shares = _series(result, "test_accuracy")
    axis.plot(
        steps,
        [100 * share for share in shares],
        label=f"{result.name}: {result.test_accuracy:.1%}",
        marker="o",
        ms=4,
        color=style.color,
        ls=style.linestyle,
    )
    axis.set_title("test accuracy")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))


def _sparsity(axis: Axes, result: Result, style: _Style) -> None:
    axis.plot(
        np.arange(len(result.sparsity)),
        100 * result.sparsity,
        color=style.color,
        ls=style.linestyle,
    )
    axis.set_title("gradient entries masked")
    axis.set_ylim(-3, 103)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))


def _wire(axis: Axes, result: Result, style: _Style) -> None:
    steps = len(result.sparsity)
    axis.plot(np.arange(steps), result.sent, color=style.color, ls=style.linestyle)
    # Dense steps stand above a line of compressed ones, and would cross its name.
    is_below = min(result.wire_bytes) < max(result.wire_bytes)
    axis.annotate(
        f"{result.name}: {format_bytes(result.wire_bytes[-1], digits=3)}, "
        f"{result.bits_per_parameter:.2f} bits a parameter",
        (steps, result.wire_bytes[-1]),
        xytext=(0, -5 if is_below else 5),
        textcoords="offset points",
        ha="right",
        va="top" if is_below else "bottom",
        fontsize=9,
        color=style.color,
    )
    axis.set_title("sent by a device in a step")
    # A single device sends nothing, which no logarithm can show.
    axis.set_yscale("log" if result.sent.all() else "linear")
    axis.margins(y=0.15)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(y)))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _dress(axis: Axes, results: Sequence[Result], place: str) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    for result in results:
        if result.freeze is None:
            continue
        axis.axvline(result.freeze, color="#868e96", linewidth=1, linestyle=":")
        axis.annotate(
            "variance frozen",
            (result.freeze, {"bottom": 0.06, "center": 0.5, "top": 0.97}[place]),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            va=place,
            fontsize=8,
            color="#868e96",
        )
