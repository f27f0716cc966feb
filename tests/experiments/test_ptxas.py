"""Reading what the assembler prints."""

from experiments.bench import ptxas

TEXT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN4sfpo45_GLOBAL__N__3c1ce29a_12_adamw8bit_\
cu_3f3f4d9b13update_blocksENS_8RowTableINS_8AdamwJobEEENS_9AdamwStepE' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 71 registers, used 0 barriers, 4224 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN4sfpo45_GLOBAL__N__3c1ce29a_12_adamw8bit_\
cu_3f3f4d9b13update_blocksENS_8RowTableINS_8AdamwJobEEENS_9AdamwStepE' for 'sm_90'
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 8192 bytes smem
"""


def test_registers_stack_and_spills_are_read() -> None:
    first, second = ptxas.parse(TEXT)
    assert first == {
        "kernel": "update_blocks",
        "architecture": "sm_80",
        "stack_bytes": 0,
        "spill_bytes": 0,
        "registers": 71,
        "shared_bytes": 0,
    }
    assert (second["spill_bytes"], second["shared_bytes"]) == (16, 8192)


def test_the_table_shows_the_worst() -> None:
    table = ptxas.markdown(ptxas.parse(TEXT))
    assert "| `update_blocks` | 71 | 72 | 8192 B | 8 B | 16 B |" in table
