"""`python -m sfpo_jax diagnose`: what a run's own records say of it."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sfpo_jax import tuning

_PROGRAM = "python -m sfpo_jax diagnose"
_USAGE_ERROR = 2
_METRICS, _CONFIG = "metrics.jsonl", "config.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("folder", metavar="RUN", help="a run's folder, finished or not")
    parser.add_argument("--json", action="store_true", help="for other programs")


def run(options: argparse.Namespace) -> int:
    """Prints the findings: 1 where there are some, 2 where nothing can be read."""
    try:
        from sfpo_jax.training import ConfigError, read_records, read_yaml
    except ModuleNotFoundError as error:
        return _fail(
            f"needs {error.name}: pip install 'sfpo_jax[experiments]', in the checkout "
            "pip install -e '.[experiments]'"
        )
    folder = Path(options.folder)
    if not (folder / _METRICS).is_file():
        return _fail(
            f"'{folder}' has no {_METRICS}: give the folder of a run, as "
            "runs/NAME-DATE-TIME"
        )
    config: dict[str, Any] = {}
    if (folder / _CONFIG).is_file():
        try:
            config = read_yaml(folder / _CONFIG)
        except ConfigError as error:
            return _fail(str(error))
    records = read_records(folder / _METRICS)
    found = tuning.diagnose(records, config)
    if options.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    elif found:
        print("\n\n".join(map(str, found)))
    else:
        steps = max((r["step"] for r in records), default=0)
        print(f"nothing found in {len(records)} records up to step {steps}")
    return 1 if found else 0


def _fail(message: str) -> int:
    print(f"{_PROGRAM}: {message}", file=sys.stderr)
    return _USAGE_ERROR
