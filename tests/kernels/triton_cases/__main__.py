"""Runs the named cases (default: all) and prints each error. Exit status 1: one is too large.

In Triton's interpreter, or with `--gpu` compiled on a GPU. A process of its own: Triton decides when a kernel is
decorated whether it is interpreted.
"""

from __future__ import annotations

import os
import sys
import time

ON_GPU = "--gpu" in sys.argv
os.environ["TRITON_INTERPRET"] = "0" if ON_GPU else "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic products ask for

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.triton_cases import attention, device, elementwise, lean, movement

CASES = {
    "decode_small": attention.decode_small,
    "decode_variants": attention.decode_variants,
    "decode_shapes": attention.decode_shapes,
    "decode_many_splits": attention.decode_many_splits,
    "prefill_small": attention.prefill_small,
    "prefill_variants": attention.prefill_variants,
    "prefill_shapes": attention.prefill_shapes,
    "prefill_many_sequences": attention.prefill_many_sequences,
    "divided_work": attention.divided_work,
    "fp8": attention.fp8,
    "fp8_pool": attention.fp8_pool,
    "fp8_damage": attention.fp8_damage,
    "bfloat16": attention.bfloat16,
    "random_batches": attention.random_batches,
    "store": movement.store,
    "store_small": movement.store_small,
    "store_fp8": movement.store_fp8,
    "fp8_bits": movement.fp8_bits,
    "pages": movement.pages,
    "norm": elementwise.norm,
    "rotary": elementwise.rotary,
    "silu": elementwise.silu,
    "lean": lean.lean,
}


def patch_dot() -> None:
    """The interpreter keeps bfloat16 as 16-bit integers and multiplies those: widen the operands of `tl.dot`."""
    original = interpreter.InterpreterBuilder.create_dot

    def widen(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        return original(builder, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = create_dot


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # also fills new memory with NaN
    if ON_GPU:
        device.use(torch.device("cuda", 0))
    else:
        patch_dot()
    bad = 0
    for name in names or CASES:
        began = time.process_time()
        outcomes = CASES[name]()
        for outcome in outcomes:
            bad += not outcome.is_good
            print(
                f"{'ok  ' if outcome.is_good else 'BAD '} {outcome.error:9.2e} <= {outcome.limit:.0e}  {outcome.label}"
            )
        print(f"     {name}: {len(outcomes)} comparisons, {time.process_time() - began:.1f} CPU-s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main([name for name in sys.argv[1:] if name != "--gpu"]))
