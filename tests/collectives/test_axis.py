"""Questions to a mesh axis, asked while tracing: nothing here is compiled but a sum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sfpo_jax.collectives import (
    AxisName,
    all_finite,
    axis_names,
    axis_size,
    is_bound,
    mesh_axis_size,
    square_norm,
    varies,
    vary,
    varying_axes,
    widen,
)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("node", "data"), axis_types=(AxisType.Auto,) * 2)


def inside(mesh: Mesh, ask: Callable[[jax.Array], Any], *, check: bool = True) -> Any:
    """What `ask` answers inside `shard_map`, of an array split over `data`."""
    answers = []

    def body(x: jax.Array) -> jax.Array:
        answers.append(ask(x))
        return x

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check
    )
    jax.eval_shape(mapped, jnp.zeros(8))
    return answers[-1]


@pytest.mark.parametrize(
    ("axis_name", "names", "size"),
    [
        (None, (), 1),
        ("node", ("node",), 2),
        ("data", ("data",), 4),
        (("node", "data"), ("node", "data"), 8),
        ((), (), 1),
    ],
)
def test_names_and_sizes(
    mesh: Mesh, axis_name: AxisName, names: tuple[str, ...], size: int
) -> None:
    assert axis_names(axis_name) == names
    assert inside(mesh, lambda _: axis_size(axis_name)) == size
    assert inside(mesh, lambda _: is_bound(axis_name))
    assert inside(mesh, lambda _: mesh_axis_size(axis_name)) == size
    with jax.set_mesh(mesh):
        assert mesh_axis_size(axis_name) == size


def test_an_axis_is_bound_inside_only(mesh: Mesh) -> None:
    assert is_bound(None)
    assert not is_bound("data")
    assert not is_bound(("node", "data"))
    assert not inside(mesh, lambda _: is_bound("op"))
    with pytest.raises(NameError):
        axis_size("data")
    with jax.set_mesh(mesh):
        assert not is_bound("data")


def test_an_unknown_axis_is_named_with_the_remedy(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"'data' is no axis .*known: none.*set_mesh"):
        mesh_axis_size("data")
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"'op' is no axis .*\['node', 'data'\]"):
            mesh_axis_size("op")


def test_vary_marks_what_is_not_marked(mesh: Mesh) -> None:
    def ask(x: jax.Array) -> list[frozenset[str]]:
        tree = {"own": x, "shared": jnp.zeros(3)}
        marked = vary(tree, "data")
        both = vary(tree, ("node", "data"))
        return [
            varying_axes(leaf)
            for leaf in (tree["shared"], *marked.values(), *both.values())
        ]

    data, both = frozenset({"data"}), frozenset({"node", "data"})
    assert inside(mesh, ask) == [frozenset(), data, data, both, both]


def test_what_may_differ_between_ranks(mesh: Mesh) -> None:
    def ask(x: jax.Array) -> list[bool]:
        shared = jnp.zeros(3)
        return [
            varies(x, "data"),
            # Ranks that differ in `data` hold different entries.
            varies(x, ("node", "data")),
            varies(x, "node"),
            varies(shared, "data"),
            varies(jax.lax.psum(x, "data"), "data"),
        ]

    assert inside(mesh, ask) == [True, True, False, False, False]
    # Without its checks nothing is known.
    assert inside(mesh, ask, check=False) == [True] * 5


def test_vary_outside_of_any_axis_changes_nothing() -> None:
    x = jnp.ones(2)
    assert vary({"x": x}, None)["x"] is x
    assert varying_axes(x) == frozenset()


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (jnp.float16, jnp.float32),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.float32),
        (jnp.float64, jnp.float64),
    ],
)
def test_sums_are_taken_in_float32_or_wider(dtype: Any, wide: Any) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray([[300.0, 400.0], [0.0, 0.0]], dtype)
        assert widen(x).dtype == wide
        norm = square_norm([x])
        # 90,000 is no float16.
        assert (norm.dtype, float(norm)) == (wide, 250_000)


def test_the_norm_is_over_all_leaves() -> None:
    assert square_norm([]) == 0
    assert square_norm([]).dtype == jnp.float32
    leaves = [jnp.float32(2.0), jnp.zeros((0, 3)), jnp.ones((2, 2), jnp.bfloat16)]
    assert float(square_norm(leaves)) == 8


BAD = {"fine": 1.0, "NaN": np.nan, "+Inf": np.inf, "-Inf": -np.inf, "square": 2e19}


def test_all_ranks_agree_on_what_is_finite(mesh: Mesh) -> None:
    # Rank by rank one bad value, and none at all.
    def agree(x: jax.Array, y: jax.Array) -> jax.Array:
        return all_finite([x, y], ("node", "data"))[None]

    split = P(("node", "data"))
    mapped = jax.jit(jax.shard_map(agree, mesh=mesh, in_specs=split, out_specs=split))
    for bad in BAD.values():
        for rank in (0, 5):
            x = np.ones((8, 3), np.float32)
            x[rank, 1] = bad
            found = mapped(x, np.ones(8, np.float32))
            assert found.tolist() == [bad == 1.0] * 8


@pytest.mark.parametrize("name", BAD)
def test_one_worker_asks_nobody(name: str) -> None:
    x = jnp.asarray([1.0, BAD[name]])
    assert bool(all_finite([x], None)) == (name == "fine")
