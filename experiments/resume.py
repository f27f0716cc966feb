"""The configuration of a run that may be there already."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from experiments.output import CONFIG
from sfpo_jax.training import ConfigError, build, load_config, read_yaml

T = TypeVar("T")

# What the first start found out, and the next is not asked again.
_FOUND = {
    "communication.compression.algorithm": "auto",
    "communication.links.node": "measure",
    "communication.links.data": "measure",
}

# What a resumed run may be given anew, since no step depends on it.
FREE = {
    f"train.{name}"
    for name in (
        "name",
        "runs",
        "folder",
        "resume",
        "checkpoint_every",
        "keep",
        "tensorboard",
        "profile",
        "agree_every",
        "max_nonfinite",
    )
}


def load_run_config(
    defaults: T, argv: Sequence[str], *, prog: str, description: str
) -> T:
    """`load_config`; where a run is to go on, on top of what it began with.

    So `--train.resume FOLDER` alone is enough, and the same command with
    `--train.folder FOLDER` begins the run the first time and goes on the next.

    Args:
      defaults: a dataclass of sections, `train` among them.
      argv: the arguments after the program's name.
      prog: how the program is called, for the help.
      description: what it does, for the help.

    Raises:
      ConfigError: what `load_config` refuses; `train.resume` without a run; or a key
        that would make of the rest of the run another one.
    """
    config: Any = load_config(defaults, argv, prog=prog, description=description)
    is_resume = config.train.resume != "none"
    folder = Path(config.train.resume if is_resume else config.train.folder)
    path = folder / CONFIG
    if is_resume and not path.exists():
        raise ConfigError(
            f"`train.resume` must be the folder of a run, got '{folder}' without "
            f"{CONFIG}: look into {config.train.runs}, or begin with `train.folder`"
        )
    if not path.exists() or (config.train.folder == "none" and not is_resume):
        return config
    began = build(type(defaults), read_yaml(path), base=defaults)
    config = load_config(began, argv, prog=prog, description=description)
    old, new = _flat(began), _flat(config)
    for key in old:
        if new[key] == _FOUND.get(key):
            config = _replaced(config, key.split("."), old[key])
        elif old[key] != new[key] and key not in FREE and not _is_place(key):
            raise ConfigError(
                f"`{key}` must stay {old[key]} when a run goes on, got {new[key]}: "
                f"leave it to {path}, or begin another run"
            )
    return config


def _is_place(key: str) -> bool:
    """Whether a key says only where the run happens."""
    return key.startswith("distributed.")


def _replaced(config: Any, names: list[str], value: Any) -> Any:
    """`config` with another value under a dotted key."""
    name, *rest = names
    if rest:
        value = _replaced(getattr(config, name), rest, value)
    return dataclasses.replace(config, **{name: value})


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= _flat(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found
