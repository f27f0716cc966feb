"""A configuration from a YAML file and the command line.

Tyro prints the help and reads the options; its boxes of several lines are folded into
the one line that every other error of a configuration has.
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro

from sfpo_jax.training._build import (
    ConfigError,
    build,
    check_type,
    dotted_keys,
    leaf,
    unknown_key,
)
from sfpo_jax.training._yaml import read_yaml, scalar

T = TypeVar("T")

_OPTION = re.compile(r"--([\w.-]+)")
_PREFIX = re.compile(r"Error parsing [\w.-]+: ")


def load_config(defaults: T, argv: Sequence[str], *, prog: str, description: str) -> T:
    """Reads `--config FILE` and then one option for each key.

    Args:
      defaults: a dataclass of dataclasses; what neither the file nor the options name.
      argv: the arguments after the program's name.
      prog: how the program is called, for the help.
      description: what it does, for the help.

    Returns:
      The configuration, of the type of `defaults`.

    Raises:
      ConfigError: an unknown key or option, a value of a wrong type, or one that a
        section refuses.
      SystemExit: with status 0 after `--help`.
    """
    path, options = _split_config(argv)
    cls = type(defaults)
    base = defaults if path is None else build(cls, read_yaml(path), base=defaults)
    printed = io.StringIO()
    try:
        # Shown for real: `--help` alone, on the standard output.
        with contextlib.redirect_stderr(printed):
            config, unknown = tyro.cli(
                cls,
                args=options,
                prog=prog,
                description=f"{description} --config FILE reads a YAML file first; "
                "an option wins over the file.",
                default=base,
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.FlagConversionOff,),
                registry=_registry(),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise _folded(printed.getvalue(), base, options) from None
    if unknown:
        raise _unknown_option(unknown, dotted_keys(cls))
    return config


@contextlib.contextmanager
def exit_on_config_error(prog: str) -> Iterator[None]:
    """Ends the program with one line and status 2 where a ValueError is raised.

    Wrap what builds a run, not the run: there a ValueError is a fault to be seen whole.
    """
    try:
        yield
    except ValueError as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"{prog}: {message}\n")
        raise SystemExit(2) from None


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Bools are written as in YAML."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[bool] | None:
        if info.type is not bool:
            return None
        words = {"true": True, "false": False}
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{true,false}",
            instance_from_str=lambda given: words[given[0]],
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [str(value).lower()],
            choices=tuple(words),
        )

    return registry


def _split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Takes `--config FILE` out of the arguments; the last one wins."""
    path, rest, remaining = None, [], iter(argv)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name != "--config":
            rest.append(argument)
            continue
        path = value if equals else next(remaining, None)
        if not path:
            raise ConfigError("`--config` needs the path of a YAML file after it")
    return path, rest


def _unknown_option(unknown: list[str], known: list[str]) -> ConfigError:
    first, _, value = unknown[0].partition("=")
    if not first.startswith("--"):
        return ConfigError(
            f"unexpected argument '{first}': an option is written --section.key value"
        )
    value = value or " ".join(unknown[1:2])
    return unknown_key(first.removeprefix("--"), value, known)


def _folded(printed: str, base: Any, options: Sequence[str]) -> ConfigError:
    """The error in Tyro's box, in one line and in the words of the YAML reader."""
    lines = [line.strip("│ ") for line in printed.splitlines()]
    lines = [line for line in lines if line and line[0] not in "╭╰"]
    rules = [i for i, line in enumerate(lines) if line.startswith("──")]
    message = " ".join(lines[: rules[0]] if rules else lines)
    if (match := _OPTION.search(message)) and match[1] in dotted_keys(type(base)):
        value = _value_of(match[1], options)
        if value is None:
            return ConfigError(f"`--{match[1]}` needs a value after it")
        check_type(match[1], scalar(value), *leaf(base, match[1]))
    return ConfigError(_PREFIX.sub("", message))


def _value_of(key: str, options: Sequence[str]) -> str | None:
    for option, following in zip(options, [*options[1:], None], strict=True):
        name, equals, value = option.partition("=")
        if name.removeprefix("--").replace("-", "_") == key:
            return value if equals else following
    return None
