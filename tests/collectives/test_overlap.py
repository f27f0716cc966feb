"""What stands between the start of a transfer and its end, in text as XLA writes it."""

from sfpo_jax.collectives import Overlap, overlaps

GROUPS = "replica_groups={{0,1},{2,3}}, to_apply=%add"
QUEUE = 'backend_config={"collective_backend_config":{"is_sync":false}}'
HLO = f"""HloModule jit_step, is_scheduled=true

%fused (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  ROOT %dot.1 = f32[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}
}}

%sum (q: f32[8,8]) -> f32[8,8] {{
  %q = f32[8,8]{{1,0}} parameter(0)
  ROOT %add.1 = f32[8,8]{{1,0}} add(%q, %q)
}}

%body (s: f32[8,8]) -> f32[8,8] {{
  %s = f32[8,8]{{1,0}} parameter(0)
  %first = f32[256]{{0}} all-reduce-start(%s), {GROUPS}, {QUEUE}
  %gemm = f32[8,8]{{1,0}} fusion(%s), kind=kCustom, calls=%fused
  %second = ((u8[2,64]{{1,0}}), u8[2,64]{{1,0}}) all-to-all-start(%s), {GROUPS}, {QUEUE}
  %loop = f32[8,8]{{1,0}} fusion(%s), kind=kCustom, calls=%sum
  %second.done = u8[2,64]{{1,0}} all-to-all-done(%second)
  %cublas = (f32[8,8]{{1,0}}) custom-call(%s), custom_call_target="__cublas$gemm"
  ROOT %first.done = f32[256]{{0}} all-reduce-done(%first)
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %early = f32[256]{{0}} all-reduce-start(%x), {GROUPS}, {QUEUE}
  %waited = f32[4]{{0}} all-reduce-start(%x), {GROUPS}, {QUEUE.replace("false", "true")}
  %while = f32[8,8]{{1,0}} while(%x), condition=%sum, body=%body, \
backend_config={{"known_trip_count":{{"n":"6"}}}}
  %waited.done = f32[4]{{0}} all-reduce-done(%waited)
  ROOT %late = f32[256]{{0}} all-reduce-done(%early)
}}
"""


def test_products_are_counted_between_start_and_done() -> None:
    found = overlaps(HLO, {"node": 2, "data": 2})
    assert found == [
        Overlap("all-reduce", "f32[256]{0}", "data", 1024.0, 2, 6),
        Overlap("all-to-all", "((u8[2,64]{1,0}), u8[2,64]{1,0})", "data", 64.0, 0, 6),
        # A loop with products in it counts as one.
        Overlap("all-reduce", "f32[256]{0}", "data", 1024.0, 1, 1),
        Overlap("all-reduce", "f32[4]{0}", "data", 16.0, 0, 1),
    ]
