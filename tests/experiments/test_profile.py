"""`--profile`: the time of a step told apart, from a trace to the page."""

import re
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from experiments import vit_l
from experiments.profiling.breakdown import break_down
from experiments.profiling.kinds import (
    CATEGORIES,
    COLLECTIVES,
    COPIES,
    ELEMENTWISE,
    IDLE,
    INPUT,
    NATIVE,
    PRODUCTS,
    kind_by_name,
    read_program,
)
from experiments.profiling.summary import peak_flops
from experiments.profiling.trace import Event, Trace, read_trace
from tests.experiments.test_vit_l import only_run, options

HLO = """HloModule jit_step, is_scheduled=true

%fused (a: f32[8]) -> f32[8] {
  %dot.1 = f32[8]{0} dot(%a, %a), lhs_contracting_dims={0}
}

%plain (a: f32[8]) -> f32[8] {
  %add.1 = f32[8]{0} add(%a, %a)
}

%body (a: (f32[8], /*index=1*/s32[])) -> (f32[8], s32[]) {
  %gemm_fusion = f32[8]{0:T(8)} fusion(%a), kind=kCustom, calls=%fused
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %loop = (f32[8]{0}, /*index=1*/s32[]) while(%x), condition=%c, body=%body
  %add_fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%plain
  %psum.2 = f32[8]{0} all-reduce(%x), to_apply=%plain, metadata={op_name="f/psum"}
  %start = ((f32[8]{0}), f32[8]{0}) all-gather-start(%x), dimensions={0}
  %signs = u8[1]{0} custom-call(%x), custom_call_target="sfpo_sign_encode"
  %gemm = (f32[8]{0}, s8[4]{0}) custom-call(%x), custom_call_target="__cublas$gemm"
  %sort = f32[8]{0} custom-call(%x), custom_call_target="TopK"
  ROOT %copy.3 = f32[8]{0} copy(%x)
}
"""


def test_kinds_are_read_from_the_program() -> None:
    program = read_program(HLO)
    assert program.module == "jit_step"
    found = {name: work.kind for name, work in program.work.items()}
    assert found == {
        "dot.1": PRODUCTS,
        "add.1": ELEMENTWISE,
        "gemm_fusion": PRODUCTS,
        "loop": None,
        "add_fusion": ELEMENTWISE,
        "psum.2": COLLECTIVES,
        "start": COLLECTIVES,
        "signs": NATIVE,
        "gemm": PRODUCTS,
        "sort": ELEMENTWISE,
        "copy.3": COPIES,
    }
    work = program.find("jit_step", "psum.2")
    assert work is not None and work.opcode == "all-reduce"
    assert work.origin is not None and work.origin.op_name == "f/psum"
    # Another program may use the same names for something else.
    assert program.find("jit_other", "psum.2") is None
    # The kernel of an instruction, in a CUDA graph.
    assert program.find("", "psum_2") == work
    names = [
        "sfpo::Encode",
        "ncclDevKernel_AllReduce",
        "MemcpyD2D",
        "sm90_gemm",
        "while.3",
        "fusion.1",
    ]
    kinds = [NATIVE, COLLECTIVES, COPIES, PRODUCTS, None, ELEMENTWISE]
    assert [kind_by_name(name) for name in names] == kinds


def test_each_moment_counts_once() -> None:
    """Two steps of 100 ns on two devices, by hand."""

    def event(device: int, name: str, begin: int, end: int) -> Event:
        return Event(device, "jit_step", name, begin, end)

    events = [
        event(0, "loop", 0, 200),
        event(0, "gemm", -50, 60),
        event(0, "psum.2", 40, 90),  # 20 of 50 under the product
        event(0, "copy.3", 80, 100),  # 10 of 20 of them under a copy
        event(1, "psum.2", 0, 100),
        Event(1, "jit_other", "psum.2", 150, 300),
    ]
    found = break_down(Trace(0, 200, [(90, 140)], events), 2, read_program(HLO))
    ns = {kind: round(2 * 2 * 1e9 * s, 6) for kind, s in found.parts.items()}
    assert ns == {
        PRODUCTS: 60,
        NATIVE: 0,
        # What the other program calls psum.2 is not known to be a collective.
        ELEMENTWISE: 50,
        COPIES: 20,
        COLLECTIVES: 20 + 100,
        INPUT: 40 + 40,
        IDLE: 60 + 10,
    }
    assert found.step == pytest.approx(100e-9)
    assert sum(found.parts.values()) == pytest.approx(found.step)
    assert found.in_flight == pytest.approx((50 + 100) / 4 * 1e-9)
    first = found.operations[0]
    assert (first.name, first.kind, first.runs) == ("psum.2", COLLECTIVES, 0.5)
    with pytest.raises(ValueError, match="no operations"):
        break_down(Trace(0, 200, [], []), 2, read_program(HLO))


XSPACE = """
planes { name: "/device:GPU:1"
  lines { name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 50000 duration_ps: 20000
      stats { metadata_id: 1 str_value: "gemm" }
      stats { metadata_id: 2 str_value: "jit_step" } }
    events { metadata_id: 2 offset_ps: 80000 duration_ps: 10000 } }
  lines { name: "XLA Modules" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 90000 } }
  event_metadata { key: 1 value { id: 1 name: "sm90_xmma" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } } }
planes { name: "/host:CPU"
  lines { name: "python" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 10000 duration_ps: 100000 }
    events { metadata_id: 2 offset_ps: 45000 duration_ps: 10
      stats { metadata_id: 1 int64_value: 30 } } }
  event_metadata { key: 1 value { id: 1 name: "profiled steps" } }
  event_metadata { key: 2 value { id: 2 name: "waited for input" } }
  stat_metadata { key: 1 value { id: 1 name: "ns" } } }
"""


def test_a_gpus_streams_are_read(tmp_path: Path) -> None:
    """As XLA writes them: a plane a card, a line a stream, kernels with their HLO."""
    path = tmp_path / "plugins" / "host.xplane.pb"
    with pytest.raises(ValueError, match="has no trace"):
        read_trace(tmp_path)
    path.parent.mkdir()
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(XSPACE))
    trace = read_trace(tmp_path)
    # Times begin with the first of all events, which the lines' own clock precedes.
    assert trace.end - trace.begin == 100
    at = trace.begin - 10
    assert trace.waits == [(at + 15, at + 45)]
    assert trace.events == [
        Event(1, "jit_step", "gemm", at + 50, at + 70),
        Event(1, "", "MemcpyD2D", at + 80, at + 90),
    ]
    found = break_down(trace, 1, read_program(HLO))
    ns = {kind: round(1e9 * s) for kind, s in found.parts.items() if s}
    assert ns == {PRODUCTS: 20, COPIES: 10, INPUT: 30, IDLE: 40}


def test_peaks_of_cards_that_are_known() -> None:
    kinds = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"]
    assert [peak_flops(kind) for kind in kinds] == [312e12, 756e12, 989e12]
    assert peak_flops("TPU v4") is None


@pytest.mark.usefixtures("standard_promotion", "compile_once")
def test_a_run_says_where_its_time_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*options(tmp_path), "--train.compare=false", "--profile"]
    assert vit_l.main(argv) == 0
    folder = only_run(tmp_path)
    text = (folder / "profile" / "summary.md").read_text()
    assert text in capsys.readouterr().out
    for phase in ("warmup", "compressed"):
        assert list((folder / "profile" / "sfpo" / phase).glob("**/*.xplane.pb"))

    table = text.partition("## Longest")[0]
    rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    cells = {name: row for name, *row in rows}
    assert cells[""] == ["SFPO, warmup", "SFPO, compressed"]
    # Six steps of each phase: in a row without a test, behind the first.
    assert cells["steps"] == ["4-6", "9-12"]
    for column in range(2):

        def ms(name: str, column: int = column) -> float:
            return float(cells[name][column].partition(" ms")[0])

        # As printed, each rounded to 0.001.
        step = ms("a traced step")
        assert sum(map(ms, CATEGORIES)) == pytest.approx(step, abs=0.006)
        assert min(ms(PRODUCTS), ms(ELEMENTWISE), ms(COLLECTIVES)) > 0
        assert 0 < ms("a step, not traced")
        assert float(cells["samples/s"][column].replace(",", "")) > 0
        assert "FLOP/s" in cells["arithmetic of a device"][column]
    assert "MFU" not in cells and "no MFU" in text
    # Signs travel in two phases, masked gradients of the warm-up in one.
    warmup, compressed = text.split("## Longest operations: ")[1:]
    assert re.search(r"\(all-reduce\) \| collectives", warmup)
    assert "all-to-all" not in warmup
    assert "all-to-all" in compressed and "(all-gather)" in compressed

    # A run that is done has no steps left to look at.
    assert vit_l.main([f"--train.resume={folder}", "--profile"]) == 0
    assert "nothing was profiled" in capsys.readouterr().out
