"""Dataclasses from plain mappings, strictly: what is not known is refused by name.

A misspelt key that falls back to its default is found after the run, if ever; here it
stops the start, with the nearest known name.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be used: one line with key, value and remedy."""


class QuantityMark:
    """Marks text that holds a number with a unit; its section reads and checks it."""


Quantity = Annotated[str, QuantityMark()]
"""A size such as "256MB". A bare number gets as far as the section, which says why."""


def build(cls: type[T], values: Mapping[str, Any], *, base: T | None = None) -> T:
    """Makes a dataclass of dataclasses from nested mappings.

    Args:
      cls: a dataclass whose fields are numbers, bools, text, `Literal`s, unions of
        these, dataclasses of the same kind, or tuples of any one of them.
      values: the values by name; what is absent keeps its value in `base`.
      base: None = the defaults of `cls`.

    Raises:
      ConfigError: an unknown key, a value of another type, or a value that a section
        refuses; the message is one line and names the dotted key.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Sparsity:
      ...     base: float = 0.7
      >>> build(Sparsity, {"base": 1})
      Sparsity(base=1.0)
      >>> build(Sparsity, {"bse": 1})
      Traceback (most recent call last):
      ...
      sfpo_jax.training._build.ConfigError: unknown key `bse` (value 1): did you mean
      `base`?
    """
    return _build(cls, values, base, "", dotted_keys(cls))


def dotted_keys(cls: type) -> list[str]:
    """Names of all leaves of a dataclass of dataclasses, in order.

    Example:
      >>> @dataclasses.dataclass
      ... class Inner:
      ...     a: int = 1
      >>> @dataclasses.dataclass
      ... class Outer:
      ...     inner: Inner
      >>> dotted_keys(Outer)
      ['inner.a']
    """
    return list(leaf_hints(cls))


def leaf_hints(cls: type, prefix: str = "") -> dict[str, Any]:
    """Annotations of all leaves by dotted key."""
    found: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= leaf_hints(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            found[prefix + name] = hint
    return found


def unknown_key(key: str, value: Any, known: list[str]) -> ConfigError:
    """The error for a key nobody reads, with the nearest of the `known` dotted keys."""
    section, _, name = key.rpartition(".")
    prefix = f"{section}." if section else ""
    inside = [k.removeprefix(prefix) for k in known if k.startswith(prefix)]
    here = dict.fromkeys(k.partition(".")[0] for k in inside or known)
    elsewhere = {k.rpartition(".")[2]: k for k in reversed(known)}
    if near := difflib.get_close_matches(name, here, n=1):
        remedy = f"did you mean `{prefix}{near[0]}`?"
    elif near := difflib.get_close_matches(name, elsewhere, n=1):
        # The right name in the wrong section.
        remedy = f"did you mean `{elsewhere[near[0]]}`?"
    else:
        remedy = f"known here: {', '.join(here)}"
    return ConfigError(f"unknown key `{key}` (value {value!r}): {remedy}")


def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _build(
    cls: type[T], values: Any, base: T | None, prefix: str, known: list[str]
) -> T:
    section = prefix.rstrip(".")
    if not isinstance(values, Mapping):
        what = f"`{section}`" if section else "the configuration"
        inside = [k.removeprefix(prefix) for k in known if k.startswith(prefix)]
        raise ConfigError(
            f"{what} must be a section of keys, got {values!r}: "
            f"it holds {', '.join(inside)}"
        )
    hints = _hints(cls)
    for name, value in values.items():
        if name not in hints:
            raise unknown_key(f"{prefix}{name}", value, known)
    kwargs = {}
    for name, hint in hints.items():
        old = getattr(base, name, None)
        if name not in values:
            if base is not None:
                kwargs[name] = old
        elif typing.get_origin(hint) is tuple:
            kwargs[name] = _listed(f"{prefix}{name}", values[name], hint)
        elif dataclasses.is_dataclass(hint):
            kwargs[name] = _build(
                typing.cast(Any, hint), values[name], old, f"{prefix}{name}.", known
            )
        else:
            kwargs[name] = _typed(f"{prefix}{name}", values[name], hint, old)
    if missing := [
        field.name
        for field in dataclasses.fields(typing.cast(Any, cls))
        if field.name not in kwargs
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]:
        raise ConfigError(f"`{prefix}{missing[0]}` is missing: it has no default")
    try:
        return cls(**kwargs)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _listed(key: str, value: Any, hint: Any) -> tuple[Any, ...]:
    """A list of values or sections as the tuple `hint`, each named by its place."""
    cls = typing.get_args(hint)[0]
    is_list = isinstance(value, (list, tuple))
    if not dataclasses.is_dataclass(cls):
        if not is_list:
            raise ConfigError(
                f"`{key}` must be a list, each {_describe(cls)}, got {value!r}: write "
                "it in a file"
            )
        return tuple(_typed(f"{key}[{i}]", each, cls) for i, each in enumerate(value))
    section = typing.cast(type, cls)
    inside = dotted_keys(section)
    if not is_list:
        raise ConfigError(
            f"`{key}` must be a list of sections, got {value!r}: write it in a file, "
            f"each with {', '.join(inside)}"
        )
    return tuple(
        _build(
            section,
            values,
            None,
            f"{key}[{place}].",
            [f"{key}[{place}].{name}" for name in inside],
        )
        for place, values in enumerate(value)
    )


def _typed(key: str, value: Any, hint: Any, example: Any = None) -> Any:
    """`value` as the type `hint`, an int where a float is asked for becoming one.

    Args:
      key: the dotted key, for the message.
      value: what was given.
      hint: the annotation of the key.
      example: a value that would do, for the message.

    Raises:
      ConfigError: any other type, or none of the literals.
    """
    for option in _options(hint):
        if option is float and type(value) is int:
            return float(value)
        if typing.get_origin(option) is Literal:
            choices = typing.get_args(option)
            if any(value == c and type(value) is type(c) for c in choices):
                return value
        elif typing.get_origin(option) is Annotated:
            # The section's own message explains the missing unit.
            if type(value) in (str, int, float):
                return str(value)
        elif type(value) is option:
            return value
    message = f"`{key}` must be {_describe(hint)}, got {value!r}"
    choices = [c for o in _options(hint) for c in getattr(o, "__args__", ())]
    near = difflib.get_close_matches(str(value), map(str, choices), n=1)
    if near:
        message += f": did you mean '{near[0]}'?"
    elif example is not None:
        message += f": write for example {_plain(example)}"
    raise ConfigError(message)


def _plain(value: Any) -> str:
    """A value as YAML and the command line write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(o for arg in hint.__args__ for o in _options(arg))
    return (hint,)


def _describe(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
    }
    words = []
    for option in _options(hint):
        if typing.get_origin(option) is Literal:
            choices = [str(c) for c in option.__args__]
            words.append(
                f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
            )
        else:
            words.append(names.get(option, "text with a unit"))
    return " or ".join(words)
