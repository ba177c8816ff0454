"""The output projection of an attention layer as a consumer: a product for each part of the rows, as they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xstage_plugin.checks import not_negative_int, positive_int
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch


class OutputProjection:
    """y = rows weight^T + bias into memory taken once; give it as ``consume=``.

    ``result`` is complete, in stream order, when the attention call has returned, until the next one. Parts are products of
    fewer rows, for which cuBLAS may choose another kernel: the last bits may depend on the number of parts. Forward only.

    Args:
        weight: [out, H d], as of ``torch.nn.Linear``.
        bias: [out].
        batch, rows: of this rank's output, B and S_local.

    Attributes:
        result: [B, S_local, out], of the weight's type; NaN in rows that no call has given yet.

    Raises:
        InvalidInputError: weight or bias is of another shape, or the bias of another type or device.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, batch: int, rows: int) -> None:
        import torch

        if weight.dim() != 2:
            raise InvalidInputError(f"weight is {tuple(weight.shape)}; expected [out, heads * head_dim]")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InvalidInputError(
                f"bias is {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}, one entry a row of weight"
            )
        if bias is not None and (bias.dtype, bias.device) != (weight.dtype, weight.device):
            raise InvalidInputError(
                f"bias is {bias.dtype} on {bias.device}; expected {weight.dtype} on {weight.device}, as weight"
            )
        self._weight, self._bias = weight.detach().t(), None if bias is None else bias.detach()
        with torch.inference_mode(False):
            shape = (positive_int("batch", batch), not_negative_int("rows", rows), weight.shape[0])
            self.result = torch.full(shape, float("nan"), dtype=weight.dtype, device=weight.device)

    def __call__(self, rows: torch.Tensor, first_row: int) -> None:
        """Rows ``first_row`` to ``first_row + n - 1`` of ``result``, from rows [B, n, H, d].

        Raises:
            InvalidInputError: the rows do not fit.
        """
        import torch

        if (rows.dtype, rows.device) != (self.result.dtype, self.result.device):
            raise InvalidInputError(
                f"rows are {rows.dtype} on {rows.device}; expected {self.result.dtype} on {self.result.device}, as weight"
            )
        batch, count, heads, head_dim = rows.shape
        result = self.result[:, first_row : first_row + count]
        if (batch, heads * head_dim) != (result.shape[0], self._weight.shape[0]) or count != result.shape[1]:
            raise InvalidInputError(
                f"rows are {tuple(rows.shape)} from row {first_row}; expected [{self.result.shape[0]}, n, heads, d] "
                f"within {self.result.shape[1]} rows, {self._weight.shape[0]} elements a row"
            )
        # A sequence at a time: parts of several sequences are no matrix without a copy.
        for sequence, out in zip(rows.flatten(2), result, strict=True):
            if self._bias is None:
                torch.mm(sequence, self._weight, out=out)
            else:
                torch.addmm(self._bias, sequence, self._weight, out=out)


def projected(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same of complete rows [B, S_local, H, d] by torch's own function, the reference: [B, S_local, out]."""
    import torch

    return torch.nn.functional.linear(rows.flatten(2), weight, bias)
