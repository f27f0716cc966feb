"""Which phase of its optimizer each step of a run is in, for reports."""

from sfpo_jax.training._layout_sections import Communication


def phases_of(communication: Communication) -> tuple[str, ...]:
    """The phases of 1-bit Adam, the first one first, compressed steps last.

    Example:
      >>> phases_of(Communication())
      ('warmup', 'compressed')
    """
    chosen = communication.compression
    if chosen.sync_every == 1:
        return "warmup", "compressed"
    refresh = () if chosen.refresh_every == "none" else ("refresh",)
    return "warmup", *refresh, "local", "compressed"


def step_phases(
    communication: Communication, steps: int, freeze: int | None
) -> list[str]:
    """The phase of each step of a run of 1-bit Adam.

    Args:
      communication: the section.
      steps: steps of the run.
      freeze: first step after the warm-up, None where there is none (yet).

    Returns:
      A name for each step, as `Step.wire_bytes` takes them: "warmup" is dense, and so
      are the steps of 1-bit Adam that bring its variance up to date.

    Example:
      >>> from sfpo_jax.training import Compression
      >>> chosen = Communication(compression=Compression(refresh_every=3))
      >>> [name[0] for name in step_phases(chosen, 8, 2)]
      ['w', 'w', 'c', 'c', 'w', 'c', 'c', 'w']
      >>> chosen = Communication(compression=Compression(sync_every=2, refresh_every=4))
      >>> [name[0] for name in step_phases(chosen, 10, 2)]
      ['w', 'w', 'l', 'c', 'l', 'r', 'l', 'c', 'l', 'r']
    """
    chosen = communication.compression
    every = None if chosen.refresh_every == "none" else chosen.refresh_every
    dense = "warmup" if chosen.sync_every == 1 else "refresh"
    names, last, updated = ["warmup"] * steps, freeze, freeze
    for step in range(steps if freeze is None else freeze, steps):
        assert last is not None and updated is not None and freeze is not None
        if step + 1 - last < _interval(communication, step - freeze):
            names[step] = "local"
            continue
        last, names[step] = step + 1, "compressed"
        if every is not None and step + 1 - updated >= every:
            updated, names[step] = step + 1, dense
    return names


def _interval(communication: Communication, since: int) -> int:
    """Steps from one synchronisation to the next, `since` the freeze."""
    chosen = communication.compression
    if chosen.double_every == "none":
        return chosen.sync_every
    return min(chosen.sync_every, 2 ** (since // chosen.double_every))
