"""The section `data` of a run on text."""

import dataclasses

from sfpo_jax._validate import check_at_least, check_range


@dataclasses.dataclass(frozen=True)
class TextData:
    """Windows of the Python standard library's sources."""

    test_share: float = 0.1
    """Share of the files held out for the test."""
    test_windows: int = 4096
    """Windows of them that are tested, spread evenly."""
    batch_size: int = 32
    """Windows of a step, over all devices."""

    def __post_init__(self) -> None:
        check_range(
            "data.test_share",
            self.test_share,
            0.0,
            1.0,
            "the share of the files held out",
            open_low=True,
            open_high=True,
        )
        for name in ("test_windows", "batch_size"):
            check_at_least(f"data.{name}", getattr(self, name), 1, "a window count")
