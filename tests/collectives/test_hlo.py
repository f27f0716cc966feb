"""The text of a compiled program, taken apart."""

import pytest

from sfpo_jax.collectives import Array, parse_hlo

HEAD = (
    "HloModule jit_f, is_scheduled=true, "
    "input_output_alias={ {0}: (2, {}, may-alias), {1, 0}: (1, {}, must-alias) }, "
    "buffer_donor={ (0, {}) }, entry_computation_layout={(bf16[2,3]{1,0:T(8,128)(2,1)}"
    ", f32[4]{0}, /*index=2*/s4[3]{0:S(5)})->(s4[3]{0:S(5)}, f32[]{:T(128)})}, "
    "allow_spmd_sharding_propagation_to_output={true}"
)
LOOP = (
    "  %loop.1 = (s32[], f32[4]{0}) while(%start), condition=%until, body=%turn, "
    'backend_config={"known_trip_count":{"n":"12"}}'
)
TEXT = (
    f"{HEAD}\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n{LOOP}\n"
    "  ROOT %copy.2 = f32[4]{0} copy(%x)\n}\n"
)


def test_what_a_program_takes_returns_and_writes_in_place() -> None:
    program = parse_hlo(TEXT)
    assert program.parameters == (
        Array("bf16", (2, 3), False),
        Array("f32", (4,), False),
        Array("s4", (3,), True),
    )
    assert program.outputs == (program.parameters[2], Array("f32", (), False))
    assert [array.bytes for array in program.parameters] == [12, 16, 2]
    assert program.aliases == {0: 2}


def test_an_instruction_tells_what_it_runs_and_how_often() -> None:
    loop, copy = parse_hlo(TEXT).computations["main"]
    assert (loop.opcode, loop.called, loop.turns) == ("while", ("until", "turn"), 12)
    assert loop.arrays == (Array("s32", (), False), Array("f32", (4,), False))
    assert (copy.opcode, copy.called, copy.turns) == ("copy", (), None)


def test_a_program_without_an_interface_has_none() -> None:
    program = parse_hlo("HloModule f\n\nENTRY %main () -> f32[] {\n}\n")
    assert program.parameters == program.outputs == () and program.aliases == {}
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_hlo("HloModule f")


def test_one_array_returned_has_no_number() -> None:
    head = "HloModule f, input_output_alias={ {}: (0, {}, may-alias) }"
    assert parse_hlo(f"{head}\nENTRY %main () -> f32[] {{\n}}\n").aliases == {0: 0}
