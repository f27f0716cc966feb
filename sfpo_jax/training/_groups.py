"""Groups of parameters with a learning rate or a decay of their own."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

from sfpo_jax._validate import check_range


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters whose path a pattern is found in."""

    match: str
    """Regular expression, searched for in the path, as in blocks/0/mlp_in/kernel."""
    learning_rate: float = 1.0
    """Factor on the learning rate; 0 keeps the parameters as they are."""
    weight_decay: bool = True
    """Whether the matrices among them are decayed."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(
                "`optimizer.groups` must match by a regular expression, got "
                f"'{self.match}': {error}."
            ) from None
        check_range(
            "optimizer.groups learning_rate",
            self.learning_rate,
            0.0,
            float("inf"),
            "a factor on the learning rate",
            open_high=True,
        )


def group_of(groups: Sequence[Group], path: Any) -> Group | None:
    """The first group that a path of `jax.tree_util` belongs to."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return next((group for group in groups if re.search(group.match, name)), None)


def decayed(groups: Sequence[Group], params: Any) -> Any:
    """True for the leaves to decay: of two or more axes, in no group without decay.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"embed": jnp.ones((4, 4)), "w": jnp.ones((4, 4)), "b": jnp.ones(4)}
      >>> decayed([Group("embed", weight_decay=False)], params)
      {'b': False, 'embed': False, 'w': True}
    """

    def is_decayed(path: Any, leaf: Any) -> bool:
        group = group_of(groups, path)
        return leaf.ndim >= 2 and (group is None or group.weight_decay)

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def scale_by_groups(groups: Sequence[Group]) -> optax.GradientTransformation:
    """Multiplies each leaf's update by the factor of its group, decay and all.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_groups([Group("head", learning_rate=10.0)])
      >>> updates = {"head": jnp.ones(2), "body": jnp.ones(2)}
      >>> tx.update(updates, tx.init(updates))[0]["head"]
      Array([10., 10.], dtype=float32)
    """

    def scale(updates: Any, params: Any) -> Any:
        del params

        def scaled(path: Any, update: Any) -> Any:
            group = group_of(groups, path)
            factor = 1.0 if group is None else group.learning_rate
            return update if factor == 1.0 else update * factor

        return jax.tree_util.tree_map_with_path(scaled, updates)

    return optax.stateless(scale)


def check_groups(groups: Sequence[Group], params: Any) -> None:
    """Raises ValueError where a group has no parameter, for its pattern is misspelt.

    Args:
      groups: of `optimizer.groups`.
      params: a pytree of arrays or of their shapes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for group in groups:
        if all(group_of(groups, path) is not group for path, _ in leaves):
            names = [
                jax.tree_util.keystr(path, simple=True, separator="/")
                for path, _ in leaves[:3]
            ]
            raise ValueError(
                f"`optimizer.groups` must each match a parameter, got '{group.match}', "
                "which matches none that an earlier group has left: the paths are "
                f"{', '.join(names)}, ..."
            )
