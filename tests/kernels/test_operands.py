"""Attributes that lie about their arrays: an exception each, never an abort."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from sfpo_jax.kernels import native_platforms

pytestmark = pytest.mark.skipif(
    "cpu" not in native_platforms(), reason="no native kernels for the CPU"
)
HUGE = [2**62, 2**63 - 1, -(2**63), 2**61]


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def packed(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


def refused(
    target: str,
    operands: Sequence[Any],
    results: Sequence[Any],
    attributes: dict[str, Any],
    match: str,
) -> None:
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    call = jax.ffi.ffi_call(target, like)
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.block_until_ready(call(*operands, **attributes))


def encode(
    widths: int, results: Sequence[Any], pieces: Sequence[int], match: str
) -> None:
    attributes = {
        "leaves": 1,
        "has_momentum": False,
        "has_error": False,
        "has_variance": False,
        "relaxation": np.float32(1),
        "pieces": np.array(pieces, np.int64),
        "widths": np.array([widths]),
    }
    operands = [np.float32(0), floats(128)]
    refused("sfpo_sign_encode", operands, results, attributes, match)


@pytest.mark.parametrize("width", HUGE)
def test_bits_of_rows_that_overflow(width: int) -> None:
    # 32 rows of 2^59 bytes are none modulo 2^64.
    results = [packed(0), packed(0), floats(32)]
    encode(width, results, [0, 0, 128, 0, 0], "`signs` must have|multiples of 8")


@pytest.mark.parametrize("ranks", [*HUGE, 0, -1])
def test_ranks_that_overflow(ranks: int) -> None:
    operands = [packed(0), floats(0), packed(4, 8)]
    attributes = {
        "ranks": ranks,
        "has_error": False,
        "relaxation": np.float32(1),
        "widths": np.array([64]),
    }
    match = "each entry of each rank|must be positive"
    results = [packed(4, 8), floats(4)]
    refused("sfpo_sign_serve", operands, results, attributes, match)


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([0, 0, 64, 0, 0], "each entry of each leaf once"),
        ([0, 0, 128, 0, 1], "fill rows in order"),
        ([0, 0, 128, 0, 0, 0, 0, 64, 0, 2], "each entry of each leaf once"),
        ([0, 0, 64, 0, 0, 0, 64, 64, 0, 0], "fill rows in order"),
        ([0, 0, 64, 0, 0, 0, 32, 64, 0, 1], "each entry of each leaf once"),
    ],
)
def test_pieces_that_overlap_or_leave_a_gap(pieces: list[int], match: str) -> None:
    encode(64, [packed(3, 8), packed(3, 8), floats(3)], pieces, match)


@pytest.mark.parametrize("rows", [[2**62], [2**62] * 4, [2**63 - 1, 2], [-(2**63), 0]])
def test_rows_of_nothing_that_overflow(rows: list[int]) -> None:
    # XLA leaves out a call whose results are all empty: there is one row with an entry.
    one = np.ones(1, np.uint32)
    operands = [one, *(floats(0) for _ in rows), floats(1)]
    attributes = {
        "has_addend": False,
        "has_live": False,
        "rows": np.array([*rows, 1], np.int64),
    }
    match = "one number a row|must divide"
    results = [one, one, np.zeros(0, np.uint32)]
    refused("sfpo_magnitude_threshold", operands, results, attributes, match)


@pytest.mark.parametrize("leaves", [*HUGE, -1, 0])
@pytest.mark.parametrize("has_parameters", [False, True])
def test_leaves_that_are_not_there(leaves: int, has_parameters: bool) -> None:
    operands = [floats(8), np.zeros(2, np.uint32), np.bool(True), floats(1, 64)]
    attributes = {
        "leaves": leaves,
        "has_parameters": has_parameters,
        "narrow": leaves if has_parameters else 0,
        "is_stochastic": True,
        "is_decayed": np.zeros(1, np.int64),
        "widths": np.full(1, 64),
        "blocks": np.full(1, 64),
    }
    match = "there is no|`narrow` must|more arrays|random|each leaf"
    refused("sfpo_adamw8bit", operands, [floats(1, 64)], attributes, match)


@pytest.mark.parametrize(
    ("width", "block"), [(2**62, 64), (64, 2**62), (2**62, 2**62), (-64, 64), (0, 64)]
)
def test_blocks_that_are_not_there(width: int, block: int) -> None:
    codes = [np.zeros((1, 64), np.int8), floats(1, 1), packed(1, 64), floats(1, 1)]
    numbers = [floats(8), np.zeros(2, np.uint32), np.bool(True)]
    attributes = {
        "leaves": 1,
        "has_parameters": False,
        "narrow": 0,
        "is_stochastic": False,
        "is_decayed": np.zeros(1, np.int64),
        "widths": np.full(1, width),
        "blocks": np.full(1, block),
    }
    operands, results = [*numbers, floats(1, 64), *codes], [*codes, floats(1, 64)]
    refused("sfpo_adamw8bit", operands, results, attributes, "whole rows|from 1 to 256")
