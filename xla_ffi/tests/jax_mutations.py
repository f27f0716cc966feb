"""Calls made wrong: a mutation of one that fits, and whether it must be refused."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax_programs import Call

Rng = np.random.Generator
EXTREMES = [-1, 0, 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, -(2**63), -(2**62)]
# No handler takes any of these.
WRONG_DTYPES = [np.int16, np.int32, np.complex64]
# Arrays whose entries may be any numbers, or grow by one without another block or row.
FREE = {"is_decayed", "relaxation", "blocks"}


class Mutation(NamedTuple):
    text: str
    call: Call
    must_fail: bool


def mutate(call: Call, rng: Rng) -> Mutation:
    """The call with one thing changed."""
    kinds: list[Callable[[Call, Rng], Mutation]] = [
        _wrong_dtype,
        _wrong_size,
        _one_operand_less,
        _one_operand_more,
        _wrong_result,
        _one_result_less,
        _one_attribute_less,
        _attribute_of_another_type,
        _torn_attribute,
        *([_extreme_attribute] * 6),
    ]
    return kinds[rng.integers(len(kinds))](call, rng)


def _place(rng: Rng, things: Any) -> int:
    return int(rng.integers(len(things)))


def _with(things: Any, place: int, thing: Any) -> list[Any]:
    return [thing if i == place else x for i, x in enumerate(things)]


def _is_elastic(call: Call) -> bool:
    """Whether an array may have another size, its rows another width."""
    return call.target == "sfpo_magnitude_threshold"


def _wrong_dtype(call: Call, rng: Rng) -> Mutation:
    i, dtype = _place(rng, call.operands), WRONG_DTYPES[_place(rng, WRONG_DTYPES)]
    operands = _with(call.operands, i, np.zeros(call.operands[i].shape, dtype))
    text = f"operand {i} of {np.dtype(dtype)}"
    return Mutation(text, call._replace(operands=operands, aliases={}), True)


def _wrong_size(call: Call, rng: Rng) -> Mutation:
    i = _place(rng, call.operands)
    flat = np.ravel(call.operands[i])
    size = int(rng.choice([0, flat.size - 1, flat.size + 1, 2 * flat.size]))
    operands = _with(call.operands, i, np.resize(flat, size))
    changed = call._replace(operands=operands, aliases={})
    must_fail = size != flat.size and (i == 0 or not _is_elastic(call))
    return Mutation(f"operand {i} of {size} entries", changed, must_fail)


def _one_operand_less(call: Call, rng: Rng) -> Mutation:
    i = _place(rng, call.operands)
    operands = call.operands[:i] + call.operands[i + 1 :]
    changed = call._replace(operands=operands, aliases={})
    return Mutation(f"without operand {i}", changed, True)


def _one_operand_more(call: Call, rng: Rng) -> Mutation:
    i = _place(rng, call.operands)
    operands = [*call.operands, call.operands[i]]
    return Mutation(f"operand {i} twice", call._replace(operands=operands), True)


def _wrong_result(call: Call, rng: Rng) -> Mutation:
    i = _place(rng, call.results)
    shape, dtype = call.results[i]
    size = int(np.prod(shape))
    if rng.random() < 0.5:
        changed = (size + int(rng.choice([-1, 1, size + 1])),), dtype
    else:
        changed = shape, WRONG_DTYPES[_place(rng, WRONG_DTYPES)]
    results = _with(call.results, i, changed)
    text = f"result {i} as {changed}"
    # XLA leaves out a call whose results are all empty.
    must_fail = any(np.prod(shape) for shape, _ in results)
    return Mutation(text, call._replace(results=results, aliases={}), must_fail)


def _one_result_less(call: Call, rng: Rng) -> Mutation:
    i = _place(rng, call.results)
    results = call.results[:i] + call.results[i + 1 :]
    changed = call._replace(results=results, aliases={})
    return Mutation(f"without result {i}", changed, bool(results))


def _one_attribute_less(call: Call, rng: Rng) -> Mutation:
    name = _name(call, rng)
    left = {k: v for k, v in call.attributes.items() if k != name}
    return Mutation(f"without `{name}`", call._replace(attributes=left), True)


def _attribute_of_another_type(call: Call, rng: Rng) -> Mutation:
    name = _name(call, rng)
    value: Any = np.array([1, 2], np.int32)
    if rng.random() < 0.5:
        value = "text"
    return _changed(call, name, value, True)


def _torn_attribute(call: Call, rng: Rng) -> Mutation:
    """An array without its last number, or with one more."""
    names = [k for k, v in call.attributes.items() if isinstance(v, np.ndarray)]
    if not names:
        return _one_attribute_less(call, rng)
    name = names[_place(rng, names)]
    value = call.attributes[name]
    torn = value[:-1] if rng.random() < 0.5 else np.append(value, value[-1:])
    return _changed(call, name, torn, True)


def _extreme_attribute(call: Call, rng: Rng) -> Mutation:
    name = _name(call, rng)
    value = call.attributes[name]
    if isinstance(value, bool):
        return _changed(call, name, not value, True)
    if isinstance(value, np.floating):
        special = rng.choice([np.nan, np.inf, -1.0, 3e38, 1e-45])
        return _changed(call, name, np.float32(special), False)
    number = EXTREMES[_place(rng, EXTREMES)]
    if isinstance(value, np.ndarray):
        i = _place(rng, value)
        if rng.random() < 0.3:
            number = int(value[i]) + 1
        changed = np.array(_with(value.tolist(), i, number), np.int64)
        must_fail = name not in FREE and number != value[i]
        return _changed(call, name, changed, must_fail)
    return _changed(call, name, number, number != value)


def _name(call: Call, rng: Rng) -> str:
    names = sorted(call.attributes)
    return names[_place(rng, names)]


def _changed(call: Call, name: str, value: Any, must_fail: bool) -> Mutation:
    attributes = {**call.attributes, name: value}
    text = f"`{name}` = {value!r}"
    return Mutation(text, call._replace(attributes=attributes), must_fail)
