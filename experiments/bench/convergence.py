"""Does SFPO reach what dense AdamW reaches, and which of its parts does it take?

    python -m experiments.bench.convergence

Two tasks: a Vision Transformer on 5,000 real digits, a small GPT on the sources of
Python's standard library. Each contender searches the same learning rates on seed 0,
then runs the same other seeds at its own best rate, so that no seed that chose a rate
is reported, and each run has its dense twin: same seed, parameters and data. Writes a
JSON file after every run and goes on where it was stopped; from it tables and a
picture.
"""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console

from experiments.bench.convergence_report import (
    markdown,
    overview,
    save_picture,
    summarize,
)
from experiments.contender import Contender
from experiments.run import Run, Sections
from experiments.run_log import Course
from experiments.text_run import TextConfig, prepare_text
from experiments.vit_run import Config, prepare
from sfpo_jax import compressed_mean, cosine_sparsity, sparsify, training
from sfpo_jax.compression import identity
from sfpo_jax.training import ConfigError, build, exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.convergence"
Changes = Mapping[str, Any]


class StudyTask(NamedTuple):
    """What is trained: a configuration, and what is searched."""

    config: Any
    prepare: Callable[[Any], Run]
    rates: tuple[float, ...]


TASKS = {
    "image": StudyTask(Config(), prepare, (0.0025, 0.005, 0.01)),
    "text": StudyTask(TextConfig(), prepare_text, (0.006, 0.012, 0.024)),
}
SEARCH_SEED = 0
# The published compensation for what compression costs.
EXTENSION = 1.15


def _wire(**changes: Any) -> Changes:
    return {"communication": {"compression": changes}}


# Not an algorithm of the configuration, for its masked gradient is averaged densely.
_SPARSIFY = "sparsify alone, AdamW"
_PUBLISHED = {"relaxation": 1.0, "refresh_every": "none"}
# Changes against the default configuration of each task; the first is the reference.
CONTENDERS: dict[str, Changes] = {
    "dense AdamW": _wire(algorithm="none"),
    "SFPO": {},
    "SFPO, masked from step 0": {"sparsity": {"begin": "start"}},
    "1-bit Adam": {"sparsity": {"schedule": "none"}},
    "sparse signs, 30 %": _wire(algorithm="sparse_1bit", density=0.3),
    "sparse signs, 10 %": _wire(algorithm="sparse_1bit", density=0.1),
    "SFPO, auto warm-up": _wire(warmup="auto"),
    _SPARSIFY: {},
    "1-bit Adam as published": {
        "sparsity": {"schedule": "none"},
        **_wire(**_PUBLISHED, warmup=0.175),
    },
}
# Those that also run with more steps.
EXTENDED = ("SFPO", "sparse signs, 30 %", "sparse signs, 10 %")
# Changes against SFPO, at its best rate; a number is a factor on the steps.
ABLATIONS: dict[str, Changes | float] = {
    "final sparsity 0": {"sparsity": {"final": 0.0}},
    "masked entries are lost": {"sparsity": {"error_feedback": False}},
    "warm-up 6 %": _wire(warmup=0.06),
    "warm-up 20 %, no refresh": _wire(warmup=0.2, refresh_every="none"),
    "relaxation 1": _wire(relaxation=1.0),
    "blocks of 256": _wire(block_size=256),
    "blocks of 16,384": _wire(block_size=16384),
    "10 % more steps": 1.1,
    "20 % more steps": 1.2,
}

Outcome = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, and where to."""

    tasks: Literal["both", "image", "text"] = "both"
    """What to train."""
    image_steps: int = 800
    """Updates of a run on images."""
    text_steps: int = 600
    """Updates of a run on text."""
    seeds: int = 5
    """Runs of each contender at its best rate."""
    ablation_seeds: int = 3
    """Runs of each ablation; 0 leaves them out."""
    out: str = "docs/results/convergence.json"
    """The file of results; tables and picture lie beside it."""

    def __post_init__(self) -> None:
        for name in ("image_steps", "text_steps"):
            if getattr(self, name) < 20:
                raise ConfigError(
                    f"`{name}` must be at least 20, got {getattr(self, name)}"
                )
        if self.seeds < 2:
            raise ConfigError(
                f"`seeds` must be at least 2, got {self.seeds}: an interval needs two"
            )
        if self.ablation_seeds < 0:
            raise ConfigError(
                f"`ablation_seeds` must be at least 0, got {self.ablation_seeds}"
            )


class Results:
    """Outcomes by task, contender, rate, steps and seed, kept in a JSON file.

    Args:
      path: the file; read where it exists.
      bases: the configuration of each task, that the contenders change.

    Raises:
      ConfigError: the file was measured with other configurations.
    """

    def __init__(self, path: Path, bases: Mapping[str, Any]) -> None:
        self._path = path
        # As JSON holds them, to be compared with those of the file.
        configs = {k: dataclasses.asdict(v) for k, v in bases.items()}
        self._configs = json.loads(json.dumps(configs))
        self.outcomes: list[Outcome] = []
        if not path.exists():
            return
        held = json.loads(path.read_text(encoding="utf-8"))
        for task, base in bases.items():
            known = held["configs"].get(task)
            # Keys that came later have their defaults.
            if known is not None and build(type(base), known) != base:
                raise ConfigError(
                    f"`out` holds runs of another configuration, got '{path}': move "
                    "the file away or name another"
                )
        self._configs = {**held["configs"], **self._configs}
        self.outcomes = held["runs"]

    def find(self, **wanted: Any) -> list[Outcome]:
        """The outcomes with these values."""
        return [
            outcome
            for outcome in self.outcomes
            if all(outcome[name] == value for name, value in wanted.items())
        ]

    def add(self, outcome: Outcome) -> None:
        """Keeps an outcome and writes the file: a stop loses one run at most."""
        self.outcomes.append(outcome)
        text = json.dumps({"configs": self._configs, "runs": self.outcomes}, indent=1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".tmp")
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(self._path)


class Study:
    """Makes the runs of one task that `results` lacks.

    Args:
      name: of the task.
      task: what is trained.
      results: what is known; grows.
      console: where a line a run goes.
    """

    def __init__(
        self, name: str, task: StudyTask, results: Results, console: Console
    ) -> None:
        self._name, self._task = name, task
        self._results, self._console = results, console
        self._steps = task.config.train.steps

    def measure(
        self,
        contenders: Mapping[str, Changes],
        extended: Sequence[str],
        ablations: Mapping[str, Changes | float],
        seeds: int,
        ablation_seeds: int,
    ) -> None:
        """Searches, then runs the seeds, then what is built on the best rates."""
        best = {
            name: self._search(name, changes) for name, changes in contenders.items()
        }
        longer = round(EXTENSION * self._steps)
        for seed in range(SEARCH_SEED + 1, SEARCH_SEED + 1 + seeds):
            for name, changes in contenders.items():
                self._run(name, changes, best[name], self._steps, seed)
                if name in extended:
                    self._run(name, changes, best[name], longer, seed)
        for seed in range(SEARCH_SEED + 1, SEARCH_SEED + 1 + ablation_seeds):
            for name, change in ablations.items():
                is_change = isinstance(change, Mapping)
                changes = change if is_change else {}
                steps = self._steps if is_change else round(change * self._steps)
                self._run(f"SFPO: {name}", changes, best["SFPO"], steps, seed)

    def _search(self, name: str, changes: Changes) -> float:
        """The rate of the lowest test loss; on a tie the lower rate."""
        found = [
            self._run(name, changes, rate, self._steps, SEARCH_SEED)
            for rate in self._task.rates
        ]
        return min(found, key=lambda o: (o["test_loss"], o["rate"]))["rate"]

    def _run(
        self, name: str, changes: Changes, rate: float, steps: int, seed: int
    ) -> Outcome:
        """One run, or what is known of it."""
        key = {
            "task": self._name,
            "contender": name,
            "rate": rate,
            "steps": steps,
            "seed": seed,
        }
        if known := self._results.find(**key):
            return known[0]
        config = build(type(self._task.config), changes, base=self._task.config)
        run = {"optimizer": {"learning_rate": rate}}
        run["train"] = {"seed": seed, "steps": steps, "evaluate_every": steps}
        config = build(type(config), run, base=config)
        ready = self._task.prepare(config)
        is_ready = name != _SPARSIFY
        result = ready.start(ready.contenders[-1] if is_ready else _sparsify(config))
        # From the first masked step on.
        masked = np.trim_zeros(result.sparsity, "f")
        outcome = {
            **key,
            "test_accuracy": result.test_accuracy,
            "test_loss": result.test_loss,
            "train_loss": result.train_loss,
            "bits": result.bits_per_parameter,
            "mean_bits": result.mean_bits,
            "freeze": result.freeze,
            "dense_share": float(result.is_dense.mean()) if result.freeze else 1.0,
            "mean_sparsity": float(masked.mean()) if masked.size else 0.0,
            "step_seconds": result.step_seconds,
            "seconds": result.seconds,
        }
        self._results.add(outcome)
        self._console.print(
            f"{self._name}: {name}: rate {rate:g}, {steps} steps, seed {seed}: "
            f"accuracy {result.test_accuracy:.2%}, loss {result.test_loss:.4f}, "
            f"{result.seconds:.0f} s",
            highlight=False,
            soft_wrap=True,
        )
        return outcome


def main(argv: Sequence[str], tasks: Mapping[str, StudyTask] = TASKS) -> int:
    """Measures what is missing and writes the table and the picture.

    Args:
      argv: the arguments after the program's name.
      tasks: what can be trained, by name.

    Returns:
      The exit status: 0, or 130 where Ctrl-C ended it.

    Raises:
      SystemExit: with status 2 for options that cannot be used, 0 after `--help`.
    """
    console = Console()
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(),
            argv,
            prog=PROGRAM,
            description="Compares SFPO and its parts with dense AdamW.",
        )
        out = Path(options.out)
        chosen = {
            name: task._replace(config=_lengthened(task.config, name, options))
            for name, task in tasks.items()
            if options.tasks in ("both", name)
        }
        results = Results(out, {name: t.config for name, t in chosen.items()})
    _cache_programs()
    try:
        for name, task in chosen.items():
            Study(name, task, results, console).measure(
                CONTENDERS, EXTENDED, ABLATIONS, options.seeds, options.ablation_seeds
            )
    except KeyboardInterrupt:
        _report(results, out, console)
        console.print(f"stopped; the same command goes on from {out}")
        return 130
    _report(results, out, console)
    return 0


def _report(results: Results, out: Path, console: Console) -> None:
    """Writes and shows what is known so far, if it is enough to compare."""
    summaries = summarize(results.outcomes)
    if not summaries:
        return
    text = markdown(summaries)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    brief = out.with_name(f"{out.stem}_overview.md")
    brief.write_text(overview(summaries), encoding="utf-8")
    save_picture(out.with_suffix(".png"), summaries)
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _sparsify(config: Sections) -> Contender:
    """AdamW on the exact mean of masked gradients, masked from where SFPO masks."""
    steps, chosen = config.train.steps, config.sparsity
    begin = training.warmup_steps(config.communication, steps)
    assert isinstance(begin, int)
    schedule = cosine_sparsity(chosen.base, steps, chosen.final, begin=begin)
    tx = optax.chain(
        sparsify(
            schedule,
            error_feedback=chosen.error_feedback,
            min_size=chosen.min_size,
            axis_name="data",
        ),
        compressed_mean(identity(), "data"),
        training.make_dense_optimizer(config.optimizer, steps),
    )
    sparsity = np.asarray(schedule(np.arange(steps, dtype=np.int32)))
    course = Course(np.zeros(steps, np.int8), sparsity)
    return Contender(_SPARSIFY, tx, course=lambda freeze: course)


def _lengthened(config: Any, task: str, options: Options) -> Any:
    steps = getattr(options, f"{task}_steps")
    changes = {"train": {"steps": steps, "evaluate_every": steps, "compare": False}}
    return build(type(config), changes, base=config)


def _cache_programs() -> None:
    """Seeds differ in numbers only: their programs are compiled once."""
    place = Path(tempfile.gettempdir()) / f"sfpo_jax_convergence_{os.getuid()}"
    jax.config.update("jax_compilation_cache_dir", str(place))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
