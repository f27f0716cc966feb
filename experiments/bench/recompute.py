"""How much arithmetic less memory costs, planned for an A100-80GB without one.

    python -m experiments.bench.recompute
    python -m experiments.bench.recompute --programs resnet50

`sfpo_jax.plan_recompute` is asked to fit the training steps of ResNet-50, ViT-L/16 and
GPT blocks into five budgets each between all that is kept and `jax.checkpoint` around
each block, and into the memory that the latter takes. Every answer is compiled by XLA's
GPU compiler; an hour on two cores. Writes JSON after every answer, a table and a
picture. The exit status is 1 where a budget is exceeded or a promise is broken.
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
from experiments.bench.recompute_programs import Case, cases
from experiments.bench.recompute_report import broken, markdown, save_picture
from sfpo_jax.memory import BudgetError, MissingCompilerError, Plan
from sfpo_jax.training import ConfigError, exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.recompute"
DEVICE = "a100-80gb"
_MESH = {"data": 1}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to plan, and where to."""

    programs: str = "all"
    """Names, joined by commas, or all."""
    budgets: int = 5
    """Budgets between all recomputed and all kept, evenly spaced."""
    out: str = "docs/results/recompute.json"
    """The file of results; the table and the picture lie beside it."""


def chosen(names: str, known: Sequence[Case]) -> list[Case]:
    """The programs that `--programs` names.

    Raises:
      ConfigError: an unknown name, with the known ones.
    """
    by_name = {case.name: case for case in known}
    wanted = list(by_name) if names == "all" else [n.strip() for n in names.split(",")]
    for name in wanted:
        if name not in by_name:
            raise ConfigError(
                f"`programs` has no '{name}': use all, or some of {', '.join(by_name)}"
            )
    return [by_name[name] for name in wanted]


def compiled(case: Case, build: Any) -> Plan:
    """One program as it stands."""
    return sfpo.plan(build, device=DEVICE, mesh_shape=_MESH, compiler="gpu")


def targets(case: Case, all_kept: int, blocks: int, count: int) -> list[int]:
    """Budgets in bytes: those promised, that of checkpointed blocks, those between."""
    found = [round((1 - share) * all_kept) for share, _ in case.bounds]
    steps = (all_kept - blocks) / (count + 1)
    return found + [blocks + round(steps * i) for i in range(count + 1)]


def answer(case: Case, budget: int) -> Row:
    """One budget; sizes in bytes of one device."""
    began = time.perf_counter()
    try:
        plan = sfpo.plan_recompute(
            case.build,
            budget=f"{budget}B",
            device=DEVICE,
            mesh_shape=_MESH,
            compiler="gpu",
        )
    except BudgetError as error:
        return {
            "budget_bytes": budget,
            "problem": str(error),
            "smallest_bytes": error.smallest.total_bytes,
        }
    row = plan.to_dict() | {"seconds": time.perf_counter() - began}
    return row | {"table": list(plan.table)}


def curve(case: Case, all_kept: int) -> list[Row]:
    """The whole curve, predicted."""
    plan = sfpo.plan_recompute(
        case.build,
        budget=f"{all_kept}B",
        device=DEVICE,
        mesh_shape=_MESH,
        compiler="gpu",
    )
    points = plan.curve(12)
    return [{"bytes": point.bytes, "flops": point.flops} for point in points]


def measure(case: Case, options: Options, save: Any) -> Row:
    """All of one program; `save` is called with what is known after each answer."""
    kept, blocks = compiled(case, case.build), compiled(case, case.blocks)
    row: Row = {
        "title": case.title,
        "device": DEVICE,
        "jax": jax.__version__,
        "kept": {"bytes": kept.total_bytes, "flops": kept.flops},
        "blocks": {"bytes": blocks.total_bytes, "flops": blocks.flops},
        "bounds": [list(bound) for bound in case.bounds],
        "answers": [],
    }
    if case.whole is not None:
        whole = compiled(case, case.whole)
        row["whole"] = {"bytes": whole.total_bytes, "flops": whole.flops}
    sizes = targets(case, kept.total_bytes, blocks.total_bytes, options.budgets)
    for budget in sizes:
        row["answers"].append(answer(case, budget))
        save(row)
    row["curve"] = curve(case, kept.total_bytes)
    save(row)
    return row


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      0; 1 where a promise is broken; 2 without the compiler.

    Raises:
      SystemExit: with status 2 for options that cannot be used, 0 after `--help`.
    """
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(),
            argv,
            prog=PROGRAM,
            description="Plans what is computed again on an A100, for several budgets.",
        )
        wanted = chosen(options.programs, cases())
    console, path = Console(), Path(options.out)
    rows = json.loads(path.read_text()) if path.exists() else {}
    for case in wanted:

        def save(row: Row, case: Case = case) -> None:
            rows[case.name] = row
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows, indent=1) + "\n")

        console.print(f"{case.title} ...")
        try:
            measure(case, options, save)
        except MissingCompilerError as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return 2
    text = markdown(rows)
    path.with_suffix(".md").write_text(text)
    save_picture(path.with_suffix(".png"), rows)
    console.print(text, markup=False)
    problems = broken(rows)
    for problem in problems:
        console.print(problem, style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
