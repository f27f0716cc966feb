"""The tables and the picture of `experiments.bench.network`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bench.network_bounds import Bound
from experiments.bench.network_cells import CONTENDERS, DENSE_STEPS, Row

_COLORS = {
    "dense": "#212529",
    "bf16": "#868e96",
    "onebit": "#d9480f",
    "unmasked": "#c2255c",
    "zero_one": "#7048e8",
    "sparse": "#f08c00",
    "low_rank": "#5c940d",
    "auto": "#ae3ec9",
    "torch_ddp": "#1864ab",
    "torch_fp16": "#339af0",
    "torch_powersgd1": "#087f5b",
    "torch_powersgd2": "#38d9a9",
}


def markdown(
    results: Mapping[str, Any], rows: Sequence[Row], bounds: Sequence[Bound]
) -> str:
    """All tables, and the promises."""
    batch, parameters = results["options"]["batch"], results["parameters"]
    model = results["model"]
    parts = [
        f"Vision Transformer of {parameters:,} parameters (width {model['width']}, "
        f"{model['depth']} blocks), {batch} images a host, one core each of "
        f"{results['cores']}; MB = 1e6 bytes that one host sends in a step."
    ]
    if not results["is_limited"]:
        parts.append("Over loopback, without namespaces: no link was limited.")
    for hosts, link in dict.fromkeys((r.hosts, r.link) for r in rows):
        mine = [r for r in rows if (r.hosts, r.link) == (hosts, link)]
        parts.append(f"**{hosts} hosts, {link}**{_bandwidth(results, link)}")
        parts.append(_table(mine))
    parts.append(_explained())
    if results["runs"]:
        parts += [_runs(results)]
    if bounds:
        parts.append("\n".join(f"- {bound}" for bound in bounds))
    return "\n\n".join(parts) + "\n"


def _bandwidth(results: Mapping[str, Any], link: str) -> str:
    """Of a link whose name does not say it."""
    bits = results["links"].get(link)
    if bits is None or link[0].isdigit():
        return ""
    return f", which is at {bits / 1e6:.0f} Mbit/s"


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| contender | step, ms | samples/s | communication, ms | mean of a run, ms "
        "| share of a step | MB sent | mean of a run, MB | less headers | `wire_bytes` "
        "| formula |",
        f"| :-- |{' --: |' * 10}",
    ]
    for row in rows:
        title = CONTENDERS[row.contender].title
        if row.chosen:
            title += (
                f" ({CONTENDERS[row.chosen].title})"
                if row.chosen in CONTENDERS
                else f" ({row.chosen})"
            )
        own = "" if row.own is None else f" ({_ms(row.own)})"
        cells = [
            title,
            _ms(row.step),
            f"{row.samples:.1f}",
            _ms(row.communication) + own,
            _ms(row.mean_communication),
            f"{row.share:.0%}",
            *(_mb(x) for x in (row.sent, row.mean_sent, row.payload)),
            *("" if x is None else _mb(x) for x in (row.wire, row.formula)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _explained() -> str:
    return (
        "Medians of steps, of the slowest host. Communication: what a step takes "
        "beyond the same library's step with AdamW that sends nothing, round by "
        "round; in parentheses beyond SFPO's own step that sends nothing, which "
        "compresses and decompresses. One-bit rows are of the compressed phase, and "
        f"the mean of a run has {DENSE_STEPS:.1%} dense steps (12 % warm-up, then one "
        "in 16). Sent: the interface's counter; headers are 66 bytes of each packet. "
        "JAX dense bfloat16 is `compressed_mean(bfloat16())`: XLA's CPU back end "
        "widens an all-reduce of bfloat16 to float32."
    )


def _runs(results: Mapping[str, Any]) -> str:
    options = results["options"]
    lines = [
        f"**{options['train_steps']} steps on 2 hosts at "
        f"{options['train_bandwidth']}**, each at the best of the rates "
        f"{options['rates']}",
        "",
        f"| contender | rate | accuracy | seconds | to {options['target']:.0%}, s |",
        "| :-- | --: | --: | --: | --: |",
    ]
    for run in best_runs(results["runs"], options["target"]):
        last, reached = run["points"][-1], seconds_to(run, options["target"])
        lines.append(
            f"| {CONTENDERS[run['contender']].title} | {run['rate']:g} "
            f"| {last['accuracy']:.1%} | {last['seconds']:.1f} "
            f"| {'' if reached is None else f'{reached:.1f}'} |"
        )
    return "\n".join(lines)


def seconds_to(run: Mapping[str, Any], target: float) -> float | None:
    """When a test first found this accuracy; None: never."""
    points = run["points"]
    return next((p["seconds"] for p in points if p["accuracy"] >= target), None)


def best_runs(runs: Sequence[Mapping[str, Any]], target: float) -> list[Any]:
    """Of each contender the run first at the target, else the most accurate."""

    def worth(run: Mapping[str, Any]) -> tuple[float, float]:
        reached = seconds_to(run, target)
        last = run["points"][-1]["accuracy"]
        return (float("inf") if reached is None else reached, -last)

    names = dict.fromkeys(run["contender"] for run in runs)
    return [min((r for r in runs if r["contender"] == n), key=worth) for n in names]


def save_picture(path: Path, results: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Draws communication time by link, and accuracy over time where there are runs."""
    has_runs = bool(results["runs"])
    figure = Figure(figsize=(13 if has_runs else 7, 5), layout="constrained", dpi=150)
    axes = figure.subplots(1, 1 + has_runs, squeeze=False)[0]
    _draw_steps(axes[0], rows)
    if has_runs:
        _draw_runs(axes[1], results)
    figure.savefig(path)


def _draw_steps(axis: Axes, rows: Sequence[Row]) -> None:
    """A group of points for each link, of the smallest number of hosts."""
    hosts = min((row.hosts for row in rows), default=0)
    mine = [r for r in rows if r.hosts == hosts and r.contender in _COLORS]
    links = list(dict.fromkeys(r.link for r in mine))
    names = [n for n in _COLORS if any(r.contender == n for r in mine)]
    height = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        found = {r.link: 1e3 * r.communication for r in mine if r.contender == name}
        at = [links.index(link) + (place + 0.5) * height - 0.4 for link in found]
        # A communication below a millisecond is noise.
        times = [max(x, 1.0) for x in found.values()]
        title = CONTENDERS[name].title
        axis.plot(times, at, "o", ms=6, color=_COLORS[name], label=title)
        for x, y in zip(times, at, strict=True):
            axis.annotate(
                f"{x:.0f}", (x, y), (6, 0), textcoords="offset points", va="center"
            ).set_fontsize(7)
    for between in range(1, len(links)):
        axis.axhline(between - 0.5, color="#dee2e6", lw=1)
    axis.set_xscale("log")
    axis.margins(x=0.12)  # for the figures
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_yticks(range(len(links)), links, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("communication of a step, ms")
    axis.set_title(f"{hosts} hosts", fontsize=10)
    if names:
        axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _plain(axis, "x")


def _draw_runs(axis: Axes, results: Mapping[str, Any]) -> None:
    options = results["options"]
    for run in best_runs(results["runs"], options["target"]):
        name = run["contender"]
        seconds = [p["seconds"] for p in run["points"]]
        accuracy = [100 * p["accuracy"] for p in run["points"]]
        title = CONTENDERS[name].title
        axis.plot(seconds, accuracy, color=_COLORS[name], lw=1.6, label=title)
    axis.axhline(100 * options["target"], color="#adb5bd", lw=1, ls=":")
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("test accuracy, %")
    title = f"2 hosts, {options['train_bandwidth']}, {options['train_steps']} steps"
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    _plain(axis, "both")


def _plain(axis: Axes, grid: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, alpha=0.25)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.3g}" if size >= 1e5 else f"{size / 1e6:.4f}"
