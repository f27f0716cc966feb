"""A configuration from a YAML file and the command line.

Tyro writes the help, from the dataclasses and their docstrings. The values themselves
pass through the reader of the file: both spell a value alike, and refuse it in the same
single line.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro

from sfpo_jax.training._build import ConfigError, build, leaf_hints, unknown_key
from sfpo_jax.training._yaml import read_yaml, scalar

T = TypeVar("T")


def load_config(defaults: T, argv: Sequence[str], *, prog: str, description: str) -> T:
    """Reads `--config FILE` and then `--section.key value` or `--section.key=value`.

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

    Example:
      >>> from sfpo_jax.training import Sparsity
      >>> argv = ["--base", "0.6"]
      >>> load_config(Sparsity(), argv, prog="mask", description="Masks.").base
      0.6
    """
    cls = type(defaults)
    if "--help" in argv or "-h" in argv:
        _print_help(defaults, prog, description)
    path, options = None, []
    for name, value in _pairs(argv):
        if name == "config":
            path = value
        else:
            options.append((name, value))
    base = defaults if path is None else build(cls, read_yaml(path), base=defaults)
    return build(cls, _nested(options, leaf_hints(cls)), base=base)


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


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of each option; hyphens in a name are as good as underscores."""
    remaining = iter(argv)
    for argument in remaining:
        if not argument.startswith("--"):
            raise ConfigError(
                f"unexpected argument '{argument}': write --section.key value"
            )
        name, equals, value = argument.removeprefix("--").partition("=")
        if not equals:
            following = next(remaining, None)
            # A negative number starts with one hyphen, an option with two.
            if following is None or following.startswith("--"):
                raise ConfigError(f"`--{name}` needs a value after it")
            value = following
        yield name.replace("-", "_"), value


def _nested(
    options: Sequence[tuple[str, str]], known: dict[str, Any]
) -> dict[str, Any]:
    """The options as the mapping that a file with them would be; the last one wins."""
    root: dict[str, Any] = {}
    for key, text in options:
        # A shell takes quotes away: where text is asked for, 7 is text.
        value = text if known.get(key) is str else scalar(text)
        if key not in known:
            raise unknown_key(key, value, list(known))
        *sections, name = key.split(".")
        inner = root
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return root


def _print_help(defaults: Any, prog: str, description: str) -> None:
    """Lists every key with its type, meaning and default, and exits with status 0."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[bool] | None:
        """Shows bools as YAML and `scalar` spell them."""
        if info.type is not bool:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{true,false}",
            instance_from_str=lambda given: given[0] == "true",
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [str(value).lower()],
        )

    tyro.cli(
        type(defaults),
        args=["--help"],
        prog=prog,
        description=f"{description} --config FILE reads a YAML file first; an option "
        "wins over the file. Lists (optimizer.groups) are written in the file.",
        default=defaults,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
        registry=registry,
    )
