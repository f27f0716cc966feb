"""The pages' examples run as they stand there, in a fresh interpreter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INCLUDED = re.compile(r"^<!-- begin (\S+) -->\n(.*?)^<!-- end \1 -->$", re.M | re.S)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[str]:
    pages = [ROOT / "README.md", ROOT / "docs" / "gpt.md"]
    found = [BLOCK.findall(page.read_text(encoding="utf-8")) for page in pages]
    assert all(found), "a page has no ```python block"
    return [block for blocks in found for block in blocks]


@pytest.mark.parametrize("source", examples(), ids=lambda source: source[:30])
def test_an_example_runs(source: str) -> None:
    # Warnings are errors here too: an example must not teach what is deprecated.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def pages_with_results() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        str(page.relative_to(ROOT))
        for page in pages
        if "<!-- begin " in page.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("page", pages_with_results())
def test_its_figures_are_those_of_their_file(page: str) -> None:
    source = (ROOT / page).read_text(encoding="utf-8")
    included = INCLUDED.findall(source)
    assert len(included) == source.count("<!-- begin ")
    for path, text in included:
        assert text.strip() == (ROOT / path).read_text(encoding="utf-8").strip()
