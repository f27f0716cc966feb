"""What to try when a program does not fit, and what JAX's allocator would refuse."""

import math
import os
from collections.abc import Mapping

from sfpo_jax.memory import _ledger as names
from sfpo_jax.units import format_bytes

# The share of a card that JAX takes unless told otherwise.
DEFAULT_FRACTION = 0.75
# The driver's context and the collectives' library hold some of every card.
_LARGEST_FRACTION = 0.97


def advise(
    ledger: Mapping[str, int], budget_bytes: int, devices: int
) -> tuple[str, ...]:
    """What to change, the largest saving first, each with an estimate of it.

    Args:
      ledger: bytes by class, of a program that does not fit.
      budget_bytes: what it should fit into.
      devices: how many it runs on.
    """
    total = sum(ledger.values())
    excess = total - budget_bytes
    ideas: list[tuple[float, str]] = []

    def suggest(saving: float, text: str) -> None:
        if saving >= 0.02 * total:
            ideas.append((saving, f"{text}: up to {format_bytes(saving, digits=3)}"))

    activations, optimizer = ledger[names.ACTIVATIONS], ledger[names.OPTIMIZER]
    suggest(activations, "recompute: jax.checkpoint around each block")
    suggest(0.5 * activations, "bfloat16 activations, if they are float32")
    suggest(0.75 * optimizer, "8-bit optimizer states, if they are float32")
    suggest(0.5 * ledger[names.RESIDUALS], "residuals with error_dtype=bfloat16")
    donated = "donate the state (donate_argnums), so that it is updated in place"
    suggest(ledger[names.OUTPUT], donated)
    if devices > 1:
        share = 1 - 1 / devices
        suggest(share * optimizer, f"shard optimizer states over {devices} devices")
        suggest(
            share * ledger[names.PARAMETERS], f"shard parameters over {devices} devices"
        )
    else:
        suggest(
            0.5 * (optimizer + ledger[names.PARAMETERS]),
            "two devices, parameters and optimizer states sharded",
        )
    ideas.sort(key=lambda idea: -idea[0])
    share = 1 - excess / activations if activations else 0.0
    if share > 0:
        text = f"a smaller batch: about {math.floor(100 * share)} % of this one"
    else:
        rest = format_bytes(total - activations, digits=3)
        text = f"no smaller batch: {rest} are not activations"
    return (text, *(text for _, text in ideas))


def memory_fraction() -> float:
    """The share of a card that JAX will take, from the environment."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        try:
            return float(os.environ[name])
        except (KeyError, ValueError):
            continue
    return DEFAULT_FRACTION


def warn_about_fraction(total_bytes: int, memory_bytes: int) -> tuple[str, ...]:
    """A warning where the card would hold the program and JAX would not allow it."""
    fraction = memory_fraction()
    if total_bytes > memory_bytes or total_bytes <= fraction * memory_bytes:
        return ()
    share = math.ceil(100 * total_bytes / memory_bytes + 1) / 100
    refused = (
        f"JAX takes {fraction:.0%} of the card, {format_bytes(fraction * memory_bytes)}"
        f", and would refuse this program"
    )
    if share > _LARGEST_FRACTION:
        return (f"{refused}; the driver needs the little that is left: too tight",)
    return (f"{refused}: export XLA_CLIENT_MEM_FRACTION={share:.2f}",)
