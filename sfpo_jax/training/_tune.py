"""The rules of `sfpo_jax.tuning`, applied to a configuration, each with its reason."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sfpo_jax import tuning
from sfpo_jax._validate import check_at_least
from sfpo_jax.memory import BatchMemory
from sfpo_jax.training._build import ConfigError
from sfpo_jax.training._optimizer import ONE_BIT
from sfpo_jax.training._sections import Sparsity
from sfpo_jax.training._yaml import parse_yaml
from sfpo_jax.training._yaml_edit import Edit, edit_yaml
from sfpo_jax.units import format_bytes


class Tuned(NamedTuple):
    """A configuration for another number of devices."""

    text: str  # YAML
    edits: dict[str, Edit]  # by dotted key, what is said of each in the text


def tune_yaml(
    text: str,
    *,
    cards: int,
    base_cards: int = 1,
    memory: BatchMemory | Callable[[Mapping[str, int]], BatchMemory] | None = None,
    extension: float = 0.15,
    name: str = "<text>",
) -> Tuned:
    """Fills in batch, rate, sparsity, steps, pieces and depth for `cards` devices.

    Args:
      text: a YAML configuration that was found for `base_cards` devices.
      cards: devices of the run to come.
      base_cards: devices of the run that the numbers in the file were found for.
      memory: what a sample takes, or a function that finds out for a mesh, {axis:
        devices}; None leaves the batch to the square-root rule alone.
      extension: share of steps added for SFPO, 0.1 to 0.2.
      name: what to call the document in messages.

    Returns:
      The document with a reason above each number that was decided, changed or not.

    Raises:
      ConfigError: no YAML, or a number missing that the rules start from.
      ValueError: fewer than one device, or what the rules refuse.

    Example:
      >>> small = "data: {batch_size: 8}\\noptimizer: {learning_rate: 2e-5}\\n"
      >>> tuned = tune_yaml(small + "train: {steps: 800}\\n", cards=8)
      >>> [(key, edit.value) for key, edit in tuned.edits.items()]
      [('data.batch_size', 64), ('optimizer.learning_rate', 5.657e-05),
      ('train.steps', 115)]
    """
    check_at_least("cards", cards, 1, "the devices of the run")
    check_at_least("base_cards", base_cards, 1, "the devices that the file is for")
    given = _Given(parse_yaml(text, name), name)
    old_batch = given.number("data.batch_size")
    rate = given.number("optimizer.learning_rate")
    steps = given.number("train.steps")
    shared = int(given.number("parallel.mesh.op", 1))
    if cards % shared:
        raise ConfigError(
            f"{name}: `parallel.mesh.op` {shared} does not divide {cards} devices"
        )
    if callable(memory):
        shares = {"data": cards // shared}
        memory = memory({**shares, "op": shared} if shared > 1 else shares)
    multiple = cards // shared * int(given.number("parallel.microbatches", 1))
    edits: dict[str, Edit] = {}
    batch = _batch(edits, old_batch, cards, base_cards, shared, multiple, memory)
    scaled = float(f"{tuning.scale_learning_rate(rate, batch, old_batch):.4g}")
    edits["optimizer.learning_rate"] = Edit(
        scaled, f"{rate:g} x sqrt({batch} / {old_batch:g}), for the batch."
    )
    algorithm = given.value("communication.compression.algorithm", "1bit_adam")
    is_sfpo = algorithm in (*ONE_BIT, "auto")
    if is_sfpo and given.has("sparsity.base"):
        edits["sparsity.base"] = _sparsity(cards, given)
    same = math.ceil(steps * old_batch / batch)
    extended = tuning.extend_steps(same, extension) if is_sfpo else same
    said = f"{same} steps see as many samples as {steps:g} of {old_batch:g} did"
    if is_sfpo:
        said += f"; {100 * extension:.0f} % more, for what is sent compressed"
    edits["train.steps"] = Edit(extended, f"{said}.")
    if given.has("parallel.operator.chunk_size"):
        edits["parallel.operator.chunk_size"] = _pieces(given)
    if given.value("memory.gradient_release") is True and cards > 1:
        edits["parallel.pipeline_depth"] = _depth(given, is_sfpo)
    edits = {key: edit for key, edit in edits.items() if given.has(key)}
    return Tuned(edit_yaml(text, edits, name), edits)


def _batch(
    edits: dict[str, Edit],
    old: float,
    cards: int,
    base_cards: int,
    shared: int,
    multiple: int,
    memory: BatchMemory | None,
) -> int:
    """The batch of all devices, by the square-root rule and what fits."""
    local = old / base_cards
    wanted = cards * local
    rule = math.sqrt(wanted) * local
    reason = f"sqrt({wanted:g}) x {local:g} = {rule:.4g} by the square-root rule"
    allowed = rule
    if memory is None:
        reason += (
            "; what fits was not measured (give a target or the memory of a sample)"
        )
    else:
        # What fits is of one device; those that share operators share samples too.
        shares = cards // shared
        fits = shares * tuning.batch_that_fits(
            memory.available, memory.per_sample, fixed=memory.fixed
        )
        allowed = min(rule, fits)
        devices = memory.device if shared == 1 else f"({shared} x {memory.device})"
        reason += (
            f"; {fits} fit on {shares} x {devices}, of which a sample takes "
            f"{format_bytes(round(memory.per_sample))} beside "
            f"{format_bytes(round(memory.fixed))}"
        )
    batch = max(multiple, int(allowed) // multiple * multiple)
    if batch != int(allowed):
        reason += f"; a multiple of {multiple}, of batch shares x microbatches"
    edits["data.batch_size"] = Edit(batch, f"{reason}.")
    return batch


def _sparsity(cards: int, given: "_Given") -> Edit:
    final = given.number("sparsity.final", Sparsity().final)
    base = round(max(tuning.sparsity_for(cards), final), 3)
    return Edit(
        base,
        f"published for {cards} device{'s' * (cards > 1)}: 0.7 for 1, 0.5 from 8 on.",
    )


def _pieces(given: "_Given") -> Edit:
    depth = int(given.number("parallel.operator.prefetch_depth", 2))
    ranks = int(given.number("parallel.mesh.op", 1))
    old = int(given.number("parallel.operator.chunk_size"))
    new = tuning.tuned_chunk_size(old, depth, ranks)
    bubble = 100 * tuning.bubble_fraction(new, depth)
    return Edit(
        new,
        f"at least twice the {depth} in flight and a multiple of op ({ranks}): "
        f"{bubble:.0f} % of the pipeline stand empty.",
    )


def _depth(given: "_Given", is_sfpo: bool) -> Edit:
    # How many hosts there are is not known where the file leaves it to the run.
    between = given.value("parallel.mesh.node", "hosts") != 1
    shard = given.value("memory.shard", "none")
    is_exact = not is_sfpo or between
    turns = tuning.layer_transfers(shard, is_compressed=is_sfpo, is_exact=is_exact)
    ways = [
        "gradients" if shard == "none" else "gradients scattered",
        *(["signs there", "signs back"] * is_sfpo),
        *(["new weights gathered"] * (shard == "states")),
    ]
    ways = ways if is_exact or shard != "none" else ways[1:]
    return Edit(
        turns,
        f"a turn for each transfer of a layer ({', '.join(ways)}), so that products "
        "hide it; no more are taken than there are.",
    )


class _Given:
    """Values of a document by dotted key."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values, self._name = values, name

    def value(self, key: str, default: Any = None) -> Any:
        found: Any = self._values
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    def has(self, key: str) -> bool:
        return self.value(key) is not None

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value(key, default)
        if found is None:
            raise ConfigError(
                f"{self._name}: `{key}` is missing, which tuning starts from: write "
                "the number that is known to train well"
            )
        if isinstance(found, bool) or not isinstance(found, (int, float)) or found <= 0:
            raise ConfigError(
                f"{self._name}: `{key}` must be a positive number, got {found!r}"
            )
        return float(found)
