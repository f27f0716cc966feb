"""Values of a YAML file replaced where they stand, its comments kept."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from sfpo_jax.training._yaml import parse_yaml, scalar

_WIDTH = 92


class Edit(NamedTuple):
    """A new value, and why."""

    value: Any  # a number, bool or text
    reason: str  # becomes the comment above the key


def edit_yaml(text: str, edits: Mapping[str, Edit], name: str = "<text>") -> str:
    """A document with some of its values replaced.

    What was said of an old value behind it is left out with it; the reason stands in
    lines of its own above the key.

    Args:
      text: YAML whose sections are written as blocks or in braces.
      edits: by dotted key.
      name: what to call the document in messages.

    Returns:
      The document; `parse_yaml` of it has the new values, and all others as they were.

    Raises:
      ConfigError: what `parse_yaml` raises.
      KeyError: a key that the document does not have.

    Example:
      >>> print(
      ...     edit_yaml("a:\\n  b: 8  # old\\n", {"a.b": Edit(64, "8 devices")}), end=""
      ... )
      a:
        # 8 devices
        b: 64
    """
    parse_yaml(text, name)
    spans = _spans(yaml.compose(text, Loader=yaml.SafeLoader), "")
    lines = text.splitlines(keepends=True)
    # From the end, so that the places of those before stay true.
    for key in sorted(edits, key=lambda k: spans[k], reverse=True):
        line, start, end = spans[key]
        old, edit = lines[line].rstrip("\n"), edits[key]
        after = old[end:]
        is_alone = not after.strip() or after.lstrip().startswith("#")
        new = old[:start] + _plain(edit.value) + ("" if is_alone else after)
        indent = old[: len(old) - len(old.lstrip())]
        comment = textwrap.wrap(edit.reason, _WIDTH - len(indent))
        lines[line] = "".join(f"{indent}# {x}\n" for x in comment) + new + "\n"
    return "".join(lines)


def _plain(value: Any) -> str:
    """As `scalar` reads it back."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}" if float(f"{value:.4g}") == value else repr(value)
    plain = str(value)
    return json.dumps(plain) if scalar(plain) != value else plain


def _spans(node: yaml.Node, prefix: str) -> dict[str, tuple[int, int, int]]:
    """(line, first column, column behind) of each plain value, by dotted key."""
    found: dict[str, tuple[int, int, int]] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            found |= _spans(value, f"{prefix}{key.value}.")
    elif isinstance(node, yaml.ScalarNode) and (
        node.start_mark.line == node.end_mark.line
    ):
        start, end = node.start_mark, node.end_mark
        found[prefix.rstrip(".")] = (start.line, start.column, end.column)
    return found
