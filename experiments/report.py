"""The outcome of a run in words: report.md, and the table at the end."""

import platform
from collections.abc import Sequence

import jax
from rich import box
from rich.table import Table

from experiments.contender import Result
from sfpo_jax.units import format_bytes

_COLUMNS = (
    "contender",
    "accuracy",
    "test loss",
    "train loss",
    "sent/step",
    "bits/param",
    "mean",
    "ms/step",
)


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The cells of the table, a row each contender."""
    return [
        (
            r.name,
            f"{r.test_accuracy:.2%}",
            f"{r.test_loss:.4f}",
            f"{r.train_loss:.4f}",
            format_bytes(r.wire_bytes[-1]),
            f"{r.bits_per_parameter:.2f}",
            f"{r.mean_bits:.1f}",
            f"{1e3 * r.step_seconds:.1f}",
        )
        for r in results
    ]


def console_table(results: Sequence[Result]) -> Table:
    """The table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    for column in _COLUMNS:
        is_name = column == "contender"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=True)
    for row in rows(results):
        table.add_row(*row)
    return table


def markdown(
    results: Sequence[Result],
    data: str,
    *,
    title: str,
    command: str,
    config_text: str,
) -> str:
    """The report of a run, with the picture curves.png beside it.

    Args:
      results: one or two contenders, the reference first.
      data: what they learned, as in "800 images of digits".
      title: the name of the run.
      command: what started it.
      config_text: the resolved configuration in YAML.
    """
    alignment = [":--", *["--:"] * (len(_COLUMNS) - 1)]
    table = [_COLUMNS, tuple(alignment), *rows(results)]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    parts = [
        f"# {title}",
        "\n".join(lines),
        *[sentences(result) for result in results],
        _comparison(results),
        "![curves](curves.png)",
        "## How it was run",
        f"```\n{command}\n```",
        f"{data}; {results[0].parameters:,} parameters; {jax.device_count()} "
        f"{jax.devices()[0].device_kind} devices; JAX "
        f"{jax.__version__}, Python {platform.python_version()}.",
        "Sent/step: what one device sends, all collectives of the compiled program "
        "included, in a compressed step where there are some; mean: bits over all "
        "steps of the run. The time of a step is the "
        "median over the second half of the run, on this machine. The train loss is "
        "the mean over the last twentieth of the steps; metrics.jsonl holds every "
        "measurement.",
        f"```yaml\n{config_text}```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def sentences(result: Result) -> str:
    steps = len(result.sparsity)
    text = (
        f"**{result.name}** took {result.seconds:.0f} s, of which "
        f"{result.start_seconds:.0f} s until the first step was done (compilation)."
    )
    if result.freeze is not None:
        later = slice(result.freeze, steps)
        masked = f"{result.sparsity[later].mean():.0%}" if result.freeze < steps else 0
        refreshes = int(result.is_dense[later].sum())
        text += (
            f" It sent {format_bytes(result.wire_bytes[0])} a step until its variance "
            f"was frozen after {result.freeze} of {steps} steps "
            f"({result.freeze / steps:.0%}), and {format_bytes(result.wire_bytes[-1])} "
            f"from then on, with {masked} of the gradient masked on average."
        )
        if "local" in result.phases:
            alone = int((result.phase == result.phases.index("local")).sum())
            text += (
                f" {alone} of these later steps sent nothing: ranks took them alone."
            )
        if refreshes:
            text += (
                f" {refreshes} later steps were dense to bring the variance up to date:"
                f" {result.is_dense.mean():.0%} of all steps were."
            )
    if result.skipped:
        text += f" {result.skipped} steps were skipped: their gradient was not finite."
    return text


def _comparison(results: Sequence[Result]) -> str:
    if len(results) < 2:
        return ""
    reference, other = results
    points = 100 * (other.test_accuracy - reference.test_accuracy)
    ratio = reference.wire_bytes[-1] / other.wire_bytes[-1]
    overall = reference.mean_bits / other.mean_bits
    return (
        f"{other.name} against {reference.name}: {points:+.1f} points of test accuracy "
        f"at the same number of steps, {ratio:.1f} times fewer bytes in a compressed "
        f"step, {overall:.1f} times fewer over the run."
    )
