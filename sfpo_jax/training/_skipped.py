"""Files that are not used, in words."""

from collections.abc import Sequence

# (path, reason)
Skipped = tuple[str, str]


def listing(skipped: Sequence[Skipped], shown: int = 3) -> str:
    """The first files with their reasons, and how many more there are.

    Example:
      >>> listing([("a", "empty"), ("b", "empty"), ("c", "empty")], shown=2)
      'a: empty; b: empty; and 1 more'
    """
    text = "; ".join(f"{path}: {reason}" for path, reason in skipped[:shown])
    more = len(skipped) - shown
    return f"{text}; and {more} more" if more > 0 else text
