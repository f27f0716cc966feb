"""The map of the package: arrows between rooms go down, and a bare import is light."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Highest first, as in docs/architecture.md.
ROOMS = [
    "training",
    "auditing",
    "parallel",
    "memory",
    "transforms",
    "collectives",
    "compression",
    "kernels",
    "units",
]


COMMANDS = ["_diagnose", "_doctor", "_tune"]

# An editable installation has a finder of its own, which is asked before the path.
_LINT = """
import sys
sys.meta_path[:] = [x for x in sys.meta_path if "ScikitBuild" not in type(x).__name__]
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Checks the packages in `folder` against the contracts of the project."""
    return subprocess.run(
        [
            *(sys.executable, "-c", _LINT),
            *("--no-cache", "--config", str(ROOT / "pyproject.toml")),
        ],
        cwd=folder,
        # The packages of `folder` come before those of an installed checkout.
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Two packages of the project's names, each room an empty module."""
    for package in ("sfpo_jax", "experiments"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for room in (*ROOMS, "__main__", *COMMANDS, "_requirements"):
        (tmp_path / "sfpo_jax" / f"{room}.py").touch()
    return tmp_path


def test_the_project_keeps_its_contracts() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("lower", range(1, len(ROOMS)))
def test_an_arrow_that_goes_up_breaks_them(toy: Path, lower: int) -> None:
    importer = toy / "sfpo_jax" / f"{ROOMS[lower]}.py"
    importer.write_text(f"from sfpo_jax import {ROOMS[lower - 1]}\n")
    done = lint(toy)
    assert done.returncode == 1, done.stdout + done.stderr
    arrow = f"sfpo_jax.{ROOMS[lower]} is not allowed to import"
    assert arrow in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (
            "sfpo_jax/kernels.py",
            "import experiments\n",
            "does not know its experiments",
        ),
        ("sfpo_jax/attic.py", "", "not listed as layers"),
    ],
)
def test_what_else_breaks_them(toy: Path, file: str, text: str, words: str) -> None:
    assert lint(toy).returncode == 0
    (toy / file).write_text(text)
    done = lint(toy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in " ".join(done.stdout.split())


IMPORT_ALONE = """
import importlib.metadata
import sys

import jax, numpy, optax

before = set(sys.modules)
import sfpo_jax

roots = {name.partition(".")[0] for name in set(sys.modules) - before}
installed = set(importlib.metadata.packages_distributions())
print(sorted((roots & installed) - {"sfpo_jax", "jax", "jaxlib", "numpy", "optax"}))
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""


def test_a_bare_import_brings_no_extra_and_starts_no_backend() -> None:
    # What JAX and Optax import by themselves is imported first and so not counted. A
    # backend started by an import could no longer be configured by its user.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALONE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "False"]
