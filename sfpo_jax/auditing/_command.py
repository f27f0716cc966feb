"""`python -m sfpo_jax audit`: the auditor from a shell, one line for each mistake."""

import argparse
import json
import math
import sys

from sfpo_jax.auditing._audit import audit
from sfpo_jax.memory import (
    CompileError,
    MissingCompilerError,
    add_target_arguments,
    find_device,
    load_target,
    parse_mesh,
    prepare_devices,
)

_PROGRAM = "python -m sfpo_jax audit"
_USAGE_ERROR = 2


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_target_arguments(parser)
    parser.add_argument(
        "--compressed",
        metavar="AXES",
        help="mesh axes over which nothing dense is to travel, e.g. node,data",
    )
    parser.add_argument(
        "--releases-gradients",
        action="store_true",
        default=None,
        help="find gradients of all parameters alive at once",
    )


def run_audit(options: argparse.Namespace) -> int:
    """Audits and prints.

    Returns:
      0 when nothing is found, 1 when something is, 2 when the command is wrong.
    """
    try:
        find_device(options.device)
        mesh_shape = parse_mesh(options.mesh)
        axes = options.compressed.split(",") if options.compressed else None
        if unknown := set(axes or ()) - {*mesh_shape, "node", "data", "op"}:
            raise ValueError(
                f"`--compressed` has {sorted(unknown)}, no axis of the mesh."
            )
        prepare_devices(options.compiler, math.prod(mesh_shape.values()))
        build = load_target(options.target)
    except ValueError as error:
        return _fail(error)
    # What the target itself raises keeps its traceback.
    try:
        report = audit(
            build,
            device=options.device,
            mesh_shape=mesh_shape,
            compiler=options.compiler,
            compressed_axes=axes,
            releases_gradients=options.releases_gradients,
        )
    except (MissingCompilerError, CompileError) as error:
        return _fail(error)
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 1 if report else 0


def _fail(error: Exception) -> int:
    print(f"{_PROGRAM}: {error}", file=sys.stderr)
    return _USAGE_ERROR
