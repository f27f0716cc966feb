"""Does SFPO reach the accuracy of dense AdamW at the same number of steps?

    python -m experiments.bench.parity

Each variant searches the same learning rates on seed 0 and then runs other seeds at its
own best rate, so that no seed that chose a rate is reported. Writes a JSON file after
every run and starts again where it was stopped; from it a table and a picture.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.bench.parity_report import markdown, save_picture, summarize
from experiments.vit_run import Config, prepare
from sfpo_jax.training import ConfigError, build, exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.parity"

# Changes against the default configuration.
VARIANTS: dict[str, dict[str, Any]] = {
    "dense AdamW": {"communication": {"compression": {"algorithm": "none"}}},
    "SFPO": {},
    "SFPO, masked from step 0": {"sparsity": {"begin": "start"}},
    "sparse 1-bit, density 0.1": {
        "communication": {"compression": {"algorithm": "sparse_1bit", "density": 0.1}}
    },
    "sparse 1-bit, density 0.3": {
        "communication": {"compression": {"algorithm": "sparse_1bit", "density": 0.3}}
    },
}
RATES = (0.0025, 0.005, 0.01)
SEARCH_SEED = 0

Outcome = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, and where to."""

    steps: int = Config().train.steps
    """Updates of each run."""
    seeds: int = 3
    """Runs of each variant at its best rate."""
    support_only: bool = True
    """Measure 1-bit Adam with signs of the largest entries only, too."""
    out: str = "docs/results/vit_parity.json"
    """The file of results; the table and the picture lie beside it."""

    def __post_init__(self) -> None:
        for name in ("steps", "seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}"
                )


class Results:
    """Outcomes by variant, rate and seed, kept in a JSON file.

    Args:
      path: the file; read where it exists.
      base: the configuration that the variants change.

    Raises:
      ConfigError: the file was measured with another configuration.
    """

    def __init__(self, path: Path, base: Config) -> None:
        self._path = path
        self._config = dataclasses.asdict(base)
        self.outcomes: list[Outcome] = []
        if path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["config"] != self._config:
                raise ConfigError(
                    f"`out` holds runs of another configuration, got '{path}': move "
                    "the file away or name another"
                )
            self.outcomes = held["runs"]

    def find(self, variant: str, rate: float, seed: int) -> Outcome | None:
        """The outcome of a run, None where it was not made yet."""
        wanted = (variant, rate, seed)
        for outcome in self.outcomes:
            if wanted == tuple(outcome[k] for k in ("variant", "rate", "seed")):
                return outcome
        return None

    def add(self, outcome: Outcome) -> None:
        """Keeps an outcome and writes the file: a stop loses one run at most."""
        self.outcomes.append(outcome)
        text = json.dumps({"config": self._config, "runs": self.outcomes}, indent=1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".tmp")
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(self._path)


def measure(
    base: Config,
    results: Results,
    *,
    seeds: int,
    variants: dict[str, dict[str, Any]] = VARIANTS,
    rates: Sequence[float] = RATES,
    console: Console,
) -> dict[str, float]:
    """Makes the runs that `results` lacks.

    Args:
      base: the configuration that the variants change.
      results: what is known; grows.
      seeds: runs of each variant at its best rate, with seeds after `SEARCH_SEED`.
      variants: changes against `base`, by name.
      rates: learning rates to search.
      console: where a line a run goes.

    Returns:
      The best rate of each variant: the highest accuracy of the search, the lower test
      loss among equals.
    """
    best: dict[str, float] = {}
    for variant, changes in variants.items():
        config = build(Config, changes, base=base)
        searched = [
            _outcome(variant, config, rate, SEARCH_SEED, results, console)
            for rate in rates
        ]
        chosen = max(searched, key=lambda o: (o["test_accuracy"], -o["test_loss"]))
        best[variant] = chosen["rate"]
        for seed in range(SEARCH_SEED + 1, SEARCH_SEED + 1 + seeds):
            _outcome(variant, config, best[variant], seed, results, console)
    return best


def _outcome(
    variant: str,
    config: Config,
    rate: float,
    seed: int,
    results: Results,
    console: Console,
) -> Outcome:
    """One run, or what is known of it."""
    if known := results.find(variant, rate, seed):
        return known
    changes = {"optimizer": {"learning_rate": rate}, "train": {"seed": seed}}
    run = prepare(build(Config, changes, base=config))
    result = run.start(run.contenders[-1])
    steps = len(result.sparsity)
    freeze = steps if result.freeze is None else result.freeze
    outcome = {
        "variant": variant,
        "rate": rate,
        "seed": seed,
        "test_accuracy": result.test_accuracy,
        "test_loss": result.test_loss,
        "train_loss": result.train_loss,
        "bits_per_parameter": result.bits_per_parameter,
        "freeze": result.freeze,
        "mean_sparsity": float(result.sparsity[freeze:].mean())
        if freeze < steps
        else 0.0,
        "step_seconds": result.step_seconds,
        "seconds": result.seconds,
    }
    results.add(outcome)
    console.print(
        f"{variant}: rate {rate:g}, seed {seed}: accuracy {result.test_accuracy:.1%}, "
        f"{result.seconds:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    return outcome


def main(argv: Sequence[str], base: Config | None = None) -> int:
    """Measures what is missing and writes the table and the picture.

    Args:
      argv: the arguments after the program's name.
      base: the configuration that the variants change; None = the default.

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
            description="Compares variants of SFPO with dense AdamW.",
        )
        out = Path(options.out)
        base = build(Config, {"train": {"steps": options.steps}}, base=base)
        results = Results(out, base)
    try:
        best = measure(
            base,
            results,
            seeds=options.seeds,
            variants={
                name: changes
                for name, changes in VARIANTS.items()
                if options.support_only or not name.startswith("sparse")
            },
            console=console,
        )
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on from {out}")
        return 130
    summaries = summarize(results.outcomes, best, options.seeds)
    out.with_suffix(".md").write_text(markdown(summaries), encoding="utf-8")
    save_picture(out.with_suffix(".png"), results.outcomes, summaries)
    console.print(markdown(summaries), highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
