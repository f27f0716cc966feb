"""Faults of a run, told once each while it goes."""

from collections.abc import Mapping, Sequence
from typing import Any

from sfpo_jax.training import Record
from sfpo_jax.tuning import Finding, diagnose


class Watch:
    """Looks at the records of a contender after each test.

    Args:
      config: of the run, as nested mappings.
      before: records of contenders that were trained before it, beside which its own
        are seen.
    """

    def __init__(self, config: Mapping[str, Any], before: Sequence[Record]) -> None:
        self._config = config
        self._records = list(before)
        self._told = {(f.kind, f.contender) for f in diagnose(before, config)}

    def see(self, record: Record) -> list[Finding]:
        """What this record is the first to show."""
        self._records.append(record)
        if "test_accuracy" not in record:
            return []
        found = diagnose(self._records, self._config)
        new = [f for f in found if (f.kind, f.contender) not in self._told]
        self._told |= {(f.kind, f.contender) for f in new}
        return new
