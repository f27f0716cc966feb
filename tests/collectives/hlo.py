"""Snippets of optimised HLO, as the compilers print it."""

MESH = {"node": 2, "data": 4}
ALL = "replica_groups={{0,1,2,3,4,5,6,7}}"
DATA = "replica_groups={{0,1,2,3},{4,5,6,7}}"
NODE = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"


def program(*lines: str, functions: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    head = "HloModule jit_f, is_scheduled=true, num_partitions=8"
    return (
        f"{head}\n\n{functions}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def computation(name: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


# One instruction, the axis it runs over, the bytes one device sends.
INSTRUCTIONS = {
    "all-reduce": (
        f"%r = f32[100]{{0}} all-reduce(f32[100]{{0}} %x), channel_id=1, {DATA}, "
        "use_global_device_ids=true, to_apply=%add",
        ("data", 2 * 3 / 4 * 400),
    ),
    "all-reduce of a tuple": (
        f"%r = (f32[100]{{0}}, bf16[]) all-reduce(%x, %y), {NODE}, to_apply=%add",
        ("node", 2 * 1 / 2 * 402),
    ),
    "all-reduce, asynchronous": (
        f"%r = f32[100]{{0}} all-reduce-start(%x), {DATA}, to_apply=%add",
        ("data", 2 * 3 / 4 * 400),
    ),
    "all-reduce over everything": (
        f"%r = f32[8] all-reduce(%x), {ALL}, to_apply=%add",
        ("node,data", 2 * 7 / 8 * 32),
    ),
    "all-reduce without groups": (
        "%r = f32[8] all-reduce(%x), replica_groups={}, to_apply=%add",
        ("node,data", 2 * 7 / 8 * 32),
    ),
    "all-gather": (
        "%r = u8[4,50]{1,0} all-gather(u8[1,50]{1,0} %x), "
        f"{DATA}, dimensions={{0}}",
        ("data", 3 / 4 * 200),
    ),
    "all-gather, asynchronous": (
        "%r = (u8[1,50]{1,0}, u8[4,50]{1,0}) all-gather-start(u8[1,50]{1,0} %x), "
        f"{DATA}, dimensions={{0}}",
        ("data", 3 / 4 * 200),
    ),
    "reduce-scatter": (
        "%r = f32[25]{0} reduce-scatter(f32[100]{0} %x), "
        f"{DATA}, dimensions={{0}}, to_apply=%add",
        ("data", 3 / 4 * 400),
    ),
    "reduce-scatter, asynchronous": (
        "%r = ((f32[100]{0}), f32[25]{0}) reduce-scatter-start(f32[100]{0} %x), "
        f"{DATA}, dimensions={{0}}, to_apply=%add",
        ("data", 3 / 4 * 400),
    ),
    "all-to-all of an array": (
        f"ROOT %r = s8[4,16]{{1,0}} all-to-all(s8[4,16] %x), {DATA}, dimensions={{0}}",
        ("data", 3 / 4 * 64),
    ),
    "all-to-all of a tuple": (
        "%r = (u8[1,16]{1,0}, u8[1,16]{1,0}, /*index=2*/u8[1,16]{1,0}, u8[1,16]{1,0}) "
        f"all-to-all(%a, %b, %c, %d), {DATA}",
        ("data", 3 / 4 * 64),
    ),
    "all-to-all, asynchronous": (
        f"%r = ((u8[4,16]{{1,0}}), u8[4,16]{{1,0}}) all-to-all-start(%x), {DATA}",
        ("data", 3 / 4 * 64),
    ),
    "permute": (
        "%r = f16[10]{0} collective-permute(f16[10]{0} %x), channel_id=3, "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}",
        ("data", 20),
    ),
    "permute, asynchronous": (
        "%r = (f16[10], f16[10], u32[], u32[]) collective-permute-start(f16[10] %x), "
        "source_target_pairs={{0,4},{4,0}}",
        ("node", 20),
    ),
    "permute, asynchronous, no context": (
        "%r = (f16[10], f16[10]) collective-permute-start(f16[10] %x), "
        "source_target_pairs={{0,4},{4,0}}",
        ("node", 20),
    ),
    "permute of a counter, asynchronous": (
        "%r = (u32[], u32[], u32[], u32[]) collective-permute-start(%x), "
        "source_target_pairs={{0,4},{4,0}}",
        ("node", 4),
    ),
    "permutes joined": (
        "%r = (f16[10]{0}, s8[3]{0}) collective-permute(%x, %y), channel_id=3, "
        "source_target_pairs={{0,4},{4,0}}",
        ("node", 23),
    ),
    "permutes joined, asynchronous": (
        "%r = ((f16[10]{0}, s8[3]{0}), (f16[10]{0}, s8[3]{0}), u32[]{:S(2)}, "
        "u32[]{:S(2)}) collective-permute-start(%x, %y), "
        "source_target_pairs={{0,4},{4,0}}",
        ("node", 23),
    ),
    "permutes of counters joined, asynchronous": (
        "%r = ((u32[], u32[]), (u32[], u32[])) collective-permute-start(%x, %y), "
        "source_target_pairs={{0,4},{4,0}}",
        ("node", 8),
    ),
    "iota groups": (
        "%r = f32[100] all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add",
        ("data", 600),
    ),
    "iota groups, transposed": (
        "%r = f32[100] all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%a",
        ("node", 400),
    ),
    "iota groups, one of all": (
        "%r = f32[100] all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add",
        ("node,data", 700),
    ),
    "mesh groups": (
        "%r = f32[25] reduce-scatter(%x), channel_id=1, "
        "replica_groups=mesh['node'=2,'data'=4] {'data'}, dimensions={0}, to_apply=%a",
        ("data", 300),
    ),
    "mesh groups of the compiler's names": (
        "%r = f32[100] all-reduce(%x), "
        "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, to_apply=%add",
        ("node", 400),
    ),
    "mesh groups, all axes": (
        "%r = f32[100] all-reduce(%x), "
        "replica_groups=mesh['node'=2,'data'=4] {'node','data'}, to_apply=%add",
        ("node,data", 700),
    ),
    "mesh groups, half an axis": (
        "%r = f32[100] all-reduce(%x), "
        "replica_groups=mesh['node'=2,'data'=4] {'data':(2)2}, to_apply=%add",
        ("data", 400),
    ),
    "half a byte": (
        f"%r = s4[9] all-gather(%x), {NODE}, dimensions={{0}}",
        ("node", 1 / 2 * 5),
    ),
    "booleans": (f"%r = pred[8] all-to-all(%x), {NODE}", ("node", 1 / 2 * 8)),
    "a layout with tiles": (
        f"%r = f32[8,128]{{1,0:T(8,128)S(1)}} all-to-all(%x), {NODE}",
        ("node", 1 / 2 * 4096),
    ),
}
