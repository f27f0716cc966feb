"""Which mesh axes a gradient transformation reduces over, found by tracing it."""

import math
import warnings
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax.collectives import vary, varying_axes
from sfpo_jax.transforms import is_per_rank

Axes = tuple[str, ...]


def reduced_axes(
    tx: optax.GradientTransformationExtraArgs, params: Any, mesh: Mesh, axes: Axes
) -> Axes:
    """Axes of `axes` over which `tx` makes its updates alike on all ranks.

    Nothing is compiled or run. For every set of axes, the largest first, the
    transformation is traced with gradients that differ along all axes and a state that
    differs along the others; the set is right if `shard_map`'s own bookkeeping finds
    that the updates then differ along just these others.

    Args:
      tx: any Optax transformation.
      params: arrays or ShapeDtypeStructs.
      mesh: the mesh that has the axes.
      axes: the axes the batch is split over.

    Raises:
      ValueError: no set fits, as where parts of `tx` name different axes.
    """
    wide = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    problem = "its updates differ along other axes than its state"
    for count in range(len(wide), 0, -1):
        for reduced in combinations(wide, count):
            others = tuple(axis for axis in wide if axis not in reduced)
            for is_shared in (True, False):
                probe = _Probe(tx, wide, others, is_shared)
                try:
                    probe.trace(params, mesh)
                except TypeError as error:
                    problem = str(error)
                    continue
                if probe.varying <= {others} and _fits(tx, params, mesh, reduced):
                    return reduced
    # Nothing is reduced over an axis of more than one rank, nor must be exchanged.
    probe = _Probe(tx, wide, wide, False)
    exchanged = _exchange_axes(probe.trace(params, mesh, is_checked=False).jaxpr)
    if exchanged.isdisjoint(wide):
        return ()
    raise ValueError(
        "it cannot be found out which mesh axes `tx` reduces over: give all its parts "
        "the same `axis_name`; accumulate with `microbatches=`, not optax.MultiSteps; "
        "or pass `reduces=` with the axes to `make_train_step`. "
        f"({problem.splitlines()[0]})"
    )


def reduced_beside(
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    mesh: Mesh,
    axes: Axes,
    shard_axes: Axes,
) -> Axes:
    """`reduced_axes`, which must not be among those that shards lie along.

    Raises:
      ValueError: as `reduced_axes`, or `tx` reduces over an axis of the shards, whose
        devices hold different parameters.
    """
    found = reduced_axes(tx, params, mesh, axes)
    shared = [axis for axis in found if axis in shard_axes]
    if shared:
        raise ValueError(
            f"`tx` reduces over {shared}, along which `shard` cuts the parameters: "
            "gradients are reduced exactly there. Give `tx` the axis_name of another "
            'axis, such as "node", or none; or leave `shard` at "none".'
        )
    return found


def _fits(
    tx: optax.GradientTransformationExtraArgs, params: Any, mesh: Mesh, axes: Axes
) -> bool:
    """True where all state that each rank has its own of is split over these axes."""
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, params)
    nodes = [n for n in jax.tree.leaves(state, is_leaf=is_per_rank) if is_per_rank(n)]
    return all(leaf.shape[:1] == (ranks,) for leaf in jax.tree.leaves(nodes))


class _Probe:
    """One trace of the transformation; `varying` collects what the updates vary over.

    With `is_shared`, state of which each rank has its own comes in as if all had the
    same: a packed first moment waits in such state during the warm-up.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        grad_axes: Axes,
        state_axes: Axes,
        is_shared: bool,
    ) -> None:
        self.tx = tx
        self.grad_axes = grad_axes
        self.state_axes = state_axes
        self.is_shared = is_shared
        self.varying: set[Axes] = set()

    def trace(self, params: Any, mesh: Mesh, is_checked: bool = True) -> Any:
        """The jaxpr; raises TypeError where the types along the axes do not agree."""
        spec = PartitionSpec()
        traced = jax.shard_map(
            self._run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=is_checked
        )
        with warnings.catch_warnings():
            # A wrong set of axes may look like gradients reduced before.
            warnings.simplefilter("ignore")
            return jax.make_jaxpr(traced)(params)

    def _run(self, params: Any) -> jax.Array:
        grads = vary(params, self.grad_axes)
        params = vary(params, self.state_axes)
        state = self.tx.init(params)
        if self.is_shared:
            state = jax.tree.map(
                lambda node: _like(node) if is_per_rank(node) else node,
                state,
                is_leaf=is_per_rank,
            )
        updates, _ = self.tx.update(grads, vary(state, self.state_axes), params)
        for leaf in jax.tree.leaves(updates):
            if jnp.size(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact):
                varying = varying_axes(leaf)
                self.varying.add(tuple(a for a in self.grad_axes if a in varying))
        return jnp.float32(0)


def _like(node: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), node)


def _exchange_axes(jaxpr: Any) -> set[str]:
    """Axes over which a jaxpr, or one inside it, exchanges more than scalars."""
    axes: set[str] = set()
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        is_sum = name.startswith("psum") and any(v.aval.ndim for v in equation.invars)
        if is_sum or name in ("all_to_all", "reduce_scatter"):
            names = params["axes"] if is_sum else params["axis_name"]
            axes |= {names} if isinstance(names, str) else set(names)
        for value in params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    axes |= _exchange_axes(inner)
    return axes
