"""JAX's allocator set from Python: what the environment gets, and what is refused."""

import os
import subprocess
import sys
from typing import Any

import pytest

from sfpo_jax.memory import _configure, configure

NEW, OLD = _configure.FRACTION, _configure.OLD_FRACTION


@pytest.mark.parametrize(
    ("before", "arguments", "left", "after"),
    [
        ({}, {}, 0.75, {}),
        ({}, {"fraction": 0.5}, 0.5, {NEW: "0.5"}),
        ({OLD: "0.6"}, {"fraction": 0.5}, 0.5, {NEW: "0.5"}),
        ({OLD: "0.6"}, {"preallocate": False}, 0.6, {OLD: "0.6"}),
        ({}, {"pool": "6GB", "card": "60GB"}, 0.65, {NEW: "0.65"}),
        ({NEW: "0.9"}, {"pool": "6GB", "card": "60GB"}, 0.8, {NEW: "0.8"}),
        ({OLD: "0.9"}, {"pool": "6GB", "card": "60GB"}, 0.8, {NEW: "0.8"}),
        ({}, {"allocator": "cuda_async"}, 0.75, {}),
    ],
)
def test_the_fraction_is_set_and_leaves_the_pool_its_share(
    before: dict[str, str],
    arguments: dict[str, Any],
    left: float,
    after: dict[str, str],
) -> None:
    environ = dict(before)
    assert configure(**arguments, environ=environ) == pytest.approx(left)
    fractions = {key: environ[key] for key in (NEW, OLD) if key in environ}
    assert fractions == after
    assert environ.get(_configure.ALLOCATOR) == arguments.get("allocator")
    wanted = {None: None, False: "false"}[arguments.get("preallocate")]
    assert environ.get(_configure.PREALLOCATE) == wanted


def test_a_card_is_known_by_its_name() -> None:
    environ: dict[str, str] = {}
    left = configure(fraction=0.9, pool="8GB", card="h200", environ=environ)
    assert left == pytest.approx(0.9 - 8e9 / 151397597184, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fraction": 0.0}, "`fraction` must be above 0"),
        ({"fraction": 1.5}, "`fraction` must be above 0 and at most 1, got 1.5"),
        ({"pool": "1GB"}, "`pool` needs `card`"),
        ({"pool": "1GB", "card": "0B"}, "`card` must be a size, as '80GB', or one of"),
        ({"pool": "60GB", "card": "80GB"}, "leaves 0.0% of the card to JAX"),
        ({"pool": "1GB", "card": "h2000"}, "a100-80gb.*got 'h2000'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], words: str) -> None:
    environ: dict[str, str] = {}
    with pytest.raises(ValueError, match=words):
        configure(**arguments, environ=environ)
    assert environ == {}


def test_allocators_are_those_of_jax() -> None:
    with pytest.raises(ValueError, match="must be one of default, bfc, platform"):
        _configure._check_allocator("arena", (0, 12, 0))
    with pytest.raises(ValueError, match=r"needs JAX 0\.12, here is 0\.10\.2"):
        _configure._check_allocator("address", (0, 10, 2))
    _configure._check_allocator("address", (0, 12, 0))


def test_a_fraction_in_the_environment_that_is_none_is_said() -> None:
    with pytest.raises(ValueError, match="must be a number, got '90%'"):
        configure(environ={NEW: "90%"})


_PROGRAM = """
import os
from sfpo_jax import memory
memory.configure(allocator="platform", fraction=0.5, pool="8GB", card="80GB")
from jaxlib import xla_client
print(xla_client.generate_pjrt_gpu_plugin_options())
import jax
jax.devices()
try:
    memory.configure(fraction=0.5)
except RuntimeError as error:
    print(error)
"""


def test_jax_reads_it_and_a_running_backend_is_too_late() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("XLA_PYTHON")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=environ | {OLD: "0.9"},
    )
    assert done.returncode == 0, done.stderr
    options, refusal = done.stdout.splitlines()
    assert "'allocator': 'platform'" in options
    assert "'memory_fraction': 0.4" in options
    assert refusal.startswith("`configure` comes too late")
