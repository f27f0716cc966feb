"""Finding and loading the native libraries: whatever is wrong, the twins run."""

import ctypes.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import pytest

from sfpo_jax.kernels import _library
from sfpo_jax.kernels._library import (
    _load,
    _running_version,
    _version_problem,
    load_libraries,
    native_platforms,
)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test loads again, and what comes after it finds what was there."""
    monkeypatch.delenv("SFPO_JAX_FFI", raising=False)
    for cached in (load_libraries, native_platforms):
        cached.cache_clear()
    yield
    for cached in (load_libraries, native_platforms):
        cached.cache_clear()


def test_the_running_version_is_known() -> None:
    running = _running_version()
    assert running is not None
    assert running >= (0, 3)  # of the oldest jaxlib of the range


@pytest.mark.parametrize("built", [(0, 3), (0, 2)])
def test_a_library_of_the_same_or_an_older_version_is_taken(
    built: tuple[int, int],
) -> None:
    assert _version_problem(built, (0, 3)) == ""


@pytest.mark.parametrize("built", [(0, 4), (1, 0)])
def test_a_library_of_another_version_is_refused(built: tuple[int, int]) -> None:
    problem = _version_problem(built, (0, 3))
    assert f"built for version {built[0]}.{built[1]}" in problem
    assert "install sfpo_jax again" in problem


def test_an_unknown_runtime_gets_no_handlers() -> None:
    assert "could not be read" in _version_problem((0, 3), None)


def test_no_header_is_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert _running_version() is None


def test_garbage_in_its_place_leaves_the_twins_and_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = tmp_path / "libsfpo_jax_cpu.so"
    garbage.write_bytes(b"not a library")
    monkeypatch.setattr(_library, "find_library", lambda name: _if_cpu(name, garbage))
    with pytest.warns(UserWarning, match="cannot be loaded") as caught:
        assert native_platforms() == ()
        assert native_platforms() == ()
    assert len(caught) == 1
    assert jax.devices()


def test_a_library_without_its_handlers_cannot_be_loaded(tmp_path: Path) -> None:

    found = _load("cpu", Path(ctypes.util.find_library("c") or "libc.so"))
    assert "cannot be loaded" in found.problem


def test_a_missing_library_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "find_library", lambda name: None)
    with pytest.warns(UserWarning, match="there is no library") as caught:
        assert native_platforms() == ()
    assert len(caught) == 1  # that of CUDA is missing too, as for most


def test_a_newer_library_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(x.path for x in load_libraries()):
        pytest.skip("no native library was built")
    load_libraries.cache_clear()
    monkeypatch.setattr(_library, "_running_version", lambda: (0, 1))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", _never)
    with pytest.warns(UserWarning, match=r"here runs 0\.1"):
        assert native_platforms() == ()


def test_turned_off_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFPO_JAX_FFI", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_platforms() == ()
    assert [x.problem for x in load_libraries()] == ["turned off by SFPO_JAX_FFI=0"] * 2


def test_required_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "find_library", lambda name: None)
    monkeypatch.setenv("SFPO_JAX_FFI", "require")
    with pytest.raises(RuntimeError, match=r"there is no library.*SFPO_JAX_FFI"):
        native_platforms()


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFPO_JAX_FFI", "off")
    with pytest.raises(ValueError, match="must be 0, 1 or require, got 'off'"):
        native_platforms()


def test_an_editable_installation_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "libsfpo_jax_other.so"
    built.touch()

    class File:
        name = built.name

        def locate(self) -> Path:
            return built

    monkeypatch.setattr(_library.metadata, "files", lambda name: [File()])
    assert _library.find_library(built.name) == built
    assert _library.find_library("libsfpo_jax_none.so") is None


def _if_cpu(name: str, path: Path) -> Path | None:
    return path if "cpu" in name else None


def _never(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("registered")


def test_platforms_are_those_in_use() -> None:
    used = [x.platform for x in load_libraries() if not x.problem]
    assert native_platforms() == tuple(used)
