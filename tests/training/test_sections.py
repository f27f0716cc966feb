"""Values that no run can have: refused with key, value and remedy."""

from typing import Any

import pytest

from experiments.vit_run import Config
from sfpo_jax.training import (
    ConfigError,
    Data,
    Parallel,
    build,
    check_batch,
)

COMPRESSION = "communication.compression"


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("data.batch_size", 0, "at least 1"),
        ("data.shift", -1, "at least 0"),
        ("data.test_share", 0.0, "(0, 1)"),
        ("data.test_share", 1.0, "(0, 1)"),
        ("data.crop_area", 0.0, "(0, 1]"),
        ("data.flip", 1.5, "a probability"),
        ("data.centre_share", 1.1, "(0, 1]"),
        ("data.workers", -1, "at least 0"),
        ("optimizer.learning_rate", -1e-3, "positive"),
        ("optimizer.learning_rate", 0.0, "positive"),
        ("optimizer.learning_rate", float("inf"), "finite"),
        ("optimizer.learning_rate", float("nan"), "finite"),
        ("optimizer.warmup", 40.0, "a share of the run, not steps"),
        ("optimizer.b1", 1.0, "[0, 1)"),
        ("optimizer.b2", -0.1, "[0, 1)"),
        ("optimizer.eps", -1e-8, "[0, inf)"),
        ("optimizer.weight_decay", -0.1, "[0, inf)"),
        ("optimizer.clip_norm", 0.0, "write none"),
        ("optimizer.schedule", "cosin", "'cosine'?"),
        ("sparsity.base", 1.3, "the share of entries dropped"),
        ("sparsity.final", -0.1, "[0, 1]"),
        ("sparsity.min_size", -1, "at least 0"),
        ("parallel.mesh.data", 0, "-1 for what is left"),
        ("parallel.mesh.node", -1, "-1 once"),
        ("parallel.operator.chunk_size", 3, "`parallel.operator`: `chunk_size`"),
        ("parallel.operator.prefetch_depth", 0, "at least 1"),
        ("parallel.pipeline_depth", -1, "at least 0"),
        ("parallel.staleness", 2, "`parallel.staleness` must be 0 or 1, got 2"),
        ("parallel.microbatches", 0, "at least 1"),
        ("parallel.cpu_devices", 0, "at least 1"),
        ("parallel.time.recompute", "some", "none, full, auto"),
        ("parallel.time.recompute", "auto", "for example 40GB"),
        ("parallel.time.budget", "40GB", "none without"),
        ("parallel.time.budget", "40", "with its unit"),
        (f"{COMPRESSION}.algorithm", "1bit_adm", "'1bit_adam'?"),
        (f"{COMPRESSION}.algorithm", "zip", "none, bf16, int8, 1bit_adam, sparse_1bit"),
        (f"{COMPRESSION}.block_size", 100, "multiple of 8"),
        (f"{COMPRESSION}.block_size", 0, "multiple of 8"),
        (f"{COMPRESSION}.density", 0.0, "(0, 1]"),
        (f"{COMPRESSION}.warmup", 1.5, "longer than the run"),
        (f"{COMPRESSION}.warmup", 0.0, "(0, 1]"),
        (f"{COMPRESSION}.warmup", "atuo", "'auto'?"),
        ("communication.bucket_size", 256, "with its unit"),
        ("communication.bucket_size", "256", "with its unit"),
        ("communication.bucket_size", "256Mb", "'MB'?"),
        ("communication.bucket_size", "2B", "4B"),
        ("communication.bucket_size", True, "with a unit"),
        ("memory.mu_dtype", "float16", "'bfloat16'?"),
        ("train.steps", 0, "at least 1"),
        ("train.log_every", 0, "at least 1"),
        ("train.evaluate_every", -5, "at least 1"),
        ("train.seed", -1, "at least 0"),
        ("train.name", "", "a path"),
        ("train.checkpoint_every", 0, "at least 1"),
        ("train.keep", 0, "at least 1"),
        ("train.max_nonfinite", 0, "at least 1"),
        ("train.ema", 1.0, "write none"),
        ("train.ema", "nnoe", "'none'?"),
        ("train.name", "a/b", "a path"),
        ("model.heads", 7, "model.width"),
        ("model.patch_size", 5, "divisor of 28"),
        ("model.depth", 0, "at least 1"),
        ("model.dropout", 1.0, "[0, 1)"),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Config, nested(key, value), base=Config())
    message = str(caught.value)
    assert "\n" not in message
    # Of keys that clash, the message may name the section they share.
    assert key in message or key.rpartition(".")[0] in message, message
    assert str(value) in message, message
    assert remedy in message, message


@pytest.mark.parametrize(
    ("batch", "microbatches", "devices", "remedy"),
    [(100, 1, 8, "96 or 104"), (128, 3, 8, "120 or 144"), (4, 1, 8, "take 8")],
)
def test_a_batch_that_does_not_divide_is_refused(
    batch: int, microbatches: int, devices: int, remedy: str
) -> None:
    data, parallel = Data(batch_size=batch), Parallel(microbatches=microbatches)
    with pytest.raises(ValueError, match=rf"batch_size.* {batch}: .*{remedy}"):
        check_batch(data.batch_size, parallel, devices)


def test_a_batch_that_divides_passes() -> None:
    check_batch(48, Parallel(microbatches=3), 8)
