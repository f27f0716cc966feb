"""`python -m sfpo_jax plan`: the planner from a shell, one line for each mistake."""

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from sfpo_jax.memory._batch_size import max_batch_size
from sfpo_jax.memory._compile import CompileError
from sfpo_jax.memory._devices import DEVICES, find_device
from sfpo_jax.memory._lifetimes import LifetimesError
from sfpo_jax.memory._picture import save_lifetimes
from sfpo_jax.memory._planner import budget_bytes, plan
from sfpo_jax.memory._topology import MissingCompilerError, compiler_problem
from sfpo_jax.units import format_bytes

_USAGE_ERROR = 2


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """What is compiled, for which devices, by whom; and the form of the answer."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="module:function, of build(mesh) -> (step, *arguments)",
    )
    parser.add_argument(
        "--device", default="a100-80gb", help=f"one of {', '.join(DEVICES)}"
    )
    parser.add_argument(
        "--mesh", default="data=1", help="axes and sizes, e.g. node=2,data=8"
    )
    parser.add_argument(
        "--compiler", default="auto", choices=("auto", "gpu", "cpu"), help="whose"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_target_arguments(parser)
    parser.add_argument(
        "--budget", help="what a device may hold, e.g. 40GB; all its memory if not said"
    )
    parser.add_argument(
        "--max-batch-size",
        action="store_true",
        help="the largest batch that fits, of build(mesh, batch_size)",
    )
    parser.add_argument(
        "--multiple-of", type=int, default=1, metavar="N", help="of that batch"
    )
    parser.add_argument(
        "--lifetimes", metavar="FILE.png", help="draw what lives when, the peak marked"
    )
    parser.add_argument("--no-cache", action="store_true", help="compile anew")


def run_plan(options: argparse.Namespace) -> int:
    """Plans and prints.

    Returns:
      0 when the program fits, 1 when it does not, 2 when the command is wrong.
    """
    if problem := _picture_problem(options):
        print(f"python -m sfpo_jax plan: {problem}", file=sys.stderr)
        return _USAGE_ERROR
    try:
        budget_bytes(find_device(options.device), options.budget)
        mesh_shape = parse_mesh(options.mesh)
        prepare_devices(options.compiler, math.prod(mesh_shape.values()))
        build = load_target(options.target)
    except ValueError as error:
        print(f"python -m sfpo_jax plan: {error}", file=sys.stderr)
        return _USAGE_ERROR
    chosen = {
        "device": options.device,
        "mesh_shape": mesh_shape,
        "budget": options.budget,
        "compiler": options.compiler,
        "cache": not options.no_cache,
    }
    # What the target itself raises keeps its traceback.
    try:
        if options.max_batch_size:
            return _print_batch_size(build, options, chosen)
        made = plan(build, **chosen)
        if options.lifetimes:
            save_lifetimes(options.lifetimes, made)
    except (MissingCompilerError, CompileError, LifetimesError) as error:
        print(f"python -m sfpo_jax plan: {error}", file=sys.stderr)
        return _USAGE_ERROR
    print(json.dumps(made.to_dict(), indent=2) if options.json else made)
    return 0 if made.fits else 1


def _picture_problem(options: argparse.Namespace) -> str:
    """Why `--lifetimes` cannot be had, found before anything compiles; "" where it can.

    A large program compiles for a minute.
    """
    if not options.lifetimes:
        return ""
    if importlib.util.find_spec("matplotlib") is None:
        return (
            "`--lifetimes` needs matplotlib: pip install 'sfpo_jax[experiments]', in "
            "the checkout pip install -e '.[experiments]'"
        )
    if options.max_batch_size:
        return "`--lifetimes` draws one plan: leave `--max-batch-size` away"
    folder = Path(options.lifetimes).absolute().parent
    if not folder.is_dir():
        return f"`--lifetimes` has no folder '{folder}': make it, or name another"
    return ""


def parse_mesh(text: str) -> dict[str, int]:
    """Reads axes and sizes.

    Raises:
      ValueError: not of the form axis=size, a size that is no positive number, an axis
        given twice.

    Example:
      >>> parse_mesh("node=2,data=8")
      {'node': 2, 'data': 8}
    """
    remedy = "write axes and sizes, for example 'node=2,data=8'"
    shape: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"`mesh` has the part {part!r}: {remedy}.")
        if name in shape:
            raise ValueError(f"`mesh` has the axis {name!r} twice: {remedy}.")
        shape[name] = int(size)
    if not shape:
        raise ValueError(f"`mesh` is empty: {remedy}.")
    return shape


def load_target(target: str) -> Callable[..., Any]:
    """Imports `module:function`.

    Raises:
      ValueError: not of that form, no such module (another one that the module itself
        misses keeps its traceback), no such function.

    Example:
      >>> load_target("math:prod")([2, 3])
      6
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"`TARGET` must be module:function, got {target!r}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module may be there and miss another one: that is not a wrong TARGET.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"`TARGET` names the module {module_name!r}, which is not found from "
            f"{os.getcwd()}: run it where `import {module_name}` works."
        ) from None
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"`TARGET` names {name!r}, no function of {module_name!r}.")
    return found


def prepare_devices(compiler: str, devices: int) -> None:
    """Keeps the process off a GPU that is there, and shows enough CPU devices."""
    try:
        jax.config.update("jax_platforms", "cpu")
        flags = os.environ.get("XLA_FLAGS", "")
        is_cpu = compiler == "cpu" or compiler_problem() is not None
        if is_cpu and "xla_force_host_platform_device_count" not in flags:
            jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        # The backend runs already, in a process that is not the command's own.
        return


def _print_batch_size(
    build: Callable[..., Any], options: argparse.Namespace, chosen: dict[str, Any]
) -> int:
    size = max_batch_size(build, multiple_of=options.multiple_of, **chosen)
    if size == 0:
        print(f"no batch fits, not even {options.multiple_of}", file=sys.stderr)
        return 1
    made = plan(lambda mesh: build(mesh, size), **chosen)
    if options.json:
        print(json.dumps({"max_batch_size": size, "plan": made.to_dict()}, indent=2))
        return 0
    print(f"largest batch: {size}, at {format_bytes(made.total_bytes)} a device\n")
    print(made)
    return 0
