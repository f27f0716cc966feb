"""What tests that train whole runs share."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Optax's own AdamW does not run under the strict rules of the other tests."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that several runs share are compiled by the first."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("cache")))
    jax.config.update(names[1], 0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
