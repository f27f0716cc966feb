"""The published figures of SFPO beside what this project found, in one table.

    python -m experiments.bench.claims

Measures nothing: reads the results that the other benches have left in `docs/results`,
so that no figure of the table is typed by hand. Speeds on an A100, which has run none
of this, are bounds from arithmetic alone and say so.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

from experiments.bench.convergence_report import Summary, summarize

PROGRAM = "python -m experiments.bench.claims"
RESULTS = Path(__file__).parents[2] / "docs" / "results"

Verdict = Literal["holds", "open", "does not hold", "not measured"]

# An A100 in bfloat16, and the share of it that large training runs report.
_PEAK, _REACHED = 312e12, 0.5
_TOKENS = 2048  # of the planned step of GPT-3


class Finding(NamedTuple):
    """What was found of a published figure."""

    text: str
    verdict: Verdict


class Claim(NamedTuple):
    """One published figure.

    Attributes:
      published: the figure.
      command: what wrote the results that speak of it.
      kind: how they were come by.
      find: results by file name -> what they say.
    """

    published: str
    command: str
    kind: str
    find: Callable[[Mapping[str, Any]], Finding]


def _vit_memory(results: Mapping[str, Any]) -> Finding:
    ours, scan, flat = (
        _gb(results, name) for name in ("vit_l", "vit_l_scanned", "vit_l_unrolled")
    )
    text = (
        f"batch 98, float32: {scan:.1f} GB with layers in a scan, {flat:.1f} written "
        f"out, {ours:.1f} GB by the layered step"
    )
    return Finding(text, "holds" if ours <= 41 else "does not hold")


def _gpt_memory(results: Mapping[str, Any]) -> Finding:
    dense, ours = _gb(results, "gpt_13b_adamw"), _gb(results, "gpt_13b")
    text = (
        f"1 x 2,048 tokens: {dense:.0f} GB by AdamW, {ours:.1f} GB by the layered step"
    )
    return Finding(text, "holds" if ours <= 72 else "does not hold")


def _gpt_speed(results: Mapping[str, Any]) -> Finding:
    seconds = results["memory"]["gpt_13b"]["flops"] / (_PEAK * _REACHED)
    text = (
        f"not run on an A100; arithmetic alone, at half of its peak, would take "
        f"{seconds:.1f} s a step: {_TOKENS / seconds:.0f} tokens/s"
    )
    return Finding(text, "not measured")


def _vit_speed(results: Mapping[str, Any]) -> Finding:
    memory = results["memory"]["vit_l_bfloat16"]
    rate = 98 * _PEAK * _REACHED / memory["flops"]
    text = (
        "not run on an A100; arithmetic alone, bfloat16 at half of its peak, would "
        f"allow {rate:.0f} images/s"
    )
    return Finding(text, "not measured")


def _share(results: Mapping[str, Any]) -> Finding:
    rows = {
        row["contender"]: row
        for row in results["network"]["rows"]
        if row["hosts"] == 2 and row["link"] == "1 Gbit/s"
    }
    dense, ours = (
        100 * rows[name]["communication"] / rows[name]["step"]
        for name in ("dense", "onebit")
    )
    text = (
        f"2 hosts, 1 Gbit/s, CPUs: {dense:.0f} % of a dense step, {ours:.0f} % of a "
        "one-bit step, what encoding takes counted as communication"
    )
    return Finding(text, "holds" if ours <= 12 / 35 * dense else "does not hold")


def _speedup(results: Mapping[str, Any]) -> Finding:
    rows = {
        row["contender"]: row
        for row in results["network"]["rows"]
        if row["hosts"] == 2 and row["link"] == "100 Mbit/s"
    }
    measured = rows["onebit"]["samples"] / rows["dense"]["samples"]
    # Over a run: AdamW's step that sends nothing, and what is waited for in the mean.
    run = rows["alone"]["step"] + rows["onebit"]["mean_communication"]
    whole = rows["dense"]["step"] / run
    (large,) = (
        m for m in results["parallel"]["estimates"] if m["load"]["name"] == "13B"
    )
    best = max(row["speedup"] for row in large["rows"] if row["link"] == "PCIe")
    text = (
        "measured: one-bit data parallelism, 2 CPU hosts at 100 Mbit/s: "
        f"{measured:.1f} times in a compressed step, {whole:.1f} over a run with its "
        "dense steps; three levels are not measured. Estimated, 13 B parameters on 8 "
        f"A100s over PCIe: {best:.1f} times; over NVLink there is little to gain"
    )
    return Finding(text, "open")


def _accuracy(results: Mapping[str, Any]) -> Finding:
    image, text = (_summary(results, task, "SFPO", 1.0) for task in ("image", "text"))
    said = (
        f"equal steps: {_span(image.gap, '+.2f')} points of accuracy on images, "
        f"{_span(text.gap, '+.2f')} on text, {_span(text.ratio, '.3f')} times the loss "
        "on text"
    )
    is_near = min(image.gap.low, text.gap.low) >= -1
    is_held = is_near and text.ratio.high <= 1.02
    return Finding(said, "holds" if is_held else "does not hold")


def _more_steps(results: Mapping[str, Any]) -> Finding:
    text = _summary(results, "text", "SFPO", 1.15)
    said = (
        f"15 % more: {_span(text.ratio, '.3f')} times the loss of dense without more "
        "steps, on text"
    )
    return Finding(said, "holds" if text.ratio.high <= 1 else "does not hold")


def _floor(results: Mapping[str, Any]) -> Finding:
    zero = _summary(results, "text", "SFPO: final sparsity 0", 1.0)
    base = _summary(results, "text", "SFPO", 1.0)
    said = (
        f"nothing to cure: {_span(zero.ratio, '.3f')} times the loss of dense with "
        f"final sparsity 0, {base.ratio.mean:.3f} with 0.3"
    )
    return Finding(said, "open")


def _bits(results: Mapping[str, Any]) -> Finding:
    ours = _summary(results, "image", "SFPO", 1.0)
    dense = _summary(results, "image", "dense AdamW", 1.0)
    said = (
        f"8 devices: {dense.bits / ours.bits:.1f} times fewer in a compressed step, "
        f"{dense.mean_bits / ours.mean_bits:.1f} times over a run with its "
        f"{100 * ours.dense_share:.0f} % of dense steps; scales take the rest"
    )
    return Finding(said, "holds" if dense.bits / ours.bits >= 28 else "does not hold")


def _resnet(results: Mapping[str, Any]) -> Finding:
    case = results["recompute"]["resnet50"]
    kept, flops = case["kept"]["bytes"], case["kept"]["flops"]
    # Memory that a plan saves, and the arithmetic it adds, as shares.
    plans = [
        (1 - row["total_bytes"] / kept, row["flops"] / flops - 1)
        for row in case["answers"]
        if "problem" not in row
    ]
    saved, extra = min((p for p in plans if p[0] >= 0.47), key=lambda plan: plan[1])
    said = (
        f"memory, batch 256: {100 * saved:.0f} % less for {100 * extra:.1f} % more "
        "arithmetic; its speed no GPU was there to tell"
    )
    return Finding(said, "open")


def _rule(results: Mapping[str, Any]) -> Finding:
    del results
    return Finding("the rules give the published row; not run on its data", "holds")


def _epochs(results: Mapping[str, Any]) -> Finding:
    del results
    return Finding("no ImageNet here, and no such run", "not measured")


CLAIMS = (
    Claim(
        "ViT-L: 78 -> 41 GB on an A100-80GB",
        "python -m experiments.bench.memory",
        "planned by XLA's GPU compiler",
        _vit_memory,
    ),
    Claim(
        "GPT-3 13B: out of memory -> 72 GB",
        "python -m experiments.bench.memory",
        "planned by XLA's GPU compiler",
        _gpt_memory,
    ),
    Claim(
        "ResNet-50: 47 % less memory, 22 % faster",
        "python -m experiments.bench.recompute",
        "planned by XLA's GPU compiler",
        _resnet,
    ),
    Claim(
        "GPT-3 13B: 89 tokens/s",
        "python -m experiments.bench.memory",
        "bound, from the planned step's FLOPs",
        _gpt_speed,
    ),
    Claim(
        "ViT-L: 120 -> 146 images/s",
        "python -m experiments.bench.memory",
        "bound, from the planned step's FLOPs",
        _vit_speed,
    ),
    Claim("ViT-L: 50 -> 45 epochs", "none", "-", _epochs),
    Claim(
        "communication: 35 % -> 12 % of the time",
        "python -m experiments.bench.network",
        "measured",
        _share,
    ),
    Claim(
        "three levels 3.8 times as fast as data parallelism, 8 A100s",
        "python -m experiments.bench.network, python -m experiments.bench.parallel",
        "measured; estimated",
        _speedup,
    ),
    Claim(
        "gradients as one bit: 1/32 of float32",
        "python -m experiments.bench.convergence",
        "bytes of the compiled programs",
        _bits,
    ),
    Claim(
        "no loss of accuracy",
        "python -m experiments.bench.convergence",
        "measured, 5 paired seeds, small models",
        _accuracy,
    ),
    Claim(
        "10 to 20 % more steps make up for compression",
        "python -m experiments.bench.convergence",
        "measured, 5 paired seeds, a small GPT",
        _more_steps,
    ),
    Claim(
        "final sparsity 0.3 cures late oscillation",
        "python -m experiments.bench.convergence",
        "measured, 3 paired seeds, a small GPT",
        _floor,
    ),
    Claim(
        "BERT-large: batch 8 -> 64, rate 2e-5 -> 5.6e-5, sparsity 0.7 -> 0.5",
        "python -m sfpo_jax tune",
        "arithmetic",
        _rule,
    ),
)


def markdown(results: Mapping[str, Any], claims: Sequence[Claim] = CLAIMS) -> str:
    """The table.

    Args:
      results: the contents of `docs/results/NAME.json`, by NAME.
      claims: the rows.
    """
    lines = [
        "| published | found here | | how | command |",
        "| :-- | :-- | :-- | :-- | :-- |",
    ]
    for claim in claims:
        text, verdict = claim.find(results)
        command = ", ".join(f"`{c}`" for c in claim.command.split(", "))
        command = "" if claim.command == "none" else command
        cells = (claim.published, text, f"**{verdict}**", claim.kind, command)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def read_results(folder: Path) -> dict[str, Any]:
    """All results of a folder by name.

    Raises:
      ValueError: one is missing or damaged, with the command that writes it.
    """
    found = {}
    for name in ("memory", "network", "parallel", "convergence", "recompute"):
        path = folder / f"{name}.json"
        try:
            found[name] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ValueError(
                f"`{path}` cannot be read: python -m experiments.bench.{name} makes it."
            ) from None
    return found


def _gb(results: Mapping[str, Any], program: str) -> float:
    return results["memory"][program]["total_bytes"] / 1e9


def _summary(
    results: Mapping[str, Any], task: str, contender: str, extension: float
) -> Summary:
    (found,) = (
        s
        for s in summarize(results["convergence"]["runs"])
        if (s.task, s.contender) == (task, contender)
        and abs(s.extension - extension) < 0.01
    )
    return found


def _span(interval: Any, form: str) -> str:
    low, mean, high = (format(x, form) for x in interval)
    return f"{mean} [{low}, {high}]"


def main(out: Path = RESULTS / "claims.md") -> int:
    """Writes the table.

    Args:
      out: where to.
    """
    try:
        text = markdown(read_results(RESULTS))
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    out.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
