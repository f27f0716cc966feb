"""The picture of a plan: what lives when, and at which moment the memory is fullest."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sfpo_jax.memory._ledger import (
    ACTIVATIONS,
    ARGUMENTS,
    OPTIMIZER,
    OUTPUT,
    PARAMETERS,
    RESIDUALS,
    TEMPORARIES,
)
from sfpo_jax.memory._lifetimes import Lifetimes, LifetimesError
from sfpo_jax.memory._origins import Origin
from sfpo_jax.memory._plan import Plan
from sfpo_jax.memory._timeline import (
    BACKWARD,
    COMPRESSED,
    FORWARD,
    REST,
    WARMUP,
    Value,
    phase_of,
)
from sfpo_jax.units import format_bytes

# From below: what is there all the time first.
_COLOURS = {
    PARAMETERS: "#4a5568",
    OPTIMIZER: "#1864ab",
    RESIDUALS: "#74a9d8",
    ARGUMENTS: "#adb5bd",
    OUTPUT: "#dee2e6",
    ACTIVATIONS: "#d9480f",
    TEMPORARIES: "#f2b48c",
}
_PHASES = {
    FORWARD: "#fbe3d6",
    BACKWARD: "#e8d5e0",
    WARMUP: "#d3e2f0",
    COMPRESSED: "#c3dcd3",
    REST: "#f1f3f5",
}
_MARK = "#212529"
_FAINT = "#868e96"
_SHOWN_VALUES = 8
_FAR = 2.5  # times the peak; a limit above it would press the picture flat
_NOTEWORTHY = 0.01  # holes, as a share of the peak
_LETTER = 0.006  # of the picture's width, at the size of the phases' names


def save_lifetimes(path: str | Path, plan: Plan) -> None:
    """Draws a plan's memory over its instructions into a PNG.

    Args:
      path: where to.
      plan: from `plan`.

    Raises:
      ModuleNotFoundError: no matplotlib.
      LifetimesError: the compiler did not tell when values live, or the file cannot be
        written.
    """
    # An extra: who only reads plans does not need it.
    from matplotlib.figure import Figure

    lives = plan.lifetimes
    if lives is None:
        raise LifetimesError(
            "`lifetimes` cannot be drawn: the compiler left no temporaries, or none "
            "in a form known here."
        )
    shown = sorted(lives.values, key=lambda v: -v.size)[:_SHOWN_VALUES]
    figure = Figure(figsize=(11, 7.6), layout="constrained", dpi=150)
    top, strip, bars = figure.subplots(
        3, 1, sharex=True, height_ratios=(9, 0.7, 0.55 * max(1, len(shown)))
    )
    mesh = " x ".join(f"{n} {s}" for n, s in plan.mesh_shape.items() if s > 1)
    where = f"{plan.device}{f', mesh {mesh}' if mesh else ''}"
    figure.suptitle(
        f"Memory of one device in one step: {where}, compiled by the "
        f"{plan.compiler.upper()}'s compiler",
        fontsize=12,
    )
    _stack(top, plan, lives)
    _strip(strip, lives)
    _bars(bars, lives, sorted(shown, key=lambda v: (v.born, v.dies)))
    for axis in (top, strip, bars):
        axis.axvline(lives.peak, color=_MARK, linewidth=0.9, linestyle="--", zorder=2)
    top.set_xlim(0, max(1, len(lives.total) - 1))
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise LifetimesError(
            f"`lifetimes` cannot be written to '{path}': {error.strerror}; choose "
            "another file."
        ) from None


def _stack(axis: Any, plan: Plan, lives: Lifetimes) -> None:
    """What is held, one entry of the ledger above the other."""
    positions = np.arange(len(lives.total))
    entries = [name for name in _COLOURS if lives.held[name].any()]
    areas = axis.stackplot(
        positions,
        [lives.held[name] for name in entries],
        colors=[_COLOURS[name] for name in entries],
        step="post",
        linewidth=0,
    )
    labels = [f"{name}  {_size(int(lives.held[name][lives.peak]))}" for name in entries]
    # In the order in which they lie.
    axis.legend(
        areas[::-1],
        labels[::-1],
        title="held at the peak by",
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        fontsize=9,
        alignment="left",
    )
    peak, limit = lives.peak_bytes, plan.budget_bytes
    axis.set_ylim(0, 1.24 * max(peak, limit if limit < _FAR * peak else 0))
    axis.plot([lives.peak], [peak], "o", color=_MARK, markersize=5)
    is_left = lives.peak > len(lives.total) / 2
    axis.annotate(
        f"peak {_size(peak)}, at {lives.peak} of {len(lives.total)}\n"
        f"{_running(lives.running)}",
        (lives.peak, peak),
        xytext=(-8 if is_left else 8, 7),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="bottom",
        fontsize=9,
        color=_MARK,
    )
    if limit < _FAR * peak:
        axis.axhline(limit, color="#c92a2a", linewidth=1.2)
        axis.annotate(
            f"limit {_size(limit)}",
            (1, limit),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color="#c92a2a",
        )
    else:
        axis.annotate(
            f"limit {_size(limit)}, {limit / peak:,.0f} times the peak: not drawn",
            (1, 1),
            xycoords="axes fraction",
            xytext=(-4, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
            color="#c92a2a",
        )
    if lives.holes > _NOTEWORTHY * peak:
        axis.axhline(lives.reserved_bytes, color=_FAINT, linewidth=1, linestyle=":")
        axis.annotate(
            f"reserved {_size(lives.reserved_bytes)}: with holes between temporaries",
            (1, lives.reserved_bytes),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=_FAINT,
        )
    axis.set_ylabel("held by one device")
    axis.yaxis.set_major_formatter(lambda y, _: _size(y))
    axis.grid(alpha=0.25, axis="y")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _strip(axis: Any, lives: Lifetimes) -> None:
    """Which part of the step runs."""
    end = len(lives.total)
    for (start, phase), (stop, _) in pairwise([*lives.phases, (end, "")]):
        axis.axvspan(start, stop, color=_PHASES[phase], linewidth=0)
        lines = phase.split()
        room = (stop - start) / end / max(map(len, lines))
        if room > _LETTER:
            middle, text = (start + stop) / 2, "\n".join(lines)
            size = 8 if room > 1.5 * _LETTER else 5.5
            axis.text(
                middle, 0.5, text, ha="center", va="center", fontsize=size, zorder=3
            )
    axis.set_ylim(0, 1)
    axis.set_yticks([0.5], ["runs"])
    axis.tick_params(left=False, bottom=False)
    axis.spines[:].set_visible(False)


def _bars(axis: Any, lives: Lifetimes, shown: list[Value]) -> None:
    """The largest temporaries from birth to death."""
    end = len(lives.total)
    for row, value in enumerate(shown):
        colour = _COLOURS[ACTIVATIONS if value.is_activation else TEMPORARIES]
        width = value.dies - value.born + 1
        axis.barh(
            row, width, left=value.born, height=0.62, color=colour, align="center"
        )
        is_late, is_long = value.born > end / 2, width > 0.6 * end
        text = f"{_size(value.size)}  {value.shape.partition('{')[0]}"
        axis.annotate(
            f"{text}  {_running(value.origin)}",
            (value.born if is_late or is_long else value.dies + 1, row),
            xytext=(-4 if is_late else 4, 0),
            textcoords="offset points",
            ha="right" if is_late else "left",
            va="center",
            fontsize=7.5,
            color="white" if is_long and value.is_activation else _MARK,
        )
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.set_yticks([])
    axis.set_ylabel("largest\ntemporaries")
    axis.set_xlabel(
        "instructions in the order of the schedule (not time); the body of a loop is "
        "there once, as one turn"
    )
    axis.spines[["top", "right", "left"]].set_visible(False)


def _running(origin: Origin) -> str:
    """The phase, the last name of an operation's path, and the line of code."""
    phase, name = phase_of(origin), origin.op_name.rpartition("/")[2]
    place = f", {Path(origin.file).name}:{origin.line}" if origin.file else ""
    return f"{'' if phase == REST else f'{phase}: '}{name or 'unnamed'}{place}"


def _size(amount: float) -> str:
    return format_bytes(int(amount), digits=3)
