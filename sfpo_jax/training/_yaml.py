"""YAML as a configuration needs it: no key twice, no surprise in the types.

Plain scalars follow the core schema of YAML 1.2. The 1.1 rules of most readers make
`1e-3` a text, `no` a bool and `1:30` the number 90.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

from sfpo_jax.training._build import ConfigError

_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


def parse_yaml(text: str, name: str = "<text>") -> dict[str, Any]:
    r"""Reads one YAML document whose top is a mapping.

    Args:
      text: the document.
      name: what to call it in messages.

    Returns:
      Dicts, lists, text, ints, floats, bools and None.

    Raises:
      ConfigError: no YAML, a key given twice, a key that is no text, or a top that is
        no mapping; one line with the document's name and the line in it.

    Example:
      >>> parse_yaml("optimizer: {learning_rate: 1e-3, schedule: no}")
      {'optimizer': {'learning_rate': 0.001, 'schedule': 'no'}}
      >>> parse_yaml("steps: 1\nsteps: 2")
      Traceback (most recent call last):
      ...
      sfpo_jax.training._build.ConfigError: <text>, line 2: `steps` is given twice:
      keep one of them
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context).split())
        raise ConfigError(f"{name}{where}: not YAML: {problem}") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{name}: not YAML: {problem}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}: must hold sections such as `train:`, not a value")
    return _mapping(root, "", name)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """`parse_yaml` of a UTF-8 file.

    Raises:
      ConfigError: also where the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read '{path}': it is not UTF-8 text") from None
    return parse_yaml(text, str(path))


def write_yaml(path: str | Path, config: Any) -> None:
    """Writes a dataclass of dataclasses so that `read_yaml` gives the same values."""
    text = yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False)
    Path(path).write_text(text, encoding="utf-8")


class _Dumper(yaml.SafeDumper):
    """Quotes the text that `scalar` would read as something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if scalar(text) == text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def scalar(text: str) -> Any:
    """A plain scalar of YAML 1.2: null, bool, int, float, otherwise the text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _mapping(node: yaml.MappingNode, prefix: str, name: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{name}, line {line}: a key must be a single word")
        key = f"{prefix}{key_node.value}"
        if key_node.value in result:
            raise ConfigError(
                f"{name}, line {line}: `{key}` is given twice: keep one of them"
            )
        result[key_node.value] = _value(value_node, f"{key}.", name)
    return result


def _value(node: yaml.Node, prefix: str, name: str) -> Any:
    # An alias can point at the mapping that holds it.
    if prefix.count(".") > 50:
        line = node.start_mark.line + 1
        raise ConfigError(f"{name}, line {line}: nested deeper than any section")
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, prefix, name)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{prefix}.", name) for item in node.value]
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return scalar(node.value) if is_plain else node.value
