"""Models as a stack of equal layers between what comes before and after."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BlockFn = Callable[..., Any]
# The name of the only stack of a model whose `block` is one function.
_ONLY = ""


class LayeredModel(NamedTuple):
    """Three pure functions; parameters are ``{"outer": tree, "layers": stack}``.

    `x`, what flows from layer to layer, is any pytree of arrays of which every layer
    keeps shapes and dtypes. A leaf that a block returns as it got it, such as the
    encoder's output in a decoder, is kept once, not once a layer.

    Attributes:
      embed: (outer, batch, key) -> x.
      block: (layer, x, key) -> x, `layer` one slice of the stack. Several stacks: a
        mapping from name to function, run in its order, with `params["layers"]` a
        mapping of stacks by the same names.
      loss: (outer, x, batch, key) -> the mean loss of the local batch, a scalar, or
        (loss, aux), aux a dict of scalars.

    `outer` may be used in both `embed` and `loss`, as tied embeddings are. `key` is
    None unless the step was made with `has_key`; a layer gets the same one each time
    it is computed again.
    """

    embed: Callable[..., Any]
    block: BlockFn | Mapping[str, BlockFn]
    loss: Callable[..., Any]

    def blocks(self) -> dict[str, BlockFn]:
        """Functions of the stacks by name, in the order they run."""
        return {_ONLY: self.block} if callable(self.block) else dict(self.block)

    def by_name(self, layers: Any) -> dict[str, Any]:
        """The stacks of a tree that has one for each layer tree of the parameters."""
        if callable(self.block):
            return {_ONLY: layers}
        return {name: layers[name] for name in self.block}

    def join(self, stacks: Mapping[str, Any]) -> Any:
        """The inverse of `by_name`."""
        return stacks[_ONLY] if callable(self.block) else dict(stacks)

    def check(self, params: Any) -> None:
        """Raises ValueError where `params` have not the form described above."""
        if not isinstance(params, Mapping) or set(params) != {"outer", "layers"}:
            got = sorted(params) if isinstance(params, Mapping) else type(params)
            raise ValueError(
                '`params` must be {"outer": tree, "layers": stacked tree}, got '
                f"{got}: put what is not in a layer under outer, and see "
                "`sfpo_jax.stack_layers`."
            )
        layers = params["layers"]
        if not callable(self.block):
            given = sorted(layers) if isinstance(layers, Mapping) else type(layers)
            if not isinstance(layers, Mapping) or set(layers) != set(self.block):
                raise ValueError(
                    f'`params["layers"]` must have the stacks {sorted(self.block)} of '
                    f"`block`, got {given}."
                )
        for name, stack in self.by_name(layers).items():
            depth_of(stack, f'params["layers"]{f"[{name!r}]" if name else ""}')


def depth_of(stack: Any, name: str = "layers") -> int:
    """Layers of a stack: the length that the leading axes of its leaves share.

    Raises:
      ValueError: lengths that differ (which leaf), or no leaf at all.
    """
    leaves = jax.tree_util.tree_leaves_with_path(stack)
    if not leaves:
        raise ValueError(f"`{name}` has no arrays: a stack needs at least one.")
    depths = {jax.tree_util.keystr(p): (jnp.shape(x) or (0,))[0] for p, x in leaves}
    first, depth = next(iter(depths.items()))
    for path, length in depths.items():
        if length != depth or length == 0:
            raise ValueError(
                f"`{name}` must be stacked along a leading axis that all leaves share, "
                f"but {path} has {length} layers and {first} has {depth}."
            )
    return depth


def stack_layers(layers: Sequence[Any]) -> Any:
    """Joins the parameters of equal layers into one stack, a new leading axis.

    Args:
      layers: trees of arrays with the same structure, shapes and dtypes.

    Raises:
      ValueError: layers that do not stack, with the layer and the leaf that differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> layers = [{"w": jnp.ones((4, 4))} for _ in range(3)]
      >>> sfpo.stack_layers(layers)["w"].shape
      (3, 4, 4)
    """
    if not layers:
        raise ValueError("`layers` is empty: a stack needs at least one layer.")
    first, treedef = jax.tree_util.tree_flatten_with_path(layers[0])
    for index, layer in enumerate(layers[1:], start=1):
        leaves, other = jax.tree_util.tree_flatten_with_path(layer)
        if other != treedef:
            odd = {jax.tree_util.keystr(p) for p, _ in first} ^ {
                jax.tree_util.keystr(p) for p, _ in leaves
            }
            what = ", ".join(sorted(odd)) or "the kind of its nodes"
            raise ValueError(
                f"`layers[{index}]` does not stack on layer 0: they differ in {what}. "
                "Give each kind of layer a stack of its own."
            )
        for (path, a), (_, b) in zip(first, leaves, strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise ValueError(
                    f"`layers[{index}]` does not stack on layer 0: "
                    f"{jax.tree_util.keystr(path)} is {b.dtype}{list(b.shape)} there "
                    f"and {a.dtype}{list(a.shape)} here. Give each kind of layer a "
                    "stack of its own."
                )
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
