"""One of the two processes of `experiments.bench.links`.

    python -m experiments.bench.links_child RANK ADDRESS [ENTRIES ROUNDS]...

Compiles all methods for all sizes, measures its codecs, and then measures once for each
line on its input: the link by the probe, and every method.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.collectives import Method, axis_mean, methods
from sfpo_jax.parallel import probe_codecs, probe_link

AXIS = "node"


def averaging(method: Method, mesh: Mesh, entries: int) -> Callable[[], None]:
    """A function that averages float32[entries] of each process and waits for it."""
    own, shared = PartitionSpec(AXIS), PartitionSpec()

    def place(spec: PartitionSpec) -> Any:
        return NamedSharding(mesh, spec)

    rng = np.random.default_rng(jax.process_index())
    local = rng.normal(size=(1, entries)).astype(np.float32)
    x = jax.make_array_from_process_local_data(place(own), local)
    if method.compressor is None:
        dense = jax.jit(
            jax.shard_map(
                lambda x: axis_mean([x[0]], AXIS)[0],
                mesh=mesh,
                in_specs=own,
                out_specs=shared,
                check_vma=False,
            )
        )
        return lambda: jax.block_until_ready(dense(x))
    tx = sfpo.compressed_mean(method.compressor, AXIS)
    like = jax.ShapeDtypeStruct((entries,), jnp.float32)
    with jax.set_mesh(mesh):
        specs = sfpo.state_specs(jax.eval_shape(tx.init, like), AXIS)
        state = jax.jit(
            lambda: tx.init(jnp.zeros(entries)),
            out_shardings=jax.tree.map(place, specs),
        )()
    compressed = jax.jit(
        jax.shard_map(
            lambda x, state: tx.update(x[0], state),
            mesh=mesh,
            in_specs=(own, specs),
            out_specs=(shared, specs),
            check_vma=False,
        ),
        donate_argnums=1,
    )
    held = [state]

    def run() -> None:
        mean, held[0] = compressed(x, held[0])
        jax.block_until_ready((mean, held[0]))

    return run


def measure(
    cases: dict[int, dict[str, Callable[[], None]]],
    rounds: dict[int, int],
    start: Callable[[], None],
) -> dict[int, dict[str, list[float]]]:
    """Seconds of each method by size, the methods taking turns."""
    found: dict[int, dict[str, list[float]]] = {}
    for entries, runs in cases.items():
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds[entries]):
            for name, run in runs.items():
                start()
                began = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - began)
        found[entries] = times
    return found


def main(argv: Sequence[str]) -> int:
    """Answers with a line of JSON for each line read; ends with its input."""
    rank, address = int(argv[0]), argv[1]
    numbers = [int(x) for x in argv[2:]]
    rounds = dict(zip(numbers[::2], numbers[1::2], strict=True))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, rank)
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(AxisType.Auto,))
    known = methods()
    cases = {
        entries: {
            name: averaging(method, mesh, entries) for name, method in known.items()
        }
        for entries in rounds
    }
    for runs in cases.values():
        for run in runs.values():
            run()
    # Both leave it at once: a small reduction that is waited for.
    start = averaging(known["dense"], mesh, 8)
    codecs = probe_codecs(mesh, AXIS, probe_link(mesh, AXIS), known)
    print(json.dumps(codecs), flush=True)
    for _ in sys.stdin:
        link = probe_link(mesh, AXIS)
        times = measure(cases, rounds, start)
        print(json.dumps({"link": link, "times": times}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
