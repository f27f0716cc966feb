"""Bad arguments fail when a transformation is built, in one line that helps."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import sfpo_jax as sfpo

NAN = float("nan")


def feedback(**arguments: Any) -> Any:
    return sfpo.sparsify(0.5, **arguments)


def adam(learning_rate: float = 1e-3, **arguments: Any) -> Any:
    return sfpo.onebit_adam(learning_rate, **{"warmup_steps": 10, **arguments})


def scale(**arguments: Any) -> Any:
    return sfpo.scale_by_onebit_adam(**{"warmup_steps": 10, **arguments})


def anneal(base: float = 0.7, total_steps: int = 100, **arguments: Any) -> Any:
    return sfpo.cosine_sparsity(base, total_steps, **arguments)


def recipe(learning_rate: float = 1e-3, total_steps: int = 100, **others: Any) -> Any:
    return sfpo.sfpo(learning_rate, total_steps, **others)


def eight(learning_rate: float = 1e-3, **arguments: Any) -> Any:
    return sfpo.adamw8bit(learning_rate, **arguments)


def mean(**arguments: Any) -> Any:
    return sfpo.compressed_mean(sfpo.compression.sign(), None, **arguments)


def factors(rank: Any = 2, **arguments: Any) -> Any:
    return sfpo.low_rank_mean(rank, None, **arguments)


# What is called, the argument, its value, what the message says of the way out.
CASES: list[tuple[Callable[..., Any], str, Any, str]] = [
    (adam, "learning_rate", -1e-3, "pass it positive"),
    (adam, "learning_rate", NAN, "at least 0"),
    (adam, "b1", 1.0, "[0, 1)"),
    (adam, "b1", -0.1, "[0, 1)"),
    (adam, "b2", 1.5, "[0, 1)"),
    (adam, "eps", -1e-8, "at least 0"),
    (adam, "weight_decay", -0.1, "at least 0"),
    (adam, "weight_decay", NAN, "at least 0"),
    (adam, "warmup_steps", 0, "at least 1"),
    (adam, "warmup_steps", -5, "at least 1"),
    (adam, "mu_dtype", "int4", '"int8", "packed"'),
    (adam, "mu_dtype", "float16", "bfloat16"),
    (adam, "nu_dtype", "packed", '"int8", "factored"'),
    (adam, "nu_dtype", "float8", "bfloat16"),
    (adam, "error_dtype", "factored", '"int8"'),
    (adam, "bucket_size", "256", "unit"),
    (adam, "bucket_size", "many MB", "with its unit"),
    (adam, "nu_floor", 1.5, "[0, 1]"),
    (adam, "refresh_every", 1, "at least 2"),
    (adam, "refresh_every", 2.5, "whole number"),
    (scale, "b1", 2.0, "[0, 1)"),
    (scale, "nu_dtype", "int4", "bfloat16"),
    (sfpo.sparsify, "sparsity", 1.5, "[0, 1]"),
    (sfpo.sparsify, "sparsity", -0.1, "[0, 1]"),
    (sfpo.sparsify, "sparsity", NAN, "[0, 1]"),
    (feedback, "momentum", 1.0, "[0, 1)"),
    (feedback, "momentum", -0.5, "[0, 1)"),
    (feedback, "min_size", -1, "at least 0"),
    (feedback, "error_dtype", "float64", '"int8"'),
    (anneal, "base", 1.2, "[0, 1]"),
    (anneal, "final", -0.5, "[0, 1]"),
    (anneal, "total_steps", 0, "at least 1"),
    (anneal, "begin", 101, "[0, 100]"),
    (anneal, "begin", -1, "[0, 100]"),
    (recipe, "total_steps", 0, "at least 1"),
    (recipe, "base_sparsity", 70, "[0, 1]"),
    (recipe, "final_sparsity", -0.3, "[0, 1]"),
    (recipe, "learning_rate", -1.0, "pass it positive"),
    (recipe, "nu_dtype", "uint8", "bfloat16"),
    (eight, "learning_rate", -1.0, "pass it positive"),
    (eight, "b1", 1.0, "[0, 1)"),
    (eight, "b2", -0.5, "[0, 1)"),
    (eight, "eps", -1.0, "at least 0"),
    (eight, "weight_decay", -1.0, "at least 0"),
    (eight, "mu_dtype", "factored", '"int8"'),
    (eight, "nu_dtype", "packed", '"factored"'),
    (sfpo.clip_by_global_norm, "max_norm", 0.0, "(0, inf]"),
    (sfpo.clip_by_global_norm, "max_norm", -1.0, "(0, inf]"),
    (sfpo.clip_by_global_norm, "max_norm", NAN, "(0, inf]"),
    (mean, "error_dtype", "float16", "bfloat16"),
    (mean, "bucket_size", "1GiBit", "GiB"),
    (factors, "rank", 0, "at least 1"),
    (factors, "rank", 2.5, "whole number"),
    (factors, "min_compression", 0.5, "[1, inf]"),
    (factors, "error_dtype", "float16", "bfloat16"),
]


def check(error: pytest.ExceptionInfo[ValueError], name: str, *words: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    assert f"`{name}`" in message
    assert message.endswith((".", "?"))
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("build", "name", "value", "remedy"),
    CASES,
    ids=[f"{build.__name__}-{name}-{value}" for build, name, value, _ in CASES],
)
def test_one_argument(
    build: Callable[..., Any], name: str, value: Any, remedy: str
) -> None:
    with pytest.raises(ValueError) as error:
        build(**{name: value})
    check(error, name, repr(value), remedy)


@pytest.mark.parametrize("build", [adam, scale, recipe])
def test_a_warmup_longer_than_the_run(build: Callable[..., Any]) -> None:
    with pytest.raises(ValueError) as error:
        build(warmup_steps=200, total_steps=100)
    check(error, "warmup_steps", "`total_steps`", "200", "100", "10 to 20 %")


@pytest.mark.parametrize("build", [adam, scale])
def test_auto_needs_the_length_of_the_run(build: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match='`warmup_steps="auto"`') as error:
        build(warmup_steps="auto")
    check(error, "total_steps", "20 %")
    with pytest.raises(ValueError) as error:
        build(warmup_steps="auto", total_steps=1)
    check(error, "total_steps", "1", "at least 2")


@pytest.mark.parametrize("narrow", ["bfloat16", "int8"])
def test_a_packed_moment_needs_a_float32_residual(narrow: str) -> None:
    with pytest.raises(ValueError) as error:
        adam(mu_dtype="packed", error_dtype=narrow)
    check(error, "error_dtype", "float32", narrow, 'mu_dtype="packed"')


def test_a_packed_moment_has_no_dense_steps() -> None:
    with pytest.raises(ValueError) as error:
        adam(mu_dtype="packed", refresh_every=16)
    check(error, "refresh_every", "None", 'mu_dtype="packed"', "16")


@pytest.mark.parametrize("name", ["rank", "min_compression"])
def test_what_shapes_depend_on_is_no_array(name: str) -> None:
    with pytest.raises(ValueError) as error:
        factors(**{name: jnp.float32(2)})
    check(error, name, "static_args", "2")


def test_what_is_in_range_passes() -> None:
    for sparsity in (0.0, 1.0, 0, 1):
        sfpo.sparsify(sparsity)
    adam(0.0, b1=0.0, b2=0.0, eps=0.0, nu_floor=0.0, warmup_steps=100, total_steps=100)
    anneal(0.0, 1, final=1.0, begin=1)
    recipe(total_steps=1)
