"""What large models take on an A100-80GB, planned by XLA's GPU compiler without one.

    python -m experiments.bench.memory

Compiles the training steps of GPT-3 13B, ViT-L/16 and a GPT as large as fits, each
technique left out in turn, beside `optax.adamw`, `optax.adafactor` and `flashoptim-jax`
where it is installed; half an hour on two cores. `--programs gpt_13b,vit_l` compiles
these only. Writes JSON after every program, and a table. The exit status is 1 where a
program exceeds its bound.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import sfpo_jax as sfpo
from experiments.bench.memory_programs import Program
from experiments.bench.memory_rows import programs
from sfpo_jax.memory import CompileError, MissingCompilerError
from sfpo_jax.training import ConfigError, exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.memory"
DEVICE = "a100-80gb"
_GB = 1e9

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to plan, and where to."""

    programs: str = "all"
    """Names, joined by commas; all; or bounded, those that must not exceed a size."""
    out: str = "docs/results/memory.json"
    """The file of results; the table lies beside it."""


def chosen(names: str, known: Sequence[Program]) -> list[Program]:
    """The programs that `--programs` names.

    Raises:
      ConfigError: an unknown name, with the known ones.
    """
    if names in ("all", "bounded"):
        return [p for p in known if names == "all" or p.bound is not None]
    by_name = {program.name: program for program in known}
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in by_name:
            raise ConfigError(
                f"`programs` has no '{name}': use all, bounded, or some of "
                f"{', '.join(by_name)}"
            )
    return [by_name[name] for name in wanted]


def measure(program: Program) -> Row:
    """Plans one program; sizes in bytes of one device."""
    began = time.perf_counter()
    row: Row = {"title": program.title, "mesh": dict(program.mesh_shape)}
    row |= {"published_gb": program.published, "bound_gb": program.bound}
    row |= {"reference": program.reference, "device": DEVICE, "jax": jax.__version__}
    try:
        plan = sfpo.plan(
            program.build, device=DEVICE, mesh_shape=program.mesh_shape, compiler="gpu"
        )
    except (CompileError, ModuleNotFoundError, OverflowError) as error:
        return row | {"problem": str(error).splitlines()[0]}
    return row | {
        "total_bytes": plan.total_bytes,
        "host_bytes": plan.host_bytes,
        "ledger": plan.ledger,
        "flops": plan.flops,
        "wire_bytes": plan.wire_bytes,
        "notes": list(plan.notes),
        "seconds": time.perf_counter() - began,
    }


def markdown(rows: dict[str, Row]) -> str:
    """The table, bounded programs first; sizes in GB of one device."""
    lines = [
        f"Planned for {DEVICE} by XLA's GPU compiler, without the card; GB = 1e9",
        "bytes, of one device. FLOPs: beside those of the dense float32 step (ViT) or",
        "of the first row (GPT), matrix products and convolutions only.",
        "",
        "| program | published | at most | **planned** | weights | states | residuals "
        "| rest | on host | FLOPs |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows.values():
        if "problem" in row:
            lines.append(f"| {row['title']} | | | does not compile | | | | | | |")
            continue
        ledger = row["ledger"]
        known = [ledger.get(k, 0) for k in ("parameters", "optimizer", "residuals")]
        rest = row["total_bytes"] - sum(known)
        sizes = [f"{size / _GB:.2f}" if size else "" for size in (*known, rest)]
        cells = [
            row["title"],
            _number(row["published_gb"]),
            _number(row["bound_gb"]),
            f"**{row['total_bytes'] / _GB:.2f}**",
            *sizes,
            f"{row['host_bytes'] / _GB:.2f}" if row.get("host_bytes") else "",
            _flops(row, rows),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def overview(rows: dict[str, Row]) -> str:
    """The rows that have a bound, and what they are compared with, in brief."""
    lines = ["| program | published | planned |", "|---|---:|---:|"]
    for row in rows.values():
        is_shown = row["bound_gb"] is not None or row["published_gb"] is not None
        if not is_shown or "problem" in row:
            continue
        published = row["published_gb"]
        said = f"{published:g} GB" if published is not None else ""
        size = f"{row['total_bytes'] / _GB:.1f} GB"
        size = f"**{size}**" if row["bound_gb"] is not None else size
        lines.append(f"| {row['title']} | {said} | {size} |")
    return "\n".join(lines) + "\n"


def offload(rows: dict[str, Row]) -> str:
    """The rows that use the host's memory, and the first, which does not."""
    lines = ["| program | GPU | host |", "|---|---:|---:|"]
    for place, row in enumerate(rows.values()):
        if "problem" in row or (place and not row.get("host_bytes")):
            continue
        sizes = [row["total_bytes"], row.get("host_bytes", 0)]
        cells = [f"{size / _GB:.1f} GB" if size else "" for size in sizes]
        lines.append(f"| {row['title']} | **{cells[0]}** | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _flops(row: Row, rows: dict[str, Row]) -> str:
    reference = rows.get(row["reference"] or "", {}).get("flops")
    if not reference or not row["flops"]:
        return ""
    return f"{row['flops'] / reference - 1:+.1%}"


def main(argv: Sequence[str]) -> int:
    """Plans, writes and shows.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status: 0, or 1 where a program exceeds its bound.

    Raises:
      SystemExit: with status 2 for options that cannot be used or a compiler that is
        missing, 0 after `--help`.
    """
    console = Console()
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(),
            argv,
            prog=PROGRAM,
            description="Plans what large models take on an A100.",
        )
        known = programs()
        wanted = chosen(options.programs, known)
    out = Path(options.out)
    rows: dict[str, Row] = {}
    if out.exists():
        rows = json.loads(out.read_text(encoding="utf-8"))
    exceeded = []
    for program in wanted:
        try:
            row = measure(program)
        except MissingCompilerError as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return 2
        rows[program.name] = row
        ordered = {p.name: rows[p.name] for p in known if p.name in rows}
        _write(out, ordered)
        total = row.get("total_bytes")
        said = f"{total / _GB:.2f} GB" if total else row["problem"]
        console.print(f"{program.title}: {said}", highlight=False, soft_wrap=True)
        too_much = total is None or total > (program.bound or 0) * _GB
        if program.bound is not None and too_much:
            exceeded.append(program)
    table = out.with_suffix(".md").read_text(encoding="utf-8")
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    for program in exceeded:
        console.print(
            f"{program.name} exceeds its bound of {program.bound:g} GB", style="red"
        )
    return 1 if exceeded else 0


def _write(out: Path, rows: dict[str, Row]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")
    host = out.with_name(f"{out.stem}_offload.md")
    host.write_text(offload(rows), encoding="utf-8")
    brief = out.with_name(f"{out.stem}_overview.md")
    brief.write_text(overview(rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
