"""The command line: `python -m sfpo_jax COMMAND`."""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from sfpo_jax import _diagnose, _doctor, _tune
from sfpo_jax.auditing import add_audit_arguments, run_audit
from sfpo_jax.memory import add_plan_arguments, run_plan
from sfpo_jax.parallel import (
    add_launch_arguments,
    add_links_arguments,
    run_launch,
    run_links,
)

PROGRAM = "python -m sfpo_jax"


def _run_doctor(options: argparse.Namespace) -> int:
    del options
    return _doctor.run()


class Command(NamedTuple):
    """What a command does, in one line and in code."""

    summary: str
    run: Callable[[argparse.Namespace], int]  # returns the exit status
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None


COMMANDS = {
    "doctor": Command(
        "what is installed, on which devices it runs, and what to do about the rest",
        _run_doctor,
    ),
    "plan": Command(
        "how much memory a program takes on a GPU that is not there, and whose it is",
        run_plan,
        add_plan_arguments,
    ),
    "audit": Command(
        "what a compiled step does otherwise than was asked: copies, dense transfers",
        run_audit,
        add_audit_arguments,
    ),
    "links": Command(
        "how fast the links between the devices are, and what is fastest over them",
        run_links,
        add_links_arguments,
    ),
    "tune": Command(
        "which numbers a configuration takes on so many devices, and why",
        _tune.run,
        _tune.add_arguments,
    ),
    "diagnose": Command(
        "what went wrong in a run, by what it wrote down, and the line to change",
        _diagnose.run,
        _diagnose.add_arguments,
    ),
    "launch": Command(
        "how a run behaves on several hosts, which are processes on this machine",
        run_launch,
        add_launch_arguments,
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line: the usage that argparse prints first hides what is wrong.
        self.exit(2, f"{self.prog}: {message} (see {PROGRAM} --help)\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Sparse, one-bit training in JAX.")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=_Parser
    )
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.summary, description=f"Tells {command.summary}."
        )
        if command.add_arguments is not None:
            command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status: 0 when all is well, 1 when the command found something wrong.

    Raises:
      SystemExit: with status 2 for an unknown command or option, 0 after `--help`.
    """
    parser = _build_parser()
    if not argv:
        parser.print_help()
        return 0
    name = argv[0]
    if not name.startswith("-") and name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else f"use {', '.join(COMMANDS)}"
        parser.error(f"unknown command '{name}': {remedy}")
    options = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
