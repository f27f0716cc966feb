"""What a contender trains: parameters, loss and test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.models.layered import Layered
from experiments.scores import mean_score, total_score
from sfpo_jax import LayeredModel, Operator

Test = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


class LayeredTask(NamedTuple):
    """The same task with its equal layers in one stack, for the layered step.

    Attributes:
      init: seed -> parameters, the numbers of `Task.init`.
      model: embed, block and loss.
      test: as in `Task`, from the stacked parameters.
      specs: as in `Task`, of one layer where layers are stacked.
    """

    init: Callable[[int], Any]
    model: LayeredModel
    test: Test
    specs: Any


class Task(NamedTuple):
    """What a contender trains, whichever optimizer it uses.

    Attributes:
      init: seed -> parameters, a pytree of arrays.
      loss_fn: (parameters, batch[, key=][, model_state=][, frozen=]) -> (mean loss,
        {"accuracy": share}); with a model state, the new one is in the latter, too.
      test: (parameters, batch[, model_state=][, frozen=]) -> (correct, summed loss,
        examples), float32 scalars; rows of PADDING do not count.
      has_key: whether the loss takes a random key.
      shapes: of the parameters, a tree of ShapeDtypeStructs.
      layered: the same layer by layer; None for a model whose layers differ.
      specs: how parameters are cut over the axis `op`, None where they are not.
      init_state: seed -> what training moves besides the parameters, such as batch
        statistics; None where there is nothing.
      frozen: seed -> what the loss and the test read as `frozen` and nobody trains,
        such as the weights under adapters; None where there is nothing.
      save: (folder, parameters, frozen) writes files for other programs; None: none.
    """

    init: Callable[[int], Any]
    loss_fn: Callable[..., Any]
    test: Test
    has_key: bool
    shapes: Any
    layered: LayeredTask | None = None
    specs: Any = None
    init_state: Callable[[int], Any] | None = None
    frozen: Callable[[int], Any] | None = None
    save: Callable[[Path, Any, Any], None] | None = None

    @property
    def parameters(self) -> int:
        """Number of entries to train."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes))


def make_scored_task(
    create: Callable[[jax.Array], Any],
    logits: Callable[[Any, Any, jax.Array | None], jax.Array],
    labels: Callable[[Any], jax.Array],
    *,
    layered: Layered,
    has_key: bool,
    specs: Any = None,
    operator: Operator | None = None,
    score: Callable[..., tuple[jax.Array, dict[str, jax.Array]]] = mean_score,
    total: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] = total_score,
) -> Task:
    """A task whose loss is the cross-entropy of labels.

    Args:
      create: key -> parameters.
      logits: (parameters, batch, key or None) -> float32[..., V], or what `score`
        reads.
      labels: batch -> int[...]; those of PADDING do not count in a test.
      layered: the same model in layers.
      has_key: whether training takes a random key.
      specs: how parameters are cut over the axis `op`, None where they are not.
      operator: where ranks share sequences and have logits of their own tokens only.
      score: (logits, labels, operator) -> (mean loss, {"accuracy": share}).
      total: (logits, labels) -> what a test adds up.
    """

    def loss_fn(
        params: Any, batch: Any, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        return score(logits(params, batch, key), labels(batch), operator)

    def test(params: Any, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return total(logits(params, batch, None), labels(batch))

    def layered_test(params: Any, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return total(layered.predict(params, batch), labels(batch))

    return Task(
        init=from_seed(create),
        loss_fn=loss_fn,
        test=jax.jit(test),
        has_key=has_key,
        shapes=shapes_of(create),
        layered=LayeredTask(
            from_seed(layered.init),
            layered.model,
            jax.jit(layered_test),
            None if specs is None else layered.specs,
        ),
        specs=specs,
    )


def shapes_of(create: Callable[[jax.Array], Any]) -> Any:
    """Of the tree that a function of a key makes; it is not run."""
    return jax.eval_shape(create, jax.random.key(0))


def from_seed(create: Callable[[jax.Array], Any]) -> Callable[[int], Any]:
    """A function of a key as one of a seed, compiled."""
    # One program instead of one for each layer's random numbers.
    compiled = jax.jit(create)
    return lambda seed: compiled(jax.random.key(seed))
