"""`python -m sfpo_jax tune`: a configuration filled in for other devices."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sfpo_jax.memory import (
    DEVICES,
    BatchMemory,
    CompileError,
    MissingCompilerError,
    find_device,
    load_target,
    measure_batch,
    prepare_devices,
)
from sfpo_jax.units import parse_bytes

_PROGRAM = "python -m sfpo_jax tune"
_USAGE_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML configuration")
    parser.add_argument(
        "--cards", type=int, required=True, metavar="N", help="devices of the run"
    )
    parser.add_argument(
        "--base-cards",
        type=int,
        default=1,
        metavar="N",
        help="devices that the numbers in CONFIG were found for (default: 1)",
    )
    parser.add_argument(
        "--device",
        default="a100-80gb",
        help=f"{', '.join(DEVICES)} (default: a100-80gb)",
    )
    parser.add_argument(
        "--target",
        metavar="MODULE:FUNCTION",
        help="build(mesh, batch_size) -> (step, *args), to plan what a sample takes",
    )
    parser.add_argument(
        "--memory-per-sample", metavar="SIZE", help="of one device, instead of a target"
    )
    parser.add_argument(
        "--fixed", metavar="SIZE", help="taken whatever the batch (default: 0GB)"
    )
    parser.add_argument(
        "--extension",
        type=float,
        default=0.15,
        metavar="SHARE",
        help="of the steps, added for SFPO: 0.1 to 0.2 (default: 0.15)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write it there, not to the screen"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the tuned YAML; 2 where that cannot be, with one line that says why."""
    try:
        from sfpo_jax.training import tune_yaml
    except ModuleNotFoundError as error:
        return _fail(
            f"needs {error.name}: pip install 'sfpo_jax[experiments]', in the checkout "
            "pip install -e '.[experiments]'"
        )
    try:
        text = Path(options.config).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return _fail(f"cannot read '{options.config}': it is not UTF-8 text")
    except OSError as error:
        return _fail(f"cannot read '{options.config}': {error.strerror}")
    try:
        tuned = tune_yaml(
            text,
            cards=options.cards,
            base_cards=options.base_cards,
            memory=_memory(options),
            extension=options.extension,
            name=options.config,
        )
    except (ValueError, CompileError, MissingCompilerError) as error:
        return _fail(str(error))
    devices = f"{options.cards} x {options.device}"
    given = f"{options.base_cards} device" + "s" * (options.base_cards > 1)
    heading = f"# {options.config}, found for {given}, tuned for {devices}.\n"
    if options.out is None:
        print(heading + tuned.text, end="")
        return 0
    try:
        Path(options.out).write_text(heading + tuned.text, encoding="utf-8")
    except OSError as error:
        return _fail(f"cannot write '{options.out}': {error.strerror}")
    print(f"wrote {options.out}")
    return 0


def _memory(
    options: argparse.Namespace,
) -> BatchMemory | Callable[[Mapping[str, int]], BatchMemory] | None:
    """Of one sample: given, to be planned, or not known."""
    card = find_device(options.device)
    if options.memory_per_sample is not None:
        if options.target is not None:
            raise ValueError(
                "`--target` measures what `--memory-per-sample` says: give one of them"
            )
        each = parse_bytes(options.memory_per_sample)
        fixed = parse_bytes(options.fixed or "0GB")
        return BatchMemory(card.name, card.memory_bytes, each, fixed)
    if options.fixed is not None:
        raise ValueError(
            "`--fixed` goes with `--memory-per-sample`: give both, or let `--target` "
            "measure both"
        )
    if options.target is None:
        return None
    prepare_devices("auto", options.cards)
    build = load_target(options.target)

    def measure(mesh_shape: Mapping[str, int]) -> BatchMemory:
        few = 8 * mesh_shape["data"]
        return measure_batch(
            build, (few, 2 * few), device=options.device, mesh_shape=mesh_shape
        )

    return measure


def _fail(message: str) -> int:
    print(f"{_PROGRAM}: {message}", file=sys.stderr)
    return _USAGE_ERROR
