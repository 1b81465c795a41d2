#!/usr/bin/env bash
# For a machine with one GPU, torch, Triton and transformers installed; downloads nothing, ends within five minutes.
# Every kernel against float64, and a hand-off between two processes against transformers; then speeds: steps with and
# without CUDA graphs, decode attention by copy bandwidth, prefill attention by torch's. Tables last.
#   PYTHON=python3 tests/gpu/check.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
paths=$(mktemp -d)
trap 'rm -rf "$paths"' EXIT
# Importable without an installation. Not by the path of this checkout: its folders kernels/, core/ ... would hide
# installed packages of these names.
ln -s "$PWD/tests" "$paths/tests"
export PYTHONPATH="$PWD/src:$paths" PYTHONSAFEPATH=1
export OMP_NUM_THREADS=2 TRITON_CACHE_DIR="$paths/cache" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

parts=(
    "tests.kernels.triton_cases --gpu decode_variants decode_many_splits"
    "tests.kernels.triton_cases --gpu prefill_variants divided_work"
    "tests.kernels.triton_cases --gpu bfloat16 fp8 fp8_pool fp8_damage fp8_bits store_small store_fp8"
    "tests.kernels.triton_cases --gpu decode_small prefill_small pages norm rotary silu"
    "tests.gpu.engine pair"
)
pids=()
for i in "${!parts[@]}"; do
    # shellcheck disable=SC2086 # words on purpose
    timeout -k 5 125 "$python" -m ${parts[$i]} >"$paths/$i.log" 2>&1 &
    pids+=($!)
done
failed=()
for i in "${!parts[@]}"; do
    wait "${pids[$i]}" || failed+=("${parts[$i]}")
    cat "$paths/$i.log"
done
# Alone on the GPU, one after the other: these are timed.
timeout -k 5 70 "$python" -m tests.gpu.engine steps || failed+=("tests.gpu.engine steps")
timeout -k 5 90 "$python" -m tests.gpu.speed || failed+=("tests.gpu.speed")
for part in "${failed[@]}"; do
    echo "FAILED: $part"
done
[ ${#failed[@]} -eq 0 ]
