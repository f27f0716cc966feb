"""The table and the picture of `experiments.bench.recompute`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = Mapping[str, Any]
_GB = 1e9
_COLOURS = {"plan": "#d9480f", "blocks": "#1864ab", "kept": "#4a5568"}


def extra(row: Row, flops: float) -> float:
    """FLOPs beyond those of the step that keeps all, as a share of them."""
    return flops / row["kept"]["flops"] - 1


def markdown(rows: Mapping[str, Row]) -> str:
    """The table; sizes in GB of one device."""
    lines = [
        "Planned for a100-80gb by XLA's GPU compiler, without the card; GB = 1e9",
        "bytes, of one device. FLOPs: beyond those of the step that keeps all that",
        "autodiff asks for, matrix products and convolutions only. Compilations: those",
        "of one call of `plan_recompute`, nothing being known before.",
        "",
        "| program | budget | predicted | **compiled** | memory | FLOPs | compilations "
        "| solver |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows.values():
        kept, blocks = row["kept"], row["blocks"]
        lines.append(
            f"| {row['title']}: all kept | | | {kept['bytes'] / _GB:.2f} | | | | |"
        )
        lines.append(_usual(row, "`jax.checkpoint` around each block", blocks))
        if "whole" in row:
            name = "one checkpoint around all, what blocks return kept"
            lines.append(_usual(row, name, row["whole"]))
        answers = sorted(row["answers"], key=lambda answer: answer["budget_bytes"])
        lines += [_answer(row, answer) for answer in answers]
    return "\n".join(lines) + "\n"


def _usual(row: Row, name: str, found: Row) -> str:
    share = found["bytes"] / row["kept"]["bytes"] - 1
    return (
        f"| {name} | | | {found['bytes'] / _GB:.2f} | {share:+.0%} "
        f"| {extra(row, found['flops']):+.1%} | | |"
    )


def _answer(row: Row, answer: Row) -> str:
    budget = f"| planned | {answer['budget_bytes'] / _GB:.2f} "
    if "problem" in answer:
        smallest = answer["smallest_bytes"] / _GB
        return budget + f"| | cannot be met; smallest: {smallest:.2f} | | | | |"
    share = answer["total_bytes"] / row["kept"]["bytes"] - 1
    return (
        budget + f"| {answer['predicted_bytes'] / _GB:.2f} "
        f"| **{answer['total_bytes'] / _GB:.2f}** | {share:+.0%} "
        f"| {answer['extra_share']:+.1%} | {answer['compilations']} "
        f"| {answer['solver_seconds']:.1f} s |"
    )


def broken(rows: Mapping[str, Row]) -> list[str]:
    """Promises that were not kept, in words."""
    found = []
    for name, row in rows.items():
        for answer in row["answers"]:
            size = f"{name} at {answer['budget_bytes'] / _GB:.2f} GB"
            if "problem" in answer:
                found.append(f"{size}: {answer['problem']}")
                continue
            if answer["total_bytes"] > answer["budget_bytes"]:
                found.append(f"{size} takes {answer['total_bytes'] / _GB:.2f} GB")
            if answer["compilations"] >= 5:
                found.append(f"{size} took {answer['compilations']} compilations")
            for share, most in row["bounds"]:
                promised = round((1 - share) * row["kept"]["bytes"])
                is_over = answer["extra_share"] > most
                if answer["budget_bytes"] == promised and is_over:
                    found.append(f"{size} costs {answer['extra_share']:+.1%} FLOPs")
            is_at_blocks = answer["budget_bytes"] == row["blocks"]["bytes"]
            blocks = extra(row, row["blocks"]["flops"])
            if is_at_blocks and answer["extra_share"] > blocks + 1e-9:
                found.append(f"{size} is worse than jax.checkpoint ({blocks:+.1%})")
    return found


def save_picture(path: Path, rows: Mapping[str, Row]) -> None:
    """Memory against arithmetic, a panel for each program."""
    columns = min(2, len(rows))
    height = -(-len(rows) // columns)
    figure = Figure(figsize=(5.4 * columns, 4 * height), layout="constrained", dpi=150)
    axes = list(figure.subplots(height, columns, squeeze=False).flat)
    for axis, row in zip(axes, rows.values(), strict=False):
        _panel(axis, row)
    for axis in axes[len(rows) :]:
        axis.set_visible(False)
    figure.savefig(path)


def _panel(axis: Axes, row: Row) -> None:
    points = sorted((p["bytes"], p["flops"]) for p in row.get("curve", []))
    axis.plot(
        [size / _GB for size, _ in points],
        [100 * extra(row, flops) for _, flops in points],
        color=_COLOURS["plan"],
        alpha=0.5,
        label="predicted",
    )
    made = [answer for answer in row["answers"] if "problem" not in answer]
    made.sort(key=lambda answer: answer["total_bytes"])
    axis.plot(
        [answer["total_bytes"] / _GB for answer in made],
        [100 * answer["extra_share"] for answer in made],
        "o",
        color=_COLOURS["plan"],
        label="planned, compiled",
    )
    for name, mark, label in (
        ("blocks", "s", "jax.checkpoint around each block"),
        ("kept", "D", "all kept"),
    ):
        axis.plot(
            [row[name]["bytes"] / _GB],
            [100 * extra(row, row[name]["flops"])],
            mark,
            color=_COLOURS[name],
            label=label,
        )
    axis.set_title(row["title"], fontsize=10)
    axis.set_xlabel("GB of a device")
    axis.set_ylabel("extra FLOPs, %")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=-1)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
