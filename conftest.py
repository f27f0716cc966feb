"""What every test and doctest runs under: eight CPU devices and strict dtypes.

It lies at the root, not in `tests`, so that the doctests of the package see it too.
"""

import os

import jax
import pytest
from hypothesis import settings

# One real CPU shows eight devices. The flags are read when the backend starts, which is
# after this file; a caller who already set one keeps their own number. They go into the
# environment, and the platform with them, so that programs started by tests agree.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # A test's program runs for milliseconds: what compiles faster is faster.
    "--xla_backend_optimization_level": "0",
}
if jax.__version_info__ < (0, 11):
    # They take three quarters of the time; later versions know no others.
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
for _name, _value in _FLAGS.items():
    _given = os.environ.get("XLA_FLAGS", "")
    if _name not in _given:
        os.environ["XLA_FLAGS"] = f"{_given} {_name}={_value}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

# People who train with either setting must be able to use the package.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A first call compiles, which no deadline allows for; on a build machine the examples
# are the same each time, so that a red run can be repeated.
settings.register_profile("local", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="long versions of tests, too")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu_compiler"):
        from sfpo_jax.memory import compiler_problem

        problem = compiler_problem()
        if problem is not None:
            pytest.skip(f"no GPU compiler: {problem}")


@pytest.fixture(scope="session")
def mesh8() -> jax.sharding.Mesh:
    """A mesh of eight devices along the axis `data`, of the Auto axis type."""
    if jax.device_count() < 8:
        # On a CPU a skip would hide that someone asked for fewer.
        assert jax.default_backend() != "cpu", "XLA_FLAGS asks for fewer than 8 devices"
        pytest.skip(f"needs 8 devices, has {jax.device_count()}")
    return jax.make_mesh(
        (8,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:8],
    )
