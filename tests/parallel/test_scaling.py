"""What a device sends and holds as there are more of them, compiled for A100s."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from experiments.models.gpt import GPTConfig
from experiments.models.layered import layered_gpt
from sfpo_jax.memory import find_device, planning_mesh
from tests.memory.programs import needs_gpu_compiler
from tests.parallel.wide_mlp import MODEL, TOKENS, onebit, shapes

# A shard of each leaf has as many blocks of signs as there are hosts at most, 64.
VOCABULARY, BLOCK = 2048, 2048
PARAMS = sum(x.size for x in jax.tree.leaves(shapes(VOCABULARY)))
LOCAL = 8  # GPUs of a host


class Compiled:
    """The step with states sharded inside hosts, one bit between; never run."""

    def __init__(self, hosts: int) -> None:
        mesh = planning_mesh(find_device("a100-80gb"), {"node": hosts, "data": LOCAL})
        step = sfpo.make_layered_train_step(
            MODEL, onebit("node"), mesh, shard="states", pipeline_depth=4
        )
        state = step.init_shapes(shapes(VOCABULARY))
        batch = jax.ShapeDtypeStruct((LOCAL * hosts, TOKENS), jnp.int32)
        compiled = step.lower(state, batch).compile()
        # Read once: the question would compile it again.
        text = compiled.as_text()
        step.compiled_text = lambda state, batch: text
        self.sent = step.wire_bytes(state, batch, phase="compressed")
        held = compiled.memory_analysis()
        self.peak = (
            held.argument_size_in_bytes
            + held.output_size_in_bytes
            - held.alias_size_in_bytes
            + held.temp_size_in_bytes
        )


@pytest.fixture(scope="module")
def by_hosts() -> dict[int, Compiled]:
    return {hosts: Compiled(hosts) for hosts in (1, 8, 64)}


@needs_gpu_compiler
def test_hosts_send_two_bits_of_a_shard(by_hosts: dict[int, Compiled]) -> None:
    payload = PARAMS / LOCAL * (1 / 8 + 4 / BLOCK)
    for hosts, compiled in by_hosts.items():
        sent = compiled.sent
        # Gradients are scattered, new weights are gathered; both are float32.
        exact = 2 * (LOCAL - 1) / LOCAL * 4 * PARAMS
        np.testing.assert_allclose(sent["data"], exact, rtol=0.02)
        between = 2 * (hosts - 1) / hosts * payload
        np.testing.assert_allclose(sent.get("node", 0), between, rtol=0.02)
        assert sent.get("node,data", 0) < 1000


@needs_gpu_compiler
def test_more_hosts_take_no_more_memory(by_hosts: dict[int, Compiled]) -> None:
    assert by_hosts[64].peak <= 1.01 * by_hosts[8].peak


@needs_gpu_compiler
def test_four_ranks_of_an_operator_hold_a_quarter_of_the_activations() -> None:
    config = GPTConfig(
        vocabulary=128,
        length=512,
        width=512,
        depth=6,
        heads=8,
        mlp_width=2048,
        is_tied=True,
        attention="xla",
        dtype="bfloat16",
    )

    def temporaries(op: int) -> int:
        layered = layered_gpt(config, sfpo.Operator(8))
        step: Any = sfpo.make_layered_train_step(
            layered.model,
            optax.sgd(1e-3),
            planning_mesh(find_device("a100-80gb"), {"op": op}),
            recompute="none",
            operator_specs=layered.specs,
        )
        params = jax.eval_shape(layered.init, jax.random.key(0))
        batch = jax.ShapeDtypeStruct((8, config.length + 1), jnp.int32)
        plan = sfpo.plan(step, step.init_shapes(params), batch, cache=False)
        return plan.temporary_bytes

    assert temporaries(4) <= 0.35 * temporaries(1)
