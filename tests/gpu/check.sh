#!/usr/bin/env bash
# For a machine with one GPU, torch and Triton installed; downloads nothing, ends within five minutes.
# Every kernel against float64, then speeds: decode attention by copy bandwidth, prefill attention by torch's. Table last.
#   PYTHON=python3 tests/gpu/check.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
paths=$(mktemp -d)
trap 'rm -rf "$paths"' EXIT
# The package is importable without an installation, and the folder kernels/ does not hide another package.
export PYTHONPATH="$PWD/src:$PWD" OMP_NUM_THREADS=2 TRITON_CACHE_DIR="$paths/cache"

groups=(
    "decode_variants decode_many_splits"
    "prefill_variants bfloat16 divided_work"
    "fp8 fp8_bits store_small store_fp8"
    "decode_small prefill_small pages norm rotary silu"
)
pids=()
for i in "${!groups[@]}"; do
    # shellcheck disable=SC2086 # words on purpose
    timeout 170 "$python" -m tests.kernels.triton_cases --gpu ${groups[$i]} >"$paths/$i.log" 2>&1 &
    pids+=($!)
done
status=0
for i in "${!groups[@]}"; do
    wait "${pids[$i]}" || { status=1 && echo "FAILED: ${groups[$i]}"; }
    cat "$paths/$i.log"
done
timeout 120 "$python" -m tests.gpu.speed || status=1
exit "$status"
