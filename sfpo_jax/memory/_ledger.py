"""Who holds a program's memory: each byte counted once, under one name."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax

from sfpo_jax.memory._measurement import Measurement
from sfpo_jax.transforms import is_per_rank

PARAMETERS = "parameters"
OPTIMIZER = "optimizer"
RESIDUALS = "residuals"
ARGUMENTS = "other arguments"
ACTIVATIONS = "activations"
TEMPORARIES = "other temporaries"
OUTPUT = "output"

ENTRIES = (
    PARAMETERS,
    OPTIMIZER,
    RESIDUALS,
    ARGUMENTS,
    ACTIVATIONS,
    TEMPORARIES,
    OUTPUT,
)
_BY_NAME = {"params": PARAMETERS, "opt_state": OPTIMIZER, "residual": RESIDUALS}


def make_ledger(measured: Measurement, classes: Sequence[str]) -> dict[str, int]:
    """Bytes of one device by class; they add up to the total exactly.

    Args:
      measured: the compiled program.
      classes: the class of each of its parameters, in order; empty when unknown.
    """
    ledger: dict[str, int] = {name: 0 for name in ENTRIES}
    for number, size in measured.parameters.items():
        if number < len(classes):
            ledger[classes[number]] += size
    # What the compiler added itself, and what it did not tell apart.
    known = sum(ledger.values())
    ledger[ARGUMENTS] += measured.argument_bytes - known
    ledger[ACTIVATIONS] = measured.activation_bytes
    ledger[TEMPORARIES] = measured.temporary_bytes - measured.activation_bytes
    ledger[OUTPUT] = measured.output_bytes - measured.alias_bytes
    return ledger


def classify(step: Any, args: Sequence[Any]) -> list[str]:
    """The class of every leaf of the arguments, in their order.

    A field `params`, `opt_state` or `residual` of a state that comes first, or an
    argument of that name, says what it is; error-feedback residuals, and gradients that
    wait for the next step, are known by their `PerRank` node. The rest is "other
    arguments".
    """
    classes: list[str] = []
    names = argument_names(step, len(args))
    for place, (name, arg) in enumerate(zip(names, args, strict=True)):
        if place == 0 and name not in _BY_NAME and hasattr(arg, "_asdict"):
            for field, part in arg._asdict().items():
                classes += _classes(_BY_NAME.get(field, ARGUMENTS), part)
        else:
            classes += _classes(_BY_NAME.get(name, ARGUMENTS), arg)
    return classes


def _classes(name: str, tree: Any) -> list[str]:
    found: list[str] = []
    for node in jax.tree.leaves(tree, is_leaf=is_per_rank):
        entry = RESIDUALS if is_per_rank(node) else name
        found += [entry] * len(jax.tree.leaves(node))
    return found


def argument_names(step: Any, number: int) -> list[str]:
    """What the step calls its positional arguments, "" where that cannot be told."""
    try:
        names = list(inspect.signature(step).parameters)[:number]
    except (TypeError, ValueError):
        names = []
    return names + [""] * (number - len(names))
