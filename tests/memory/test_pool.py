"""The pool from Python: arrays over its memory, lifetimes, numbers and errors."""

import gc
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfpo_jax.kernels import PoolError, PoolMemoryError, _pool, pool_problem
from sfpo_jax.memory import Movable, Pool
from sfpo_jax.units import UnitError

pytestmark = pytest.mark.skipif(
    bool(pool_problem("host")), reason="the pool's library was not built"
)
PAGE = 65536


@pytest.fixture
def pool() -> Pool:
    return Pool(limit="16MiB", page="64KiB", cache="0B", poison=True)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "uint16", jnp.bfloat16])
def test_arrays_lie_in_the_pool_and_jax_shares_them(pool: Pool, dtype: str) -> None:
    array = pool.array((7, 333), dtype)
    array[:] = 1
    assert array.ctypes.data % 64 == 0 and array.flags.writeable
    shared = pool.to_jax(array)
    assert shared.unsafe_buffer_pointer() == array.ctypes.data
    assert shared.dtype == array.dtype and shared.shape == (7, 333)
    assert int(shared.astype(jnp.int32).sum()) == 7 * 333


def test_memory_is_mapped_lazily_and_given_back_at_once(pool: Pool) -> None:
    assert pool.stats().mapped == 0
    array = pool.array(10 * PAGE, "uint8")
    small = pool.array(10, "uint8")
    assert pool.stats().mapped == 11 * PAGE
    del array
    assert pool.stats().mapped == PAGE
    del small
    stats = pool.stats()
    assert (stats.mapped, stats.in_use, stats.blocks) == (0, 0, 0)
    assert stats.pages_mapped == stats.pages_given_back == 11
    assert stats.peak_mapped == 11 * PAGE


def test_a_block_lives_as_long_as_its_views_and_jax_arrays(pool: Pool) -> None:
    array = pool.array((4, 1000), "float32")
    array[:] = 3
    view, shared = array[1, 5:9], pool.to_jax(array)
    del array
    gc.collect()
    assert pool.stats().blocks == 1
    assert view.sum() == 12 and int(shared.sum()) == 12000
    del view
    assert pool.stats().blocks == 1
    shared.delete()
    del shared
    gc.collect()
    assert pool.stats().blocks == 0


def test_a_jitted_program_reads_it_where_it_lies(pool: Pool) -> None:
    array = pool.array(1024, "float32")
    array[:] = np.arange(1024)
    out = jax.jit(lambda x: 2 * x)(pool.to_jax(array))
    np.testing.assert_array_equal(out, 2 * np.arange(1024))


def test_what_jax_would_copy_is_refused(pool: Pool) -> None:
    array = pool.array(1000, "float32")
    with pytest.raises(ValueError, match="JAX would copy `array`, of float32"):
        pool.to_jax(array[1:])
    with pytest.raises(ValueError, match="JAX would copy `array`, of float32"):
        pool.to_jax(array[::2])
    with pytest.raises(ValueError, match="JAX would copy `array`, of float64"):
        pool.to_jax(pool.array(10, "float64"))


def test_movable_blocks_are_compacted_unless_pinned(pool: Pool) -> None:
    blocks = [pool.movable(PAGE // 2, "uint8") for _ in range(8)]
    for i in range(8):
        write(blocks[i], i)
    with blocks[1].pinned() as held:
        pass  # pinned as long as the array is there
    place = held.ctypes.data
    blocks = blocks[1::2]
    assert pool.stats().mapped == 4 * PAGE
    assert pool.compact() == 2 * PAGE
    assert pool.stats().mapped == 2 * PAGE
    with blocks[0].pinned() as array:
        assert array.ctypes.data == place
    assert [read(block) for block in blocks] == [{1}, {3}, {5}, {7}]
    blocks = []
    del array
    assert (held == 1).all() and pool.stats().blocks == 1
    del held
    assert pool.stats().blocks == 0


def write(block: Movable, value: int) -> None:
    with block.pinned() as array:
        array[:] = value


def read(block: Movable) -> set[int]:
    with block.pinned() as array:
        return set(array.tolist())


def test_a_write_after_a_free_is_found(pool: Pool) -> None:
    array, neighbour = pool.array(100, "uint8"), pool.array(100, "uint8")
    address = array.ctypes.data
    del array
    _pool.ctypes.memset(address + 7, 1, 1)
    with pytest.raises(PoolError, match="was written to after its block was freed"):
        pool.array(100, "uint8")
    assert pool.stats().damaged == 1
    assert "DAMAGED" in str(pool.stats())
    pool.check()
    del neighbour


def test_a_closed_pool_gives_nothing_and_keeps_what_is_used() -> None:
    with Pool(limit="1MiB", page="64KiB") as pool:
        array = pool.array(100, "float32")
    array[:] = 1
    with pytest.raises(PoolError, match="the pool is closed"):
        pool.array(1)
    del pool
    gc.collect()
    assert array.sum() == 100


def test_an_array_without_elements_takes_nothing(pool: Pool) -> None:
    assert pool.array((0, 3)).shape == (0, 3)
    assert pool.stats().allocations == 0


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: p.array(2**40, "uint8"), PoolMemoryError, "can never be had"),
        (
            lambda p: [p.array(2**20, "uint8") for _ in range(17)],
            MemoryError,
            "no room",
        ),
        (lambda p: p.movable(0), PoolError, "at least 1 byte"),
        (lambda p: p.array(-1), ValueError, "`shape` must not be negative"),
        (lambda p: Pool(limit="1"), UnitError, "`limit` has no unit"),
        (lambda p: Pool(page="3MB"), PoolError, "`page` must be a power of two"),
        (lambda p: Pool(limit="1MiB"), PoolError, "`limit` must be at least a page"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    pool: Pool, make: Callable[[Pool], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        make(pool)
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _pool._library.cache_clear()
    monkeypatch.setattr(_pool, "find_library", lambda name: None)
    try:
        with pytest.raises(PoolError, match=r"needs `libsfpo_jax_pool.so`.*compiler"):
            Pool()
        assert "was not built" in pool_problem("host")
    finally:
        _pool._library.cache_clear()


def test_wrong_frees_are_refused() -> None:
    native = _pool.NativePool(1 << 20, PAGE, 0)
    address = native.allocate(100)
    native.free(address)
    with pytest.raises(PoolError, match="freed before"):
        native.free(address)
    with pytest.raises(PoolError, match="not an address of this pool"):
        native.free(id(native))
    native.free_on_stream(native.allocate(64), 0)
    native.wait()
    assert native.numbers().blocks == 0


def test_threads_share_a_pool() -> None:
    pool = Pool(limit="64MiB", page="64KiB", cache="1MiB")
    wrong: list[int] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(200):
            array = pool.array(int(random.integers(1, 100_000)), "uint8")
            array[:] = seed
            if not (array == seed).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and pool.stats().blocks == 0


@settings(max_examples=20)
@given(st.lists(st.integers(1, 5 * PAGE), max_size=12), st.integers(1, 5))
def test_any_free_pages_make_one_block(sizes: list[int], every: int) -> None:
    pool = Pool(limit="4MiB", page="64KiB", cache="1MiB")
    arrays = [pool.array(size, "uint8") for size in sizes]
    for i in range(len(arrays)):
        arrays[i][:] = i
    del arrays[::every]
    kept = [int(array[0]) for array in arrays]
    stats = pool.stats()
    assert stats.largest_free >= stats.limit - (stats.mapped - stats.cached)
    large = pool.array(stats.largest_free, "uint8")
    large[:] = 255
    assert all((array == i).all() for i, array in zip(kept, arrays, strict=True))
