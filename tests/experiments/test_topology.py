"""`topology_aware` and `algorithm: auto` in a run: what is built of them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.run import Run
from experiments.vit_run import Config, prepare
from sfpo_jax.collectives import Codec, Link
from sfpo_jax.parallel import Links
from sfpo_jax.training import load_config

pytestmark = pytest.mark.usefixtures("standard_promotion")
TOPOLOGY = "--communication.topology_aware.enable=true"
NODES = ["--parallel.mesh.node=2", "--communication.links.data=300GB/s"]


@pytest.fixture
def prepared(tmp_path: Path) -> Any:
    """A function from options to a run that is not begun."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (160, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "toy.npz", images=images, labels=np.arange(160) % 2)
    values = {
        "data.source": tmp_path / "toy.npz",
        "data.batch_size": 16,
        "model.image_size": 8,
        "model.patch_size": 4,
        "model.width": 64,
        "model.depth": 1,
        "model.heads": 2,
        "model.mlp_width": 1024,
        "model.classes": 2,
        "train.steps": 4,
        "train.compare": "false",
        "communication.compression.warmup": 0.5,
        "communication.compression.refresh_every": "none",
    }
    fixed = [f"--{key}={value}" for key, value in values.items()]

    def make(*options: str) -> Run:
        argv = [*fixed, *options]
        return prepare(load_config(Config(), argv, prog="", description=""))

    return make


def sent(run: Run, axis: str) -> int:
    """Bytes of a compressed step along the axis."""
    from experiments.layout import make_trainee

    (own,) = run.contenders
    step, init, _ = make_trainee(
        run.task, own.tx, own.release, run.mesh, shard_axes=own.shard_axes
    )
    params = jax.eval_shape(lambda: init(0))
    batch = jax.eval_shape(lambda: next(run.stream()))
    return step.wire_bytes(step.init_shapes(params), batch, "compressed")[axis]


def test_fast_axes_are_exact_and_slow_ones_carry_a_part(prepared: Any) -> None:
    given = "--communication.links.node=12.5GB/s"
    run = prepared(*NODES, given, TOPOLOGY)
    assert run.contenders[0].shard_axes == ("data",)
    assert (
        run.notes[-1] == "reduced exactly and first over data, then 1bit_adam over node"
    )
    plain = prepared(*NODES, given)
    assert plain.contenders[0].shard_axes == () and plain.notes == []
    # Four devices a node; only the large matrices are cut.
    assert sent(run, "node") < 0.4 * sent(plain, "node")


def test_all_axes_fast_trains_densely(prepared: Any) -> None:
    run = prepared(*NODES, "--communication.links.node=100GB/s", TOPOLOGY)
    assert [c.name for c in run.contenders] == ["AdamW"]
    assert "nothing compressed" in run.notes[-1]


def test_auto_is_settled_before_the_run_begins(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("dense", "bf16", "int8", "sign", "sparse_sign")
    codecs = {n: Codec(((0, 9.0 if n == "sparse_sign" else 0.0),)) for n in names}

    def find(mesh: Any, given: Any, methods: Any) -> Links:
        links = {"node": Link(1e-5, 1e6), "data": Link(1e-5, given["data"])}
        return Links(links, {"node": "measured", "data": "given"}, codecs)

    monkeypatch.setattr("sfpo_jax.training._averaging.find_links", find)
    run = prepared(*NODES, "--communication.compression.algorithm=auto", TOPOLOGY)
    assert [c.name for c in run.contenders] == ["SFPO"]
    communication = run.config.communication
    assert communication.compression.algorithm == "1bit_adam"
    assert communication.links.node == "1MB/s"
    assert any(note.startswith("node: sign: ") for note in run.notes)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--communication.compression.warmup=auto", ["warmup`", "auto", "0.12"]),
        ("--communication.links.node=12.5", ["`communication.links.node`", "no unit"]),
        ("--parallel.mesh.data=16", ["`parallel.mesh`", "data=16", "8 devices"]),
    ],
)
def test_what_does_not_go_together(
    prepared: Any, option: str, words: list[str]
) -> None:
    given = "--communication.links.node=12.5GB/s"
    with pytest.raises(ValueError) as caught:
        prepared(*NODES, given, TOPOLOGY, option)
    for word in words:
        assert word in str(caught.value)


def test_the_plain_step_clips_in_place_of_its_chain(prepared: Any) -> None:
    given = "--communication.links.node=12.5GB/s"
    run = prepared(*NODES, given, TOPOLOGY, "--optimizer.clip_norm=1")
    assert run.contenders[0].max_norm == 1.0
    whole = prepared(*NODES, given, "--optimizer.clip_norm=1")
    assert whole.contenders[0].max_norm is None


def test_the_layered_step_clips(prepared: Any) -> None:
    run = prepared(
        *NODES,
        "--communication.links.node=12.5GB/s",
        TOPOLOGY,
        "--optimizer.clip_norm=1",
        "--memory.gradient_release=true",
    )
    release = run.contenders[0].release
    assert release is not None
    assert (release.shard, release.shard_axes) == ("states", ("data",))
    assert run.contenders[0].max_norm == 1.0
