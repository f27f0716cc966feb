"""What a training step sends, read from its compiled program."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo

SIZE = 1_000_003
BLOCK = 2048

# "f32[8,62]{1,0} all-to-all(": the type, the shape and the name of a collective.
COLLECTIVE = re.compile(
    r"\b([a-z]+[0-9]+)\[([0-9,]*)\]\S* (all-to-all|all-gather|all-reduce)\("
)


def loss_fn(params: Any, batch: Any) -> Any:
    return sum(jnp.mean(batch) * jnp.sum(p * p) for p in jax.tree.leaves(params))


class Compiled:
    """A step over `ranks` devices and its state; compiled, never run."""

    def __init__(self, ranks: int, sizes: list[int], compressor: Any = None) -> None:
        tx = sfpo.onebit_adam(
            0.1, warmup_steps=3, axis_name="data", compressor=compressor
        )
        mesh = sfpo.make_mesh(devices=jax.devices()[:ranks])
        self.step = sfpo.make_train_step(loss_fn, tx, mesh)
        self.ranks, self.entries = ranks, sum(sizes)
        self.state = self.step.init([jnp.zeros(n) for n in sizes])
        self.batch = np.ones(ranks, np.float32)
        # Read once: each question would compile it again.
        text = self.step.compiled_text(self.state, self.batch)
        self.text = text
        self.step.compiled_text = lambda state, batch: text

    def transfers(self, phase: str) -> list[Any]:
        return self.step.transfers(self.state, self.batch, phase)

    def bits(self, phase: str) -> float:
        """Bits a parameter that one device sends in a step."""
        sent = self.step.wire_bytes(self.state, self.batch, phase)
        assert set(sent) == {"data"}
        return 8 * sent["data"] / self.entries


@pytest.fixture(scope="module", params=[2, 4, 8])
def compiled(request: pytest.FixtureRequest) -> Compiled:
    return Compiled(request.param, [SIZE])


def test_the_compressed_phase_sends_two_bits(compiled: Compiled) -> None:
    share = 2 * (compiled.ranks - 1) / compiled.ranks
    bits = compiled.bits("compressed")
    np.testing.assert_allclose(bits, share * (1 + 32 / BLOCK), rtol=0.02)
    assert bits <= 2.1


def test_the_warmup_sends_float32_once(compiled: Compiled) -> None:
    share = 2 * (compiled.ranks - 1) / compiled.ranks
    np.testing.assert_allclose(compiled.bits("warmup"), share * 32, rtol=1e-4)
    ratio = compiled.bits("warmup") / compiled.bits("compressed")
    assert ratio > 31


def test_no_float_is_sent_but_scales(compiled: Compiled) -> None:
    # As many scales as blocks, a multiple of the ranks.
    blocks = -(-SIZE // BLOCK)
    most = 4 * (blocks + compiled.ranks)
    for transfer in compiled.transfers("compressed"):
        passes = 2 if transfer.opcode.startswith("all-reduce") else 1
        full = transfer.sent / passes * compiled.ranks / (compiled.ranks - 1)
        assert transfer.times == 1
        if transfer.dtypes != ("u8",):
            assert full <= most, transfer


def test_the_program_holds_one_dense_collective(compiled: Compiled) -> None:
    # Counted in the text itself: only the reduction of the warm-up is dense.
    found = [
        (dtype, int(np.prod([int(n) for n in shape.split(",") if n])), name)
        for dtype, shape, name in COLLECTIVE.findall(compiled.text)
    ]
    floats = [(n, name) for dtype, n, name in found if dtype != "u8" and n > 1000]
    assert floats == [(SIZE, "all-reduce")]
    payload = [(n, name) for dtype, n, name in found if dtype == "u8"]
    names = sorted(name for _, name in payload)
    assert names[0] == "all-gather" and set(names[1:]) == {"all-to-all"}
    for n, _ in payload:
        assert n <= 1.01 * SIZE / 8


@pytest.mark.slow
def test_sparse_signs_send_less() -> None:
    sparse = Compiled(8, [SIZE], sfpo.compression.sparse_sign(0.1))
    assert sparse.bits("compressed") < 1.6
    dense = 2 * 7 / 8 * (1 + 32 / BLOCK)
    assert sparse.bits("compressed") < dense


def test_small_leaves_travel_together() -> None:
    # Biases and scales of layers, none a multiple of anything.
    sizes = [3, 1001, 70, 2049, 5, 333, 1, 999]
    many = Compiled(8, sizes)
    transfers = [t for t in many.transfers("compressed") if t.sent > 64]
    # Bits and scales, there and back: four, for any number of leaves.
    assert len(transfers) <= 4
    assert len([t for t in many.transfers("warmup") if t.sent > 64]) == 1
