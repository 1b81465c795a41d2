#!/usr/bin/env bash
# For a machine with one GPU, torch, Triton and transformers installed, and what Triton needs: a C compiler and Python's
# headers. Downloads nothing, ends within five minutes.
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
export PYTHONUNBUFFERED=1 # what a part has said when its time is over is told
export OMP_NUM_THREADS=2 TRITON_CACHE_DIR="$paths/cache" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
unset TRITON_INTERPRET

parts=(
    "tests.kernels.triton_cases --gpu decode_variants decode_many_splits"
    "tests.kernels.triton_cases --gpu prefill_variants divided_work"
    "tests.kernels.triton_cases --gpu bfloat16 fp8 fp8_pool fp8_damage fp8_bits store_small store_fp8"
    "tests.kernels.triton_cases --gpu decode_small prefill_small pages norm rotary silu lean"
    "tests.gpu.engine pair"
)
pids=()
for i in "${!parts[@]}"; do
    # shellcheck disable=SC2086 # words on purpose
    timeout -k 5 120 "$python" -m ${parts[$i]} >"$paths/$i.log" 2>&1 &
    pids+=($!)
done
failed=0
check() { # STATUS PART
    [ "$1" -eq 0 ] || { failed=1 && echo "FAILED: $2 (status $1; 124: out of time)"; }
}
for i in "${!parts[@]}"; do
    wait "${pids[$i]}"
    status=$?
    cat "$paths/$i.log"
    check $status "${parts[$i]}"
done
# Alone on the GPU, one after the other: these are timed.
timeout -k 5 80 "$python" -m tests.gpu.engine steps 2>&1
check $? "tests.gpu.engine steps"
timeout -k 5 90 "$python" -m tests.gpu.speed 2>&1
check $? "tests.gpu.speed"
exit $failed
