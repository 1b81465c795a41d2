"""Linears over weights that are packed once, compiled; fp32 activations, weights in fp32 or int8.

The structure and the packing are those of `csrc/linear.h`, `csrc/linear.c`, `csrc/linear_int8.c` and `csrc/pack.c`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pdserve.kernels.cpu import library

_COLUMNS = 16
_GROUP = 64


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weights", "scales", "workspace", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("num_rows", "in", "out", "x_stride", "y_stride")),
    ]


class PackedLinear:
    """`x [..., in] -> [..., out]`; a row's bits do not depend on the other rows.

    Attributes:
        num_bytes: Bytes of the packed weights.
        num_in: Width of what goes in.
        num_out: Width of what comes out.
        workspace_per_row: Bytes of memory to work in, for each row.
        pointers: Of weights, scales and bias.
    """

    def __init__(self, panels: Tensor, scales: Tensor | None, bias: Tensor | None, num_in: int, num_out: int) -> None:
        """See `pack` and `pack_int8`."""
        self._panels = panels
        self._scales = scales
        self._bias = bias
        self.num_in, self.num_out = num_in, num_out
        self._weights = panels.data_ptr(), None if scales is None else scales.data_ptr()
        self._bias_pointer = None if bias is None else bias.data_ptr()
        self.workspace_per_row = 0 if scales is None else scales.shape[1] * (2 * _GROUP + 4)
        self._function = library.load().pdserve_linear
        self.pointers = *self._weights, self._bias_pointer
        self.num_bytes = panels.nbytes + (0 if scales is None else scales.nbytes)

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Packs weights as they are.

        Args:
            weight: `[out, in]` float32; not kept.
            bias: `[out]` float32.

        Raises:
            ValueError: Types or shapes do not fit.
            Unavailable: There are no compiled kernels here.
        """
        _check(weight, bias)
        panels = weight.new_empty(-(-weight.shape[0] // _COLUMNS), weight.shape[1], _COLUMNS)
        _pack(weight, panels, None)
        return cls(panels, None, _contiguous(bias), weight.shape[1], weight.shape[0])

    @classmethod
    def pack_int8(cls, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Packs weights as int8, each 64 along `in` with a scale of their own; arguments and errors as in `pack`.

        Activations are rounded to 16 bits, each 64 of a row with a scale of their own.
        """
        _check(weight, bias)
        num_out, num_in = weight.shape
        num_panels, num_groups = -(-num_out // _COLUMNS), -(-num_in // _GROUP)
        panels = weight.new_empty(num_panels, num_groups * _GROUP // 2, _COLUMNS, 2, dtype=torch.int8)
        scales = weight.new_empty(num_panels, num_groups, _COLUMNS)
        _pack(weight, panels, scales)
        return cls(panels, scales, _contiguous(bias), num_in, num_out)

    def __call__(self, x: Tensor) -> Tensor:
        """The product.

        Args:
            x: `[..., in]` float32.

        Raises:
            ValueError: Another width or type, or not on the CPU.
        """
        if not x.is_cpu or x.dtype is not torch.float32 or x.shape[-1] != self.num_in:
            raise ValueError(
                f"a linear on the CPU over {self.num_in} float32 got {x.shape[-1]} {x.dtype} on {x.device}"
            )
        rows = x.reshape(-1, self.num_in)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = x.new_empty(*x.shape[:-1], self.num_out)
        workspace = x.new_empty(rows.shape[0] * self.workspace_per_row, dtype=torch.uint8)
        arguments = _Linear(
            rows.data_ptr(), *self._weights, workspace.data_ptr(), self._bias_pointer, y.data_ptr(),
            rows.shape[0], self.num_in, self.num_out, rows.stride(0), self.num_out,
        )  # fmt: skip
        self._function(ctypes.byref(arguments))
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, as an embedding that shares it reads them.

        Args:
            indices: `[num_rows]` int64, below `out`.

        Returns:
            `[num_rows, in]` float32.

        Raises:
            IndexError: There is no such row.
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_out:
            raise IndexError(f"rows must be below {self.num_out}, those of the weight")
        at = indices // _COLUMNS, indices % _COLUMNS
        if self._scales is None:
            return self._panels[at[0], :, at[1]]
        rows = self._panels[at[0], :, at[1]].flatten(1)
        scales = self._scales[at[0], :, at[1]].repeat_interleave(_GROUP, dim=1)
        return (rows * scales)[:, : self.num_in]


def _contiguous(bias: Tensor | None) -> Tensor | None:
    """What keeps the memory that C reads: a parameter itself may get other data (`module.to`)."""
    return None if bias is None else bias.detach().contiguous()


def _check(weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or weight.dtype is not torch.float32 or not weight.numel() or weight.device.type != "cpu":
        raise ValueError(
            "weights to pack must be float32 [out, in] on the CPU, "
            f"not {weight.dtype} {tuple(weight.shape)} on {weight.device}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not torch.float32 or not bias.is_cpu):
        raise ValueError(
            f"the bias of weights {tuple(weight.shape)} must be float32 [out] on the CPU, "
            f"not {bias.dtype} {tuple(bias.shape)} on {bias.device}"
        )


def _pack(weight: Tensor, panels: Tensor, scales: Tensor | None) -> None:
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    sizes = (ctypes.c_int64(n) for n in (*weight.shape, weight.stride(0)))
    to = (None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (panels, scales))
    library.load().pdserve_pack(ctypes.c_void_p(weight.data_ptr()), *sizes, *to)
