"""What three levels of parallelism send, hide and hold, compiled for A100s.

    python -m experiments.bench.parallel

Compiles layered steps of a GPT for 8, 64 and 512 A100s, none of which has to be there,
and reads from the programs which transfers run under matrix products, the bytes each
axis sends, and the memory. Then it estimates, and calls it so, the time of a step on
eight of them (`roofline`). Writes JSON and a table.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import sfpo_jax as sfpo
from experiments.bench import roofline
from experiments.bench.memory_programs import gpt
from experiments.bench.parallel_report import markdown
from experiments.models.gpt import GPTConfig
from experiments.models.layered import layered_gpt
from sfpo_jax.collectives import Overlap, overlaps
from sfpo_jax.memory import MissingCompilerError, find_device, planning_mesh
from sfpo_jax.training import exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.parallel"
DEVICE = "a100-80gb"
LARGE = 32_000  # bytes; what sends less is a scalar, a bias or a scale
PREFETCH = 2  # pieces of a product in flight


@dataclasses.dataclass(frozen=True)
class Options:
    """The model that is compiled, and where to."""

    width: int = 512
    """Features of a token; a head has 64."""
    depth: int = 8
    """Blocks; they are a loop, which takes as long to compile for any number."""
    length: int = 512
    """Tokens of a window."""
    rows: int = 1
    """Windows of one rank of the batch; eight where memory is compared."""
    out: str = "docs/results/parallel.json"
    """The file of results; the table lies beside it."""


def config_of(options: Options) -> GPTConfig:
    """The GPT that is compiled; small words, so that the blocks are what counts."""
    return GPTConfig(
        vocabulary=512,
        length=options.length,
        width=options.width,
        depth=options.depth,
        heads=options.width // 64,
        mlp_width=4 * options.width,
        is_tied=True,
        attention="xla",
        dtype="bfloat16",
    )


class Compiled:
    """A layered step compiled for A100s, and what one asks it.

    Args:
      options: the model.
      tx: the optimizer.
      mesh_shape: axes and sizes.
      rows: windows of one rank of the batch.
      pieces: of a product, where the mesh has an axis `op`.
      how: passed to `make_layered_train_step`.
    """

    def __init__(
        self,
        options: Options,
        tx: optax.GradientTransformation,
        mesh_shape: dict[str, int],
        rows: int,
        pieces: int = 8,
        **how: Any,
    ) -> None:
        config = config_of(options)
        layered = layered_gpt(config, sfpo.Operator(pieces, PREFETCH))
        self.mesh = planning_mesh(find_device(DEVICE), mesh_shape)
        self.step = sfpo.make_layered_train_step(
            layered.model, tx, self.mesh, operator_specs=layered.specs, **how
        )
        params = jax.eval_shape(layered.init, jax.random.key(0))
        ranks = self.mesh.size // self.mesh.shape["op"]
        windows = (ranks * rows, config.length + 1)
        self.params = sum(x.size for x in jax.tree.leaves(params))
        self.arguments = (
            self.step.init_shapes(params),
            jax.ShapeDtypeStruct(windows, jnp.int32),
        )

        self._compiled: Any = None

    def compiled(self) -> Any:
        """The program; compiled once, however often it is asked for."""
        if self._compiled is None:
            self._compiled = self.step.lower(*self.arguments).compile()
            text = self._compiled.as_text()
            self.step.compiled_text = lambda state, batch: text
        return self._compiled

    def overlaps(self) -> list[Overlap]:
        """Large transfers in the bodies of loops over layers."""
        found = overlaps(self.compiled().as_text(), dict(self.mesh.shape))
        return [x for x in found if x.turns > 1 and x.sent >= LARGE]

    def sent(self) -> dict[str, int]:
        """Bytes of the compressed phase."""
        self.compiled()
        return self.step.wire_bytes(*self.arguments, phase="compressed")

    def total_bytes(self) -> int:
        """Its memory."""
        held = self.compiled().memory_analysis()
        kept = held.output_size_in_bytes - held.alias_size_in_bytes
        return held.argument_size_in_bytes + kept + held.temp_size_in_bytes


def onebit(axis_name: str) -> optax.GradientTransformation:
    """1-bit Adam over one axis."""
    return sfpo.onebit_adam(1e-3, warmup_steps=10, axis_name=axis_name)


def between_hosts(options: Options, hosts: int, pipeline_depth: int) -> Compiled:
    """States sharded over the 8 GPUs of a host, one bit between hosts."""
    return Compiled(
        options,
        onebit("node"),
        {"node": hosts, "data": 8},
        options.rows,
        shard="states",
        pipeline_depth=pipeline_depth,
    )


def hidden(options: Options, sharded: Compiled) -> list[dict[str, Any]]:
    """Of each large transfer of a turn of the backward loops, the products under it.

    Args:
      options: the model.
      sharded: one more step, for 64 GPUs and with a pipeline depth of 4.
    """
    one_host = {"mesh_shape": {"data": 8}, "rows": options.rows}
    title = "states sharded over data 8, one bit over node 8, `pipeline_depth`"
    cases = {
        "dense AdamW, data 8": Compiled(options, optax.adamw(1e-3), **one_host),
        "one bit, data 8": Compiled(options, onebit("data"), **one_host),
        f"{title} 2": between_hosts(options, 8, 2),
        f"{title} 4": sharded,
    }
    return [
        {"case": name, **found._asdict()}
        for name, case in cases.items()
        for found in case.overlaps()
    ]


def rings(options: Options, op: int) -> dict[str, Any]:
    """Permutes of a block's products, forward and back, and those without a product."""
    mesh_shape = {"data": 8 // op, "op": op}
    made = Compiled(options, optax.adamw(1e-3), mesh_shape, options.rows)
    found = [x for x in made.overlaps() if x.opcode == "collective-permute"]
    alone = sum(x.products == 0 for x in found)
    per_ring = 8 * (op - 1) // op
    return {"op": op, "permutes": len(found), "per_ring": per_ring, "alone": alone}


def scaling(by_hosts: dict[int, Compiled]) -> list[dict[str, Any]]:
    """Bytes of a device in the compressed phase, and memory, with more hosts."""
    rows = []
    for hosts, made in by_hosts.items():
        inside = 2 * 7 / 8 * 4 * made.params
        between = 2 * (hosts - 1) / hosts * made.params / 8 * roofline.PAYLOAD
        row = {"gpus": 8 * hosts, "sent": made.sent(), "total": made.total_bytes()}
        rows.append(row | {"data": inside, "node": between})
    return rows


def activations(options: Options) -> list[dict[str, Any]]:
    """Temporaries of a step with everything stored, operators split or not."""
    rows = []
    for op in (1, 4):
        made = Compiled(
            options, optax.sgd(1e-3), {"op": op}, 8 * options.rows, recompute="none"
        )
        plan = sfpo.plan(made.step, *made.arguments)
        rows.append({"op": op, "temporary": plan.temporary_bytes})
    return rows


def main(argv: Sequence[str]) -> int:
    """Compiles, counts, estimates and writes.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status: 0, or 2 where the GPU's compiler is not installed.

    Raises:
      SystemExit: with status 2 for options that cannot be used, 0 after `--help`.
    """
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(), argv, prog=PROGRAM, description="Reads compiled parallel steps."
        )
    result: dict[str, Any] = {"options": dataclasses.asdict(options)}
    result |= {"device": DEVICE, "jax": jax.__version__}
    loads = (("1.3B", gpt(24, 2048), 8), ("13B", gpt(), 1))
    result["estimates"] = [
        roofline.estimates(roofline.load_of(*load)) for load in loads
    ]
    try:
        result["rings"] = [rings(options, op) for op in (2, 4)]
        by_hosts = {hosts: between_hosts(options, hosts, 4) for hosts in (1, 8, 64)}
        result["scaling"] = scaling(by_hosts)
        result["hidden"] = hidden(options, by_hosts[8])
        result["activations"] = activations(options)
    except MissingCompilerError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    Console().print(markdown(result), markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
