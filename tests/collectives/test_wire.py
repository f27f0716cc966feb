"""Bytes on the wire: counted in snippets of HLO, and in programs really compiled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sfpo_jax.collectives import Transfer, transfers, wire_bytes
from tests.collectives.hlo import INSTRUCTIONS, MESH, NODE, computation, program


def count(
    *lines: str,
    functions: str = "",
    phase: str | None = None,
    phases: Sequence[str] = (),
) -> list[Transfer]:
    return transfers(program(*lines, functions=functions), MESH, phase, phases)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_one_instruction(name: str) -> None:
    line, expected = INSTRUCTIONS[name]
    (found,) = count(line)
    assert (found.axis, found.sent) == expected
    assert found.times == 1


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("u2", 2),
        ("f4e2m1fn", 4),
        ("f8e4m3fn", 8),
        ("f8e4m3fnuz", 8),
        ("f8e5m2", 8),
        ("f8e8m0fnu", 8),
        ("bf16", 16),
        ("s64", 64),
        ("c64", 64),
    ],
)
def test_the_width_of_a_type(dtype: str, bits: int) -> None:
    (found,) = count(f"%r = {dtype}[64] all-to-all(%x), {NODE}")
    assert found.dtypes == (dtype,)
    assert found.sent == 1 / 2 * 64 * bits / 8


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[8] add(f32[8] %x, f32[8] %all-reduce.1)",
        "%r = f32[8] all-gather-done(%s)",
        "%r = u8[4] all-reduce-done(%s)",
        # A group of one sends nothing.
        "%r = f32[8] all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%add",
        "%r = f32[8] all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add",
        '%r = f32[8] add(%x, %y), metadata={op_name="jit(f)/all-to-all(x)"}',
    ],
)
def test_what_sends_nothing(line: str) -> None:
    assert count(line) == []


GATHER = f"%g = f32[8] all-gather(%x), {NODE}, dimensions={{0}}"
GATHERED = 1 / 2 * 32
LOOP = (
    "%w = (s32[], f32[8]) while(%init), condition=%cond, body=%body, "
    'backend_config={"known_trip_count":{"n":"5"}}'
)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    (found,) = count(LOOP, functions=computation("body", GATHER) + computation("cond"))
    assert (found.sent, found.times) == (GATHERED, 5)
    assert wire_bytes([found]) == {"node": 5 * GATHERED}


def test_loops_in_loops_multiply() -> None:
    inner = LOOP.replace("%body", "%inner").replace('"5"', '"3"')
    functions = computation("inner", GATHER) + computation("body", inner, GATHER)
    found = count(LOOP, functions=functions + computation("cond"))
    assert [t.times for t in found] == [15, 5]


def test_a_loop_of_unknown_length_counts_once() -> None:
    line = LOOP.split(", backend_config")[0]
    (found,) = count(line, functions=computation("body", GATHER) + computation("cond"))
    assert found.times == 1


@pytest.mark.parametrize(
    "line",
    [
        "%c = f32[8] call(%x), to_apply=%callee",
        "%c = f32[8] fusion(%x), kind=kLoop, calls=%callee",
        "%c = ((f32[8]), f32[8], u32[]) async-start(%x), calls=%callee",
    ],
)
def test_called_computations_count(line: str) -> None:
    (found,) = count(line, functions=computation("callee", GATHER))
    assert (found.opcode, found.sent) == ("all-gather", GATHERED)


def branch(name: str, phase: str, entries: int) -> str:
    scope = f'metadata={{op_name="jit(step)/{phase}/all_gather"}}'
    line = f"%g = f32[{entries}] all-gather(%x), {NODE}, dimensions={{0}}, {scope}"
    return computation(name, line)


BRANCHES = branch("one", "warm_up", 1000) + branch("two", "compressed", 10)
SELECT = "%c = f32[8] conditional(%i, %x, %x), "
PHASES = ("warm_up", "compressed")


@pytest.mark.parametrize(
    "line",
    [
        SELECT + "branch_computations={%one, %two}",
        SELECT + "true_computation=%one, false_computation=%two",
    ],
)
@pytest.mark.parametrize(
    ("phase", "sent"),
    # Without a phase the branch that sends most.
    [("warm_up", 2000), ("compressed", 20), (None, 2000)],
)
def test_branches_are_told_apart(line: str, phase: str | None, sent: int) -> None:
    (found,) = count(line, functions=BRANCHES, phase=phase, phases=PHASES)
    assert found.sent == sent
    assert found.scope.split("/")[1] == phase or phase is None


def test_branches_of_no_phase_send_what_the_larger_sends() -> None:
    line = SELECT + "branch_computations={%one, %two, %three}"
    functions = branch("one", "a", 10) + branch("two", "b", 30) + computation("three")
    (found,) = count(line, functions=functions, phase="compressed", phases=PHASES)
    assert found.sent == 60


def test_a_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no ENTRY computation: pass compiled\.as_te"):
        transfers("HloModule empty", MESH, None, ())


def test_groups_that_cannot_be_read_are_refused() -> None:
    # Taken for a group of all devices they would be counted over the wrong axis.
    with pytest.raises(ValueError, match="replica_groups"):
        count("%r = f32[8] all-reduce(%x), replica_groups=<new form>, to_apply=%add")


def test_a_compiled_program() -> None:
    mesh = jax.make_mesh((2, 4), ("node", "data"), axis_types=(AxisType.Auto,) * 2)

    def exchange(x: jax.Array) -> jax.Array:
        x = jax.lax.psum_scatter(x, "data", tiled=True)  # 32 -> 8 entries
        x = jax.lax.all_to_all(x, "node", 0, 0, tiled=True)
        x = jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])
        return jax.lax.all_gather(x, "data", tiled=True)

    def local(x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, _: (exchange(x), None), x, length=5)

        def dense() -> jax.Array:
            with jax.named_scope("dense"):
                return jax.lax.psum(x, ("node", "data"))

        def sparse() -> jax.Array:
            with jax.named_scope("sparse"):
                return jax.lax.psum(x[:4], "node").repeat(8)

        return jax.lax.cond(jax.lax.axis_index("node") >= 0, dense, sparse)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.zeros(32)).compile().as_text()
    assert text is not None
    looped = {"data": 5 * (2 * 3 / 4 * 128 + 32), "node": 5 * (1 / 2 * 32)}
    for phase, axis, sent in (
        ("dense", "node,data", 2 * 7 / 8 * 128),
        ("sparse", "node", 2 * 1 / 2 * 16),
    ):
        moved = transfers(text, MESH, phase, ("dense", "sparse"))
        expected = {**looped, axis: looped.get(axis, 0) + sent}
        assert wire_bytes(moved) == expected
        assert {t.times for t in moved} == {1, 5}
