"""Checkpoints come back byte by byte, or not at all and with a reason."""

import contextlib
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sfpo_jax.training import CheckpointError, Checkpoints, _checkpoints

ROOT = Path(__file__).parents[2]
State = dict[str, Any]


@pytest.fixture(scope="module")
def state(mesh8: Mesh) -> State:
    """Every kind of leaf, replicated and not, NaNs with a payload among them."""
    whole = NamedSharding(mesh8, PartitionSpec())
    split = NamedSharding(mesh8, PartitionSpec("data"))
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 300, dtype=np.uint32)
    return {
        "params": [
            jax.device_put(bits.view(np.float32), whole),
            jax.device_put(jnp.asarray(bits).astype(jnp.bfloat16), whole),
        ],
        "residual": jax.device_put(generator.normal(size=(8, 50)), split),
        "empty": jax.device_put(np.zeros((8, 0), np.float32), split),
        "none": None,
        "step": jax.device_put(jnp.int32(7), whole),
        "flag": jax.device_put(jnp.bool(True), whole),
        "key": jax.device_put(jax.random.key(3), whole),
        "rbg": jax.device_put(jax.random.key(3, impl="rbg"), whole),
        "old_key": jax.device_put(jax.random.PRNGKey(3), whole),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, state: State) -> Path:
    """A folder with the checkpoints of steps 1 and 2; do not write into it."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("two"))
    for step in (1, 2):
        checkpoints.save(step, state, {"taken": step}, {"loss": [0.1, float("inf")]})
    return checkpoints.folder


def as_bytes(leaf: jax.Array) -> bytes:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
        assert as_bytes(a) == as_bytes(b)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_everything_comes_back_as_it_was(two: Path, state: State) -> None:
    blank = jax.tree.map(lambda x: jax.device_put(jnp.zeros_like(x), x.sharding), state)
    restored = Checkpoints(two).restore(blank)
    assert restored is not None
    assert_same(restored.state, state)
    assert restored.data_state == {"taken": 2}
    assert restored.extra == {"loss": [0.1, float("inf")]}


def test_nothing_to_restore(tmp_path: Path, state: State) -> None:
    assert Checkpoints(tmp_path / "absent").restore(state) is None
    assert not (tmp_path / "absent").exists()


def test_the_oldest_go_when_the_newest_is_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 100_000_000, 20, 30):
        checkpoints.save(step, {"w": jnp.full(3, step)})
        assert checkpoints.steps()[-1] == step
    # 20 was saved after 100,000,000: what lies later was abandoned.
    assert checkpoints.steps() == [20, 30]
    checkpoints.save(30, {"w": jnp.full(3, 31)})
    assert checkpoints.steps() == [20, 30]
    restored = checkpoints.restore({"w": jnp.zeros(3, jnp.int32)})
    assert restored is not None
    assert restored.state["w"].tolist() == [31, 31, 31]
    assert {p.name for p in tmp_path.iterdir()} == {"step_00000020", "step_00000030"}


def test_debris_of_a_stopped_save_goes_at_the_next_start(
    tmp_path: Path, two: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    (folder / "step_00000001").rename(folder / ".deleting-1")
    shutil.copytree(folder / "step_00000002", folder / ".saving-3")
    (folder / "notes.txt").write_text("not ours")
    assert Checkpoints(folder).steps() == [2]
    assert {p.name for p in folder.iterdir()} == {"step_00000002", "notes.txt"}


def delete(path: Path) -> None:
    path.unlink()


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flips(path: Path) -> Iterator[Callable[[Path], None]]:
    """Twenty single bits, the same for the same name."""
    generator = random.Random(path.name)
    for _ in range(20):
        place = generator.randrange(8 * path.stat().st_size)

        def flip(path: Path, place: int = place) -> None:
            data = bytearray(path.read_bytes())
            data[place // 8] ^= 1 << place % 8
            path.write_bytes(data)

        yield flip


def test_every_damage_is_found_and_the_one_before_used(
    tmp_path: Path, two: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is read is decided before Orbax reads it, which other tests let it do.
    monkeypatch.setattr(_checkpoints, "restore_arrays", lambda path, template: {})
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    newest = folder / "step_00000002"
    cases = 0
    for path in files(newest):
        intact = path.read_bytes()
        for damage in (delete, halve, zero, *flips(path)):
            damage(path)
            messages: list[str] = []
            restored = Checkpoints(folder, warn=messages.append).restore(state)
            assert restored is not None
            assert restored.data_state == {"taken": 1}, (path, damage)
            (message,) = messages
            assert "\n" not in message
            name = path.relative_to(newest).as_posix()
            assert f"step_00000002/{name}: " in message
            assert "going on from step 1" in message
            path.write_bytes(intact)
            cases += 1
    assert cases == 23 * len(files(newest)) >= 23 * 10
    # All is as it was: the newest is used again.
    restored = Checkpoints(folder).restore(state)
    assert restored is not None
    assert restored.data_state == {"taken": 2}


def test_no_good_checkpoint_is_no_fresh_start(
    tmp_path: Path, two: Path, state: State
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    (folder / "step_00000001" / "MANIFEST").unlink()
    with pytest.warns(UserWarning, match=r"step_00000001/MANIFEST: No such file"):
        (folder / "step_00000002").rename(folder / "step_00000000")
        Checkpoints(folder).restore(state)
    shutil.rmtree(folder / "step_00000000" / "arrays")
    with pytest.raises(CheckpointError, match=r"no checkpoint .* can be used: .*begin"):
        Checkpoints(folder).restore(state)


def changed(state: State, **leaves: Any) -> State:
    return {**state, **leaves}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: changed(s, extra=s["step"]), "has no `['extra']`"),
        (lambda s: changed(s, none=s["step"]), "has no `['none']`"),
        (lambda s: {k: s[k] for k in s if k != "step"}, "`['step']`, which the state"),
        (
            lambda s: {k: s[k] for k in s if k != "empty"},
            "`['empty']`, which the state",
        ),
        (
            lambda s: changed(s, step=jnp.float32(0)),
            "`['step']` of dtype int32, wanted float32",
        ),
        (
            lambda s: changed(s, params=[s["params"][0], s["params"][0]]),
            "`['params'][1]` of dtype bfloat16, wanted float32",
        ),
        (
            lambda s: changed(s, residual=jnp.zeros((4, 50))),
            "`['residual']` of shape (8, 50), wanted (4, 50)",
        ),
        (
            lambda s: changed(s, key=s["rbg"]),
            "`['key']` of dtype key<fry>, wanted key<rbg>",
        ),
    ],
)
def test_another_tree_is_refused_by_name(
    two: Path, state: State, change: Callable[[State], State], words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(two).restore(change(state))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_array_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match=r"`state`\['n'\] must be a jax array, got int"):
        checkpoints.save(1, {"n": 3})
    with pytest.raises(TypeError, match="JSON"):
        checkpoints.save(1, {"n": jnp.zeros(1)}, data_state={"place": jnp.zeros(1)})
    with pytest.raises(ValueError, match="`keep` must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Every write beyond `size` fails, as on a full disk; needs no privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_nothing_lost(checkpoints: Checkpoints, state: State) -> None:
    """Steps 1 and 2 are there, nothing else, and the next save works."""
    names = {p.name for p in checkpoints.folder.iterdir()}
    assert names == {"step_00000001", "step_00000002"}
    restored = checkpoints.restore(state)
    assert restored is not None
    assert_same(restored.state, state)
    checkpoints.save(3, state)
    assert checkpoints.steps() == [1, 2, 3]


def test_a_full_disk_is_found_before_it_is_written_to(
    tmp_path: Path, two: Path, state: State
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    checkpoints = Checkpoints(folder)
    with largest_file(2000), pytest.raises(CheckpointError) as caught:
        checkpoints.save(3, state)
    assert str(caught.value) == (
        f"the checkpoint of step 3 cannot be written to {folder}: "
        f"{os.strerror(errno.EFBIG)}; step 2 is the last one: free some space or keep "
        "fewer checkpoints, and resume."
    )
    assert_nothing_lost(checkpoints, state)


@pytest.mark.parametrize("place", ["save_arrays", "write_manifest", "_commit"])
def test_a_disk_that_fills_meanwhile(
    tmp_path: Path,
    two: Path,
    state: State,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    checkpoints = Checkpoints(folder)
    # As TensorStore says it, and as Python does.
    error = {
        "save_arrays": ValueError("RESOURCE_EXHAUSTED: a b c [os_error_code='28']"),
        "write_manifest": OSError(errno.ENOSPC, "No space left on device"),
        "_commit": OSError(errno.ENOSPC, "No space left on device"),
    }[place]

    def fail(*arguments: object) -> None:
        raise error

    owner = checkpoints if place == "_commit" else _checkpoints
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, fail)
        with pytest.raises(CheckpointError, match=r"No space left on device; step 2 "):
            checkpoints.save(3, state)
    assert_nothing_lost(checkpoints, state)


# In a process of its own: TensorStore's threads report at their leisure.
ORBAX_FAILS = """
import resource, sys
import jax.numpy as jnp, numpy as np
from sfpo_jax.training import CheckpointError, Checkpoints, _checkpoints

state = {"w": jnp.asarray(np.random.default_rng(0).normal(size=5000))}
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, state)
_checkpoints.reserve = lambda folder, state: None
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
try:
    checkpoints.save(2, state)
except CheckpointError as error:
    print(error)
names = [path.name for path in checkpoints.folder.iterdir()]
print(names, (checkpoints.restore(state).state["w"] == state["w"]).all())
"""


def test_orbax_itself_meets_the_end_of_the_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORBAX_FAILS, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    error, rest = done.stdout.splitlines()
    assert f": {os.strerror(errno.EFBIG)}; step 1 is the last one" in error
    assert rest == "['step_00000001'] True"


def test_no_warning_goes_by_unseen(two: Path, state: State) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Checkpoints(two).restore(state) is not None
