"""One JAX host of `experiments.bench.network`.

    python -m experiments.bench.network_child HOST HOSTS ADDRESS INTERFACE BATCH FILE

Joins the others, and answers the orders on its input (`network_host.serve`).
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import sfpo_jax as sfpo
from experiments.bench.network_cells import CONTENDERS
from experiments.bench.network_host import (
    Batches,
    Digits,
    Spec,
    learning_rate,
    read_digits,
    serve,
    take_turn,
    train,
)
from experiments.bench.network_task import filled, graph_of, loss_of
from experiments.models.vit import ViTConfig
from experiments.scores import score
from sfpo_jax import compression
from sfpo_jax.collectives import choose_method, methods
from sfpo_jax.parallel import probe_codecs, probe_link

AXIS = "node"
ALONE = ("alone", "onebit_alone")  # nothing is sent
TIMING = Spec(rate=1e-3, steps=0, warmup=1)
# The run that a schedule of SFPO is told of where only steps are timed.
_LONG = 1000
_B1, _B2, _DECAY, _REFRESH = 0.9, 0.999, 0.01, 16
_DENSITY = 0.1  # of the sparse signs, as in `methods`


def make_tx(name: str, spec: Spec, axis: str | None) -> optax.GradientTransformation:
    """The optimizer of a contender."""

    def rate(count: Any) -> Any:
        if not spec.steps:
            return jnp.float32(spec.rate)
        table = [learning_rate(spec, t) for t in range(spec.steps + 1)]
        return jnp.asarray(table, jnp.float32)[jnp.minimum(count, spec.steps)]

    adam: dict[str, Any] = {"b1": _B1, "b2": _B2, "weight_decay": _DECAY}
    onebit: dict[str, Any] = {
        **adam,
        "warmup_steps": spec.warmup,
        "refresh_every": _REFRESH,
        "axis_name": axis,
    }
    steps = spec.steps or _LONG
    if name in ("onebit", "onebit_alone"):
        return sfpo.sfpo(rate, steps, **onebit)
    if name == "unmasked":
        sign = compression.sign(relaxation=1.5)
        return sfpo.onebit_adam(rate, total_steps=steps, compressor=sign, **onebit)
    if name == "zero_one":
        sign = compression.sign(relaxation=1.5)
        return sfpo.zero_one_adam(
            rate,
            total_steps=steps,
            compressor=sign,
            sync_every=_cycle(name),
            **onebit,
        )
    if name == "sparse":
        sparse = compression.sparse_sign(_DENSITY, relaxation=1.5)
        return sfpo.onebit_adam(rate, total_steps=steps, compressor=sparse, **onebit)
    adamw = optax.adamw(rate, **adam)
    if name == "low_rank":
        return optax.chain(sfpo.low_rank_mean(1, axis), adamw)
    if name in ("bf16", "int8"):
        # XLA's CPU back end widens a bfloat16 all-reduce to float32; this one is not.
        chosen = compression.bfloat16() if name == "bf16" else compression.int8()
        mean = sfpo.compressed_mean(chosen, axis, error_feedback=name == "int8")
        return optax.chain(mean, adamw)
    return adamw


def _cycle(name: str) -> int:
    """Steps of which one sends for all; `auto` may choose what is not in the tables."""
    return CONTENDERS[name].cycle if name in CONTENDERS else 1


class Program(NamedTuple):
    """A compiled step of a contender."""

    start: Callable[[], Any]  # the state before the first step
    compiled: Any  # (state, batch) -> (state, metrics)
    sharding: NamedSharding  # of the batch
    wire: dict[str, int]  # bytes a host sends in a step, by phase


class JaxContestant:
    """This process' part of any JAX contender; see `network_host.Contestant`."""

    def __init__(self, digits: Digits, batch: int) -> None:
        config = ViTConfig(**digits.config)
        self._loss_fn, self._graph = loss_of(config), graph_of(config)
        self._digits, self._batch = digits, batch
        self._params = filled(config, digits.weights)
        self.mesh = sfpo.make_mesh(node=jax.process_count())
        self._own = sfpo.make_mesh(devices=jax.local_devices())
        self._programs: dict[tuple[str, Spec], Program] = {}
        self.chosen = "dense"
        self._state: Any = None
        self._at: Any = None
        self._shared = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self._sum = jax.jit(jnp.sum)
        self._test = jax.jit(self._scores)

    def begin(self, name: str, spec: Spec) -> None:
        """See there."""
        self._at = self.program(name, spec)
        self._state = self._at.start()

    def program(self, name: str, spec: Spec) -> Program:
        """The step of a contender, compiled when it is first asked for."""
        key = (self.chosen if name == "auto" else name, spec)
        if key not in self._programs:
            self._programs[key] = self._compile(*key)
        return self._programs[key]

    def _compile(self, name: str, spec: Spec) -> Program:
        is_alone = name in ALONE
        mesh = self._own if is_alone else self.mesh
        tx = make_tx(name, spec, None if is_alone else AXIS)
        step = sfpo.make_train_step(self._loss_fn, tx, mesh)
        sharding = NamedSharding(mesh, PartitionSpec(step.batch_axes))
        rows = self._batch * mesh.shape[AXIS]
        side = self._digits.images.shape[1]
        batch = {
            "images": jax.ShapeDtypeStruct((rows, side, side), jnp.float32),
            "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
        state = step.init_shapes(self._params)
        compiled = step.lower(state, batch).compile()
        # It is asked for every phase, and would be compiled for each again.
        text = compiled.as_text()
        step.compiled_text = lambda state, batch: text

        def sent(phase: str) -> int:
            return sum(step.wire_bytes(state, batch, phase).values())

        wire, cycle = {x: sent(x) for x in ("warmup", "compressed")}, _cycle(name)
        if cycle > 1:
            total = wire["compressed"] + (cycle - 1) * sent("local")
            wire["compressed"] = round(total / cycle)
        # `step.init` would be compiled again in each turn. NumPy's arrays are taken
        # for the same on all hosts, which JAX's own of one host are not.
        first = step.init(self._params)
        copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
        return Program(lambda: copy(first), compiled, sharding, wire)

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """See there."""
        put = jax.make_array_from_process_local_data
        batch = {
            "images": put(self._at.sharding, images),
            "labels": put(self._at.sharding, labels),
        }
        self._state, metrics = self._at.compiled(self._state, batch)
        jax.block_until_ready(self._state)
        return float(metrics["loss"])

    def test(self) -> tuple[float, float]:
        """See there."""
        params = jax.tree.map(lambda x: x.addressable_data(0), self._state.params)
        images, labels = self._digits.test_images, self._digits.test_labels
        correct, loss = self._test(params, images, labels)
        return float(correct), float(loss)

    def _scores(self, params: Any, images: Any, labels: Any) -> Any:
        scores = score(nnx.merge(self._graph, params)(images[..., None]), labels)
        return scores.is_correct.mean(), scores.loss.mean()

    def barrier(self) -> None:
        """See there."""
        ones = np.ones(1, np.float32)
        x = jax.make_array_from_process_local_data(self._shared, ones)
        jax.block_until_ready(self._sum(x))

    def choose(self, link: Any, codecs: Any) -> str:
        """Makes `auto` what the cost model says, and returns its reasons."""
        entries = sum(leaf.size for leaf in jax.tree.leaves(self._params))
        choice = choose_method(entries, jax.process_count(), link, codecs)
        names = {"sign": "onebit", "sparse_sign": "sparse"}
        self.chosen = names.get(choice.method, choice.method)
        return str(choice)


def main(argv: Sequence[str]) -> int:
    """Ends with its input."""
    host, hosts, batch = int(argv[0]), int(argv[1]), int(argv[4])
    address, interface = argv[2:4]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Not on all interfaces, as JAX would by itself.
    bind = address if host == 0 else None
    jax.distributed.initialize(address, hosts, host, coordinator_bind_address=bind)
    digits = read_digits(Path(argv[5]))
    contestant = JaxContestant(digits, batch)
    batches = Batches(digits, batch, host, hosts)
    known = methods(is_masked=True)
    mesh = contestant.mesh
    codecs: dict[str, Any] = {}

    def prepare(names: Sequence[str], steps: int) -> Any:
        for name in names:
            contestant.begin(name, TIMING)
            take_turn(contestant, batches, interface, steps)
        return {name: contestant.program(name, TIMING).wire for name in names}

    def measure_codecs() -> None:
        """For which the link must not be limited."""
        codecs.update(probe_codecs(mesh, AXIS, probe_link(mesh, AXIS), known))

    def probe() -> Any:
        link = probe_link(mesh, AXIS)
        reasons = contestant.choose(link, codecs)
        return {"link": link, "reasons": reasons, "chosen": contestant.chosen}

    def turn(name: str, steps: int) -> Any:
        contestant.begin(name, TIMING)
        return take_turn(contestant, batches, interface, steps)

    def run(name: str, rate: float, steps: int, warmup: int, every: int) -> Any:
        spec = Spec(rate, steps, warmup)
        contestant.begin(name, spec)
        stream = Batches(digits, batch, host, hosts)
        return train(contestant, stream, spec, every, host)

    serve(
        {
            "prepare": prepare,
            "codecs": measure_codecs,
            "probe": probe,
            "turn": turn,
            "train": run,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
