"""Do states of one byte reach what float32 AdamW reaches?

    python -m experiments.bench.states

Trains the small ViT on digits and the small GPT on the standard library's text: AdamW
in float32 against `adamw8bit`, and on text against the configuration that GPT-3 13B is
planned with (bfloat16 arithmetic and weights, stochastic rounding or an error term, an
int8 first and a factored second moment, layered step, exact clipping). Same seeds,
parameters, batches and learning rate; one CPU device. How far two runs of float32 part
by rounding alone is measured beside it. Writes JSON after every run and goes on where
it was stopped.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console

from experiments.bench.convergence_report import interval
from experiments.gpt3_13b import SMALL
from experiments.run import Run
from experiments.text_run import prepare_text
from experiments.vit_run import Config, prepare
from sfpo_jax.training import ConfigError, build, exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.states"
DENSE = "AdamW, float32"
# The same method with the learning rate changed in its seventh digit: what two runs of
# float32 differ by when they differ in rounding alone.
TWIN = "AdamW, float32, rate in its 7th digit"
Changes = Mapping[str, Any]

_ONE_DEVICE: Changes = {
    "parallel": {"cpu_devices": 1},
    "communication": {"compression": {"algorithm": "none"}},
    "train": {"compare": False},
}
_HALF: Changes = {"model": {"dtype": "bfloat16", "param_dtype": "bfloat16"}}
_RELEASED = {"gradient_release": True, "mu_dtype": "int8", "nu_dtype": "factored"}


class TaskCase(NamedTuple):
    """What is trained, and by which contenders; the first is the reference."""

    config: Any
    prepare: Callable[[Any], Run]
    contenders: Mapping[str, Changes]


def _twin(rate: float) -> Changes:
    return {"optimizer": {"learning_rate": rate * (1 + 5e-7)}}


_8BIT = {"gradient_release": False, "mu_dtype": "int8", "nu_dtype": "int8"}
TASKS = {
    "image": TaskCase(
        build(Config, _ONE_DEVICE),
        prepare,
        {
            DENSE: {},
            TWIN: _twin(Config().optimizer.learning_rate),
            "adamw8bit": {"memory": _8BIT},
        },
    ),
    "text": TaskCase(
        build(
            type(SMALL),
            {
                **_ONE_DEVICE,
                "optimizer": {"clip_norm": 1.0},
                "memory": {"gradient_release": False},
            },
            base=SMALL,
        ),
        prepare_text,
        {
            DENSE: {},
            TWIN: _twin(SMALL.optimizer.learning_rate),
            "adamw8bit": {"memory": _8BIT},
            "as GPT-3 13B, stochastic rounding": {
                **_HALF,
                "memory": {**_RELEASED, "rounding": "stochastic"},
            },
            "as GPT-3 13B, error term": {
                **_HALF,
                "memory": {**_RELEASED, "rounding": "error_term"},
            },
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train, and where to."""

    tasks: Literal["both", "image", "text"] = "both"
    """What to train."""
    seeds: int = 5
    """Paired runs of each contender."""
    out: str = "docs/results/states.json"
    """The file of results; the table lies beside it."""

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ConfigError(
                f"`seeds` must be at least 2, got {self.seeds}: an interval needs two"
            )


def run(case: TaskCase, changes: Changes, seed: int) -> dict[str, Any]:
    """One contender's outcome."""
    config = build(type(case.config), changes, base=case.config)
    steps = config.train.steps
    last = {"train": {"seed": seed, "evaluate_every": steps}}
    ready = case.prepare(build(type(config), last, base=config))
    result = ready.start(ready.contenders[-1])
    return {
        "test_loss": result.test_loss,
        "train_loss": result.train_loss,
        "test_accuracy": result.test_accuracy,
        "step_seconds": result.step_seconds,
    }


def markdown(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Ratios of the losses to the reference's, with 95 % intervals."""
    lines = [
        "Ratio of the loss to that of float32 AdamW with the same seed, geometric mean",
        "and 95 % interval; training loss: mean of the last twentieth of the steps.",
        "",
        "| task | contender | seeds | training loss | test loss | accuracy, points |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for task, case in TASKS.items():
        by_seed = {
            name: {
                o["seed"]: o
                for o in outcomes
                if (o["task"], o["contender"]) == (task, name)
            }
            for name in case.contenders
        }
        for name in list(case.contenders)[1:]:
            seeds = sorted(by_seed[name].keys() & by_seed[DENSE].keys())
            if len(seeds) < 2:
                continue
            pairs = [(by_seed[name][s], by_seed[DENSE][s]) for s in seeds]
            ratios = [_ratio(pairs, key) for key in ("train_loss", "test_loss")]
            points = interval(
                [100 * (a["test_accuracy"] - b["test_accuracy"]) for a, b in pairs]
            )
            lines.append(
                f"| {task} | {name} | {len(seeds)} | {' | '.join(ratios)} | "
                f"{points.mean:+.2f} [{points.low:+.2f}, {points.high:+.2f}] |"
            )
    return "\n".join(lines) + "\n"


def _ratio(pairs: Sequence[tuple[Any, Any]], key: str) -> str:
    found = interval([float(np.log(a[key] / b[key])) for a, b in pairs])
    middle, low, high = (float(np.exp(x)) for x in (found.mean, found.low, found.high))
    return f"x{middle:.3f} [{low:.3f}, {high:.3f}]"


def main(argv: Sequence[str]) -> int:
    """Trains what is missing and writes the table.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status, 0.

    Raises:
      SystemExit: with status 2 for options that cannot be used, 0 after `--help`.
    """
    console = Console()
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(),
            argv,
            prog=PROGRAM,
            description="Compares states of one byte with float32.",
        )
    out = Path(options.out)
    outcomes: list[dict[str, Any]] = []
    if out.exists():
        outcomes = json.loads(out.read_text(encoding="utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for task, case in TASKS.items():
            if options.tasks not in ("both", task):
                continue
            for name, changes in case.contenders.items():
                key = {"task": task, "contender": name, "seed": seed}
                if any(key.items() <= o.items() for o in outcomes):
                    continue
                outcomes.append({**key, **run(case, changes, seed)})
                out.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
                out.with_suffix(".md").write_text(markdown(outcomes), encoding="utf-8")
                last = outcomes[-1]
                console.print(
                    f"{task}: {name}: seed {seed}: training loss "
                    f"{last['train_loss']:.4f}, test loss {last['test_loss']:.4f}",
                    highlight=False,
                    soft_wrap=True,
                )
    console.print(markdown(outcomes), markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
