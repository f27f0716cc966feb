"""Labelled texts that every Python brings: passages, and the package they are from.

Ten packages of the standard library are the classes. Passages are held out, not files:
those of a test stand beside others that were trained on.
"""

import sysconfig
from pathlib import Path

from experiments.data.labelled_text import TextDataset, split_classes

PACKAGES = (
    "asyncio",
    "ctypes",
    "email",
    "http",
    "importlib",
    "multiprocessing",
    "unittest",
    "urllib",
    "wsgiref",
    "xml",
)
_CHARACTERS = 150  # about sixty word pieces


def load_passages(test_share: float, folder: str | Path = "") -> TextDataset:
    """Passages of some lines each, about 150 characters; each comes once.

    Args:
      test_share: share of each package's passages held out, in (0, 1).
      folder: where the packages lie; empty: in the standard library of this Python.

    Raises:
      ValueError: a package without two passages.
    """
    place = Path(folder or sysconfig.get_path("stdlib"))
    # Some stand in several files, such as the terms of a licence.
    found: dict[str, str] = {}
    for package in PACKAGES:
        for file in sorted((place / package).rglob("*.py")):
            # Some versions have a package's tests inside it.
            if not {"test", "tests"} & set(file.relative_to(place).parts):
                found |= dict.fromkeys(_passages(file), package)
    return split_classes(
        "stdlib", list(PACKAGES), list(found), list(found.values()), test_share
    )


def _passages(file: Path) -> list[str]:
    """The lines of a file in pieces of so many characters; a shorter end is left."""
    found = [""]
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if len(found[-1]) >= _CHARACTERS:
            found.append("")
        found[-1] += line.strip() + "\n"
    return [text for text in found if len(text) >= _CHARACTERS]
