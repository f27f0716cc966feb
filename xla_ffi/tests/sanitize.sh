#!/usr/bin/env bash
# The CPU kernels under the address, undefined-behaviour and thread sanitizers.
#
#     PYTHON=.venv/bin/python xla_ffi/tests/sanitize.sh [short|full]
#
# short: 45,000 inputs for the fuzzers that stand alone, 100 through JAX, and the thread test;
# 60,000 random calls on memory pools.
# full: 1,000,000 and 2,000, and the handlers under the thread sanitizer as well; 20,000,000.
set -euo pipefail
cd "$(dirname "$0")/../.."

mode=${1:-short}
PYTHON=${PYTHON:-python}
case $mode in
    # A row to select from is a hundred times as long as others, and is sorted.
    short) alone=(20000 5000 20000) through_jax=100 pool=(20000 3) pool_threads=2000 ;;
    full) alone=(600000 50000 350000) through_jax=2000 pool=(--full) pool_threads=200000 ;;
    *) echo "error: the argument must be short or full, got '$mode'" >&2; exit 2 ;;
esac
step() { printf '\n-- %s (%d s)\n' "$*" "$SECONDS"; }

# The tools are on the PATH, or beside the Python.
cmake=$(command -v cmake || true)
: "${cmake:=$(dirname "$PYTHON")/cmake}"
include=$("$PYTHON" -c 'import jax; print(jax.ffi.include_dir())')
build() { # folder sanitizers targets...
    "$cmake" -S xla_ffi -B "$1" -DSFPO_TESTS=ON -DSFPO_SANITIZE="$2" \
        -DSFPO_XLA_INCLUDE="$include" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 \
        >/dev/null
    "$cmake" --build "$1" --parallel "$(nproc)" --target "${@:3}" >/dev/null
}

step "build"
fuzzers=(fuzz_signs fuzz_select fuzz_adamw8bit)
pools=(pool_errors pool_heap pool_trace pool_properties pool_threads)
build build/asan address,undefined,float-cast-overflow sfpo_jax_cpu "${fuzzers[@]}" errors threads \
    "${pools[@]}"
thread_targets=(threads pool_threads)
if [ "$mode" = full ]; then thread_targets+=(sfpo_jax_cpu); fi
build build/tsan thread "${thread_targets[@]}"

step "alone"
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
build/asan/errors
build/asan/threads
for i in "${!fuzzers[@]}"; do "build/asan/${fuzzers[i]}" "${alone[i]}" & jobs[i]=$!; done
for job in "${jobs[@]}"; do wait "$job"; done
# Where addresses are too random for it, the thread sanitizer does not start.
fixed=()
if command -v setarch >/dev/null && setarch -R true 2>/dev/null; then fixed=(setarch -R); fi
"${fixed[@]}" build/tsan/threads

step "memory pool"
build/asan/memory_pool/pool_errors
build/asan/memory_pool/pool_heap
build/asan/memory_pool/pool_trace
build/asan/memory_pool/pool_properties "${pool[@]}"
# Where there are CUDA's headers, on a GPU's pages by an emulated driver.
driver=build/asan/memory_pool/libemulated_driver.so
[ ! -e "$driver" ] || build/asan/memory_pool/pool_properties 20000 3 "$driver"
build/asan/memory_pool/pool_threads "$pool_threads"
"${fixed[@]}" build/tsan/memory_pool/pool_threads "$pool_threads"

# A program that was not built with a sanitizer has it loaded first, and the C++ library,
# whose exceptions it must see. What JAX never frees is not ours.
loaded() { gcc -print-file-name="$1"; }
export JAX_PLATFORMS=cpu PYTHONPATH=$PWD
step "address, undefined: through JAX"
LD_PRELOAD="$(loaded libasan.so):$(loaded libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
    "$PYTHON" xla_ffi/tests/fuzz_jax.py --library build/asan/libsfpo_jax_cpu.so \
    --inputs "$through_jax"

if [ "$mode" = full ]; then
    step "thread: through JAX"
    LD_PRELOAD="$(loaded libtsan.so)" \
        TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1" \
        "${fixed[@]}" "$PYTHON" xla_ffi/tests/fuzz_jax.py \
        --library build/tsan/libsfpo_jax_cpu.so --inputs 400
fi
step "nothing wrong"
