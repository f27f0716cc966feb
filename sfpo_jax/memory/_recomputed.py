"""A loss whose backward pass computes again what is not kept, by names of values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sfpo_jax.memory._named import Named, select, trace_named
from sfpo_jax.memory._recompute_graph import Graph, make_graph
from sfpo_jax.memory._recompute_stack import Stack, make_stack


class Recorder:
    """Given in the place of names, it learns what could be kept.

    Attributes:
      graph: of the loss of a step, once it was traced.
      stacks: those of a layered step.
    """

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.stacks: dict[str, Stack] = {}

    def record(self, named: Named, trained: Sequence[bool]) -> None:
        """Reads a loss, the first of the function's outputs."""
        outs = len(named.closed.jaxpr.outvars)
        self.graph = make_graph(named, trained, [place == 0 for place in range(outs)])

    def record_block(
        self,
        name: str,
        block: Callable[..., Any],
        args: tuple[Any, ...],
        depth: int,
        microbatches: int,
    ) -> None:
        """Reads a block of a stack: (layer, floating leaves of x) -> (such, others)."""
        named = trace_named(block, args, {})
        trained = [jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(args)]
        outs, floats = len(named.closed.jaxpr.outvars), len(args[1])
        wanted = [place < floats for place in range(outs)]
        self.stacks[name] = make_stack(named, trained, wanted, depth, microbatches)


Keep = Recorder | Sequence[str]


def recomputed(loss_fn: Callable[..., Any], keep: Keep) -> Callable[..., Any]:
    """The same loss, whose backward pass keeps some named values alone.

    Between the values kept through which everything flows (a block's output, say),
    all is computed again from the nearest; what lies behind the last is not. Other
    names keep values in between.

    Args:
      loss_fn: (parameters, ...) -> loss | (loss, aux), with values named by
        `jax.ad_checkpoint.checkpoint_name`; names in a loop's body are not seen.
      keep: names: "block" for all values of that name, "block/3" for the fourth in the
        order of the program.

    Raises:
      ValueError: when called, a name that no value has, or names that cut nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> from sfpo_jax.memory import count_flops
      >>> def loss_fn(params, x):
      ...     for w in params:
      ...         x = checkpoint_name(jnp.tanh(x @ w), "layer")
      ...     return jnp.sum(x)
      >>> params, x = [jnp.eye(8)] * 4, jnp.ones((2, 8))
      >>> def products(fn):
      ...     jaxpr = jax.make_jaxpr(jax.grad(fn))(params, x)
      ...     return count_flops(jaxpr).total // (2 * 2 * 8 * 8)
      >>> products(loss_fn), products(recomputed(loss_fn, ["layer/1"]))
      (11, 13)
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        named = trace_named(loss_fn, args, kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        if isinstance(keep, Recorder):
            params = jax.tree.leaves(args[0])
            trained = [jnp.issubdtype(x.dtype, jnp.inexact) for x in params]
            keep.record(named, trained + [False] * (len(leaves) - len(params)))
            return named.run(leaves, None)
        saved = select(named.names, keep)
        if saved and not saved.intersection(named.cuts):
            kinds = sorted({cut.rpartition("/")[0] for cut in named.cuts})
            remedy = ", ".join(kinds) or "a name for what a block returns"
            raise ValueError(
                f"`recompute` keeps {', '.join(sorted(keep))}, none of which "
                f"everything flows through: add one of {remedy}."
            )
        return named.run(leaves, saved)

    return run
