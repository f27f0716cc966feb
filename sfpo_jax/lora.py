"""Adapters of low rank for Flax NNX models (Hu et al. 2021, arXiv:2106.09685).

A linear layer x W + b gets a path beside it, x W + b + x A B, of two thin matrices.
These alone are trained; B begins at zero, so that training begins with the model as it
is. What is not trained is neither differentiated nor reduced, has no optimizer state
and is in no checkpoint: `make_train_step(..., frozen=)` takes it as an argument.

Needs Flax, and safetensors to save and load: `import sfpo_jax` does not bring it.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sfpo_jax._validate import check_at_least

# Errors name this many tensors, and count the others.
_SHOWN = 4


class Split(NamedTuple):
    """A model as `nnx.merge(graph, trained, frozen)` puts it together."""

    graph: Any
    trained: Any  # the adapters, and what `also` names
    frozen: Any  # all other variables


def attach(model: nnx.Module, rank: int, *, match: str = "", rngs: nnx.Rngs) -> int:
    r"""Puts an adapter beside linear layers of a model, in place.

    A layer that the model holds in several places gets one adapter, in all of them.

    Args:
      model: its `nnx.Linear` layers, those of subclasses included, are meant.
      rank: columns of A [in, rank] and rows of B [rank, out], float32.
      match: regular expression, searched for in the layers' paths, as in
        blocks/0/mlp_in; "" matches all.
      rngs: the source of the initial A; B is zero.

    Returns:
      The number of layers that got one.

    Raises:
      ValueError: `rank` below 1, or `match` in no path of a linear layer.

    Example:
      >>> class MLP(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.first = nnx.Linear(8, 16, rngs=rngs)
      ...         self.last = nnx.Linear(16, 2, rngs=rngs)
      ...
      ...     def __call__(self, x):
      ...         return self.last(nnx.relu(self.first(x)))
      >>> model = MLP(nnx.Rngs(0))
      >>> attach(model, 4, match="first", rngs=nnx.Rngs(1))
      1
      >>> graph, trained, frozen = split(model, also="last")
      >>> sorted(jax.tree.map(jnp.shape, nnx.to_pure_dict(trained))["first"].items())
      [('lora_a', (8, 4)), ('lora_b', (4, 16))]
    """
    check_at_least("rank", rank, 1, "the columns of an adapter's first matrix")
    places = list(_layers(model, nnx.Linear))
    chosen = [p for p in places if any(re.search(match, path) for path in p.paths)]
    if not chosen:
        known = ", ".join(place.paths[0] for place in places[:_SHOWN])
        raise ValueError(
            f"`match` must be found in the path of a linear layer, got '{match}': the "
            f"paths are {known or 'none'}, ..."
        )
    for place in chosen:
        layer = place.layer
        place.put(
            nnx.LoRA(
                layer.in_features,
                rank,
                layer.out_features,
                base_module=layer,
                dtype=layer.dtype,
                rngs=rngs,
            )
        )
    return len(chosen)


def split(model: nnx.Module, also: str = r"^$") -> Split:
    """Takes a model apart into what is trained and what is not.

    Args:
      model: with adapters.
      also: regular expression of the paths of parameters that are trained besides, such
        as a new head.
    """

    def is_trained(path: Any, value: Any) -> bool:
        name = "/".join(map(str, path))
        is_param = isinstance(value, nnx.Variable) and issubclass(
            type(value), nnx.Param
        )
        return isinstance(value, nnx.LoRAParam) or (
            is_param and re.search(also, name) is not None
        )

    return Split(*nnx.split(model, is_trained, ...))


def merge(model: nnx.Module) -> int:
    """Adds each adapter to the weights beside it, W + A B, and takes it away, in place.

    The sum is made in float32 and kept in the dtype of W: the model computes what it
    did, up to rounding.

    Returns:
      The number of adapters.
    """
    places = list(_layers(model, nnx.LoRA))
    for place in places:
        layer: Any = place.layer.base_module
        kernel = layer.kernel[...]
        added = place.layer.lora_a[...] @ place.layer.lora_b[...]
        layer.kernel[...] = (kernel.astype(jnp.float32) + added).astype(kernel.dtype)
        place.put(layer)
    return len(places)


def save(path: str | Path, trained: Any) -> None:
    """Writes what is trained as safetensors, each array under its dotted path.

    Args:
      path: of the file.
      trained: from `split`, or of the state of a step.
    """
    from safetensors.numpy import save_file

    arrays = {name: np.asarray(jax.device_get(x)) for name, x in _named(trained)}
    save_file(arrays, str(path))


def load(path: str | Path, trained: Any) -> Any:
    """Reads what `save` wrote.

    Args:
      path: of the file.
      trained: a tree of the same paths, shapes and dtypes; its values are not read.

    Returns:
      A tree like `trained`.

    Raises:
      ValueError: arrays that are missing, too many, or of another shape or dtype, by
        name.
    """
    from safetensors.numpy import load_file

    held = load_file(str(path))
    wanted = _named(trained)
    faults = []
    for name, x in wanted:
        if name not in held:
            faults.append(f"{name} is missing")
        elif (held[name].shape, held[name].dtype) != (x.shape, x.dtype):
            got = f"{held[name].dtype} {list(held[name].shape)}"
            faults.append(f"{name} must be {x.dtype} {list(x.shape)}, got {got}")
    names = {name for name, _ in wanted}
    faults += [f"{name} is of no adapter" for name in sorted(set(held) - names)]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(
            f"`path` must hold the adapters of this model, got '{path}': "
            f"{'; '.join(faults[:_SHOWN])}{more}."
        )
    leaves = [jnp.asarray(held[name]) for name, _ in wanted]
    return jax.tree.unflatten(jax.tree.structure(trained), leaves)


class _Place(NamedTuple):
    """Where a layer is held; a shared one is in several places."""

    layer: Any
    paths: list[str]
    holders: list[tuple[Any, Any]]  # with the attribute, index or key

    def put(self, layer: nnx.Module) -> None:
        """Another layer in its place."""
        for parent, name in self.holders:
            if isinstance(name, int) or isinstance(parent, dict):
                parent[name] = layer
            else:
                setattr(parent, name, layer)


def _layers(model: nnx.Module, kind: type) -> Iterator[_Place]:
    """The modules of a kind below a model, but for those inside an adapter."""
    nodes = dict(nnx.iter_graph(model))
    # The graph has a shared module once, under the first of its paths.
    others: dict[int, list[Any]] = {}
    for path, node in nodes.items():
        for name, child in _children(node):
            others.setdefault(id(child), []).append((*path, name))
    for path, node in nodes.items():
        if path and isinstance(node, kind):
            paths = list(dict.fromkeys([path, *others.get(id(node), ())]))
            holders = [(nodes[path[:-1]], path[-1]) for path in paths]
            if not any(isinstance(parent, nnx.LoRA) for parent, _ in holders):
                yield _Place(node, ["/".join(map(str, p)) for p in paths], holders)


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    """(name, module or anything else) of what can hold modules."""
    if isinstance(node, nnx.Module):
        return nnx.iter_children(node)
    if isinstance(node, dict):
        return node.items()
    return enumerate(node) if isinstance(node, list) else ()


def _named(tree: Any) -> list[tuple[str, Any]]:
    """(dotted path, array) of each leaf."""
    return [
        (
            jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(
                ".value"
            ),
            leaf,
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
