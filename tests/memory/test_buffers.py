"""The compiler's own text, read: places, sources, the fullest moment."""

from pathlib import Path

from sfpo_jax.memory._buffers import (
    Buffer,
    covered,
    parse_assignment,
    read_dump,
)
from sfpo_jax.memory._origins import Origin, origins

PROGRAM = """HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/model.py"
2 "/env/lib/python3.11/site-packages/optax/update.py"

FunctionNames
1 "layer"
2 "apply"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=9}
2 {file_name_id=2 function_name_id=2 line=90 end_line=90 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=1}

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0), metadata={op_name="jit(f)/while"}
  ROOT %dus.1 = f32[8]{0} fusion(%p), metadata={OF1}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %grad.2 = f32[4]{0} fusion(%x), metadata={OF2}
  %lib = f32[4]{0} add(%x, %x), metadata={op_name="jit(f)/add" stack_frame_id=3}
  ROOT %old = f32[4]{0} add(%x, %x), metadata={OLD}
}
"""

PROGRAM = (
    PROGRAM.replace("OF1", 'op_name="jit(f)/jvp()/dus" stack_frame_id=1')
    .replace("OF2", 'op_name="jit(f)/transpose(jvp())/mul" stack_frame_id=2')
    .replace("OLD", r'op_name="a\"b" source_file="o.py" source_line=3')
)

ASSIGNMENT = """BufferAssignment:
allocation 0: size 32, parameter 0, shape |f32[8]| at ShapeIndex {}:
 value: <1 x @0> (size=32,offset=0): f32[8]{0}
allocation 1: size 16, maybe-live-out:
 value: <9 old @0> (size=16,offset=0): f32[4]{0}
allocation 3: size 24, constant:
 value: <8 c @0> (size=24,offset=0): f32[6]{0}
allocation 2: size 112, preallocated-temp:
 value: <2 dus.1 @0> (size=32,offset=0): f32[8]{0}
 value: <3 while{1} (phi) @0> (size=32,offset=0): f32[8]{0}
 value: <4 grad.2{} @0> (size=16,offset=32): f32[4]{0}
 value: <5 gone @0> (size=8,offset=48): f32[2]{0}
 value: <6 tuple{} @0> (size=8,offset=96): (f32[8]{0}, f32[4]{0})
"""

# What the compiler calls the peak is not where the temporaries take the most.
LIVE = """HloLiveRange (max 9):
  InstructionSequence:
    0:x
    1:gone
    2:dus.1
    3:tuple
    4:while
    5:grad.2
    6:old
  BufferLiveRange:
    gone{}:1-2
    dus.1{}:2-4
    tuple{}:3-4
    while{1}:4-6
    grad.2{}:5-6
    x{}:0-7
    old{}:6-7
  Live ranges at 3 (peak):
    dus.1{}: 32 bytes (cumulative: 32 bytes)
    x{}: 32 bytes (cumulative: 64 bytes)
"""


def test_the_fullest_moment_with_the_makers_of_what_lives_there() -> None:
    found = parse_assignment(ASSIGNMENT, LIVE, PROGRAM)
    assert found.parameters == {0: 32}
    assert found.constant_bytes == 24
    kept, grad = found.buffers
    # The loop's value has no maker of its own: what was put in its place has.
    assert kept == Buffer(
        32, "f32[8]{0}", 0, Origin("jit(f)/jvp()/dus", "/home/me/model.py", 12)
    )
    assert kept.is_activation and not grad.is_activation
    assert (grad.size, grad.offset) == (16, 32)
    assert covered(found.buffers) == 48
    timeline = found.timeline
    assert timeline is not None and (timeline.length, timeline.peak) == (7, 5)
    assert timeline.running == grad.origin
    assert [tuple(moment) for moment in timeline.moments] == [
        (0, 0, 0),
        (1, 0, 8),
        (2, 32, 8),
        (5, 32, 16),
    ]
    # The loop hands on what was made before it: one value, from birth to death.
    lives = [(v.born, v.dies, v.size) for v in timeline.values]
    assert lives == [(1, 2, 8), (2, 6, 32), (5, 6, 16)]


def test_newer_text_names_pages_and_may_have_several_allocations() -> None:
    newer = ASSIGNMENT.replace(", parameter", ", page 0, parameter")
    newer = newer.replace(", preallocated", ", page 0, preallocated")
    newer += """allocation 4: size 8, page 1, preallocated-temp:
 value: <7 more @0> (size=8,offset=0): f32[2]{0}
"""
    live = LIVE.replace("    old{}:", "    more{}:5-6\n    old{}:")
    found = parse_assignment(newer, live, PROGRAM)
    assert found.parameters == {0: 32}
    # Behind the first allocation, which is 112 bytes long.
    assert [(b.size, b.offset) for b in found.buffers] == [(32, 0), (16, 32), (8, 112)]


def test_a_frame_of_an_installed_package_gives_way_to_its_caller() -> None:
    made_by = origins(PROGRAM)
    # Frame 2 was called by frame 1, frame 3 by nobody who is known.
    assert made_by["grad.2"][1:] == ("/home/me/model.py", 12)
    assert made_by["lib"].file.endswith("optax/update.py")
    assert made_by["old"][1:] == ("o.py", 3)
    assert "x" not in made_by


def test_without_live_ranges_there_are_only_arguments() -> None:
    found = parse_assignment(ASSIGNMENT, "", PROGRAM)
    assert found.parameters == {0: 32} and found.buffers == ()
    assert found.timeline is None


def test_places_that_overlap_count_once() -> None:
    nowhere = Origin("", "", 0)
    spans = [(0, 10), (5, 10), (30, 5), (31, 2)]
    buffers = [Buffer(size, "", offset, nowhere) for offset, size in spans]
    assert covered(buffers) == 20
    assert covered([]) == 0


def test_a_dump_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_dump(tmp_path) is None
    (tmp_path / "m.after_optimizations.txt").write_text(PROGRAM)
    assert read_dump(tmp_path) is None
    name = "m.after_optimizations-buffer-assignment.txt"
    (tmp_path / name).write_text("another form")
    found = read_dump(tmp_path)
    assert found is not None and found == ({}, (), 0, None)
