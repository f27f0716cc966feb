"""Every handler through JAX: what fits against its twin, what does not is an exception.

    python xla_ffi/tests/fuzz_jax.py --library build/asan/libsfpo_jax_cpu.so \
        --inputs 2000

`sanitize.sh` builds that library, and has what a sanitizer needs in the environment. A
sanitizer ends the process at the first fault: `--verbose` then names the input, which
depends on `--seed` alone.
"""

import argparse
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax_mutations import Mutation, mutate
from jax_programs import Call, Program, programs

from sfpo_jax.kernels import _library, native_platforms

Rng = np.random.Generator
# Bytes of moments that differ by one, of all: rounding is at random, and contracted.
MOST_UNEQUAL = 0.01


class Failure(Exception):
    """A kernel is wrong."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, help="default: the installed one")
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="name each input")
    options = parser.parse_args()
    if options.library:
        _use(options.library)
    os.environ["SFPO_JAX_FFI"] = "require"
    if "cpu" not in native_platforms():
        raise Failure("the native kernels are not in use")
    began, fuzzer = time.monotonic(), Fuzzer(options.inputs, options.seed)
    for number in range(options.inputs):
        text = fuzzer.step(number, options.verbose)
        fuzzer.seen[text] += 1
    seconds = time.monotonic() - began
    found = ", ".join(f"{count} {text}" for text, count in fuzzer.seen.most_common())
    print(
        f"fuzz_jax: {options.inputs} inputs, nothing wrong in {seconds:.0f} s: {found}"
    )


def _use(path: Path) -> None:
    """Has the loader find this library in place of the installed one."""
    path = path.resolve(strict=True)
    name = _library._file_name("cpu")
    _library.find_library = lambda wanted: path if wanted == name else None


class Fuzzer:
    """Half of the inputs fit, half do not; the same for each seed."""

    def __init__(self, inputs: int, seed: int) -> None:
        # Compiling is what takes time: few inputs have few programs.
        variants = min(4, max(1, inputs // 100))
        self.programs = programs(variants)
        self.rng = np.random.default_rng(seed)
        self.compiled: dict[int, tuple[Any, Any]] = {}
        self.calls: dict[int, Call] = {}
        self.seen: Counter[str] = Counter()

    def step(self, number: int, is_verbose: bool) -> str:
        targets = sorted(self.programs)
        target = targets[number // 2 % len(targets)]
        variants = self.programs[target]
        program = variants[self.rng.integers(len(variants))]
        if number % 2 == 0:
            if is_verbose:
                print(number, target, "valid", flush=True)
            self._compare(program)
            return "as the twin"
        if id(program) not in self.calls:
            self.calls[id(program)] = program.record(self.rng)
        mutation = mutate(self.calls[id(program)], self.rng)
        if is_verbose:
            print(number, target, mutation.text, flush=True)
        return _refuse(mutation)

    def _compare(self, program: Program) -> None:
        if id(program) not in self.compiled:
            self.compiled[id(program)] = program.compiled()
        arguments = program.draw(self.rng)
        found, wanted = (fn(*arguments) for fn in self.compiled[id(program)])
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        for place, ((x, y), tolerance) in enumerate(
            zip(pairs, program.tolerances(wanted), strict=True)
        ):
            if problem := _difference(np.asarray(x), np.asarray(y), tolerance):
                raise Failure(f"{program.target}, array {place}: {problem}")


def _difference(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> str:
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{found.dtype}{found.shape} for {wanted.dtype}{wanted.shape}"
    if tolerance == 0:
        return "" if found.tobytes() == wanted.tobytes() else "other bits"
    if found.dtype in (np.int8, np.uint8):
        distance = np.abs(found.astype(int) - wanted)
        is_near = distance.max(initial=0) <= 1 and np.mean(distance) <= MOST_UNEQUAL
    else:
        wide = wanted.astype(np.float64)
        distance = np.abs(found.astype(np.float64) - wide)
        is_near = (distance <= tolerance * (1 + np.abs(wide).max(initial=0))).all()
    return "" if is_near else f"off by up to {distance.max()}"


def _refuse(mutation: Mutation) -> str:
    call = mutation.call
    types = [jax.ShapeDtypeStruct(*result) for result in call.results]
    try:
        run = jax.ffi.ffi_call(call.target, types, input_output_aliases=call.aliases)
        jax.block_until_ready(run(*call.operands, **call.attributes))
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # JAX has both
        if "INVALID_ARGUMENT" not in str(error):
            raise
        return "refused"
    if mutation.must_fail:
        raise Failure(f"{call.target} takes {mutation.text}")
    return "changed but fitting"


if __name__ == "__main__":
    main()
