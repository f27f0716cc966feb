"""The tables of `experiments.bench.parallel`."""

from typing import Any

from experiments.bench import roofline

_MB, _GB = 1e6, 1e9


def markdown(result: dict[str, Any]) -> str:
    """All tables, with what each is of."""
    options = result["options"]
    lines = [
        f"Compiled for {result['device']} by XLA, no GPU needed: layered steps of a "
        f"GPT of width {options['width']},",
        f"{options['depth']} blocks, {options['length']} tokens, in bfloat16 with "
        "float32 weights; MB = 1e6 bytes.",
        "",
        *_hidden(result["hidden"]),
        "",
        *_rings(result["rings"]),
        "",
        *_scaling(result["scaling"]),
        "",
        *_activations(result["activations"]),
        "",
        *_estimates(result["estimates"]),
    ]
    return "\n".join(lines) + "\n"


def _hidden(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Large transfers in a turn of the backward loops, that of the warm-up first, "
        "and the matrix",
        "products between the start and the end of each:",
        "",
        "| step | transfer | axis | MB sent | products |",
        "|---|---|---|---:|---:|",
    ]
    for row in rows:
        products = row["products"] or "**0**"
        lines.append(
            f"| {row['case']} | {row['opcode']} | {row['axis']} | "
            f"{row['sent'] / _MB:.2f} | {products} |"
        )
    return lines


def _rings(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Permutes of one block, forward and back, 8 pieces a product:",
        "",
        "| op | permutes a ring | permutes | without a product |",
        "|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = (row["op"], row["per_ring"], row["permutes"], row["alone"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _scaling(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "States sharded over the 8 GPUs of a host, one bit between hosts: what one "
        "device sends in a",
        "step of the compressed phase, beside the formula, and holds:",
        "",
        "| GPUs | MB inside | formula | MB between | formula | MB held |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        sent = row["sent"]
        cells = (sent["data"], row["data"], sent.get("node", 0), row["node"])
        sizes = [f"{size / _MB:.3f}" for size in cells]
        held = f"{row['total'] / _MB:.0f}"
        lines.append(f"| {row['gpus']} | {' | '.join(sizes)} | {held} |")
    return lines


def _activations(rows: list[dict[str, Any]]) -> list[str]:
    whole = rows[0]["temporary"]
    lines = [
        "Temporaries of a step that stores all activations, of as many windows for "
        "one rank of `data`:",
        "",
        "| op | MB | of op = 1 |",
        "|---:|---:|---:|",
    ]
    for row in rows:
        size = row["temporary"]
        lines.append(f"| {row['op']} | {size / _MB:.0f} | {size / whole:.2f} |")
    return lines


def _estimates(models: list[dict[str, Any]]) -> list[str]:
    lines = [
        "**Estimated, not measured**: a step on eight A100s by arithmetic and "
        "bandwidth alone.",
        "",
        "| model | link | mesh, wire | arithmetic | transfers | waited for | share of "
        "step | times as fast |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for model in models:
        for row in model["rows"]:
            times = [f"{1e3 * row[k]:.0f} ms" for k in roofline.Estimate._fields]
            lines.append(
                f"| {model['load']['name']} | {row['link']} | {row['way']} | "
                f"{' | '.join(times)} | {row['share']:.1%} | {row['speedup']:.2f} |"
            )
    lines += ["", *_assumptions(models), ""]
    for model in models:
        fast, much = (_bandwidth(model[k]) for k in ("bandwidth_3.8", "bandwidth_35"))
        lines.append(
            f"- {model['load']['name']}: the best of these is 3.8 times as fast as "
            f"float32 at {fast} and below; transfers are 35 % of float32's step at "
            f"{much}."
        )
    return lines


def _assumptions(models: list[dict[str, Any]]) -> list[str]:
    loads = [model["load"] for model in models]
    batches = ", ".join(f"{x['name']}: {x['tokens']:,} tokens a GPU" for x in loads)
    links = ", ".join(f"{k} {v / _GB:g} GB/s" for k, v in roofline.LINKS.items())
    return [
        "Assumed:",
        "",
        f"- Products run at {roofline.PEAK / 1e12:g} TFLOP/s times "
        f"{roofline.EFFICIENCY:g}; FLOPs are those of the jaxpr, every layer "
        "computed twice.",
        f"- {batches}. GPT of the depth and width of GPT-3 (Brown et al. 2020), "
        "windows of 2,048.",
        f"- One GPU sends, and receives, {links}.",
        "- Float32: one all-reduce of all gradients after the backward pass, nothing "
        "under it.",
        "- One bit: under the backward pass but for the embedding and the last "
        f"{roofline.TURNS} layers. `op`: of each ring the last of "
        f"{roofline.PIECES} (op - 1) / op permutes is waited for, and what is longer "
        "than its products.",
        "- Elementwise work, the optimizer, encoding and latencies take no time.",
    ]


def _bandwidth(value: float | None) -> str:
    return "no bandwidth" if value is None else f"{value / _GB:.3g} GB/s"
