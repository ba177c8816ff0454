"""Attention kernels whose output tiles announce their arrival, and the names under which they are asked for."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Protocol

from xstage_plugin.attention.backends import AttentionBackend
from xstage_plugin.checks import positive_int
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

# Not among what "auto" looks at: without a consumer they gain nothing.
ARRIVING = {
    "fa4-arrival": ("xstage_plugin.attention.fa4_arrival", "FlashAttention4Arrival"),
    "fa3-arrival": ("xstage_plugin.attention.fa3_arrival", "FlashAttention3Arrival"),
}


class ArrivingBackend(AttentionBackend, Protocol):
    """An attention kernel that raises a counter for every tile that it has stored.

    Attributes:
        awaits_rows: ``announce`` takes ``awaits``.
        longest_keys: with longer keys announcing costs more than a closing barrier; None: never.
    """

    awaits_rows: bool
    longest_keys: int | None

    def block_rows(self, head_dim: int, dtype: torch.dtype, causal: bool) -> int:
        """Rows of one output tile."""

    def announce(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        arrivals: torch.Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        awaits: torch.Tensor | None = None,
        expected: int = 0,
    ) -> None:
        """As a call; and for every tile (m, h, b) that is complete in ``out``, ``arrivals[b, h, m * block_rows]`` grows by 1.

        Args:
            q, k, v, out, softmax_scale, causal: as a call's.
            arrivals: int32 [b, h, rows], innermost stride 1, other strides as they come (0 too). Raised as a release at
                system scope.
            awaits: this rank's own counters, int32 [B, local rows]: when its tiles are out the kernel waits until each row
                block of them counts ``expected`` tiles, and clears them. What follows on the stream sees the rows.
            expected: tiles of a block.
        """


def block_rows_of(backend: Any, head_dim: int, dtype: torch.dtype, causal: bool, keys: int) -> int | None:
    """Rows of a block that ``backend`` announces under ``keys`` keys; None where it cannot, or where it does not pay."""
    if not hasattr(backend, "announce"):
        return None
    longest = getattr(backend, "longest_keys", None)
    if longest is not None and keys > longest:
        return None
    if not hasattr(backend, "block_rows"):
        raise InvalidInputError(f"backend {backend.name} announces tiles and has no block_rows; expected an ArrivingBackend")
    return positive_int(f"block_rows of {backend.name}", backend.block_rows(head_dim, dtype, causal))


def awaits_rows(backend: Any) -> bool:
    """Whether ``backend`` can itself wait for this rank's rows."""
    return bool(getattr(backend, "awaits_rows", False))


@functools.cache
def arriving_backend(name: str, always: bool = False) -> ArrivingBackend:
    """The kernel of this name (of ``ARRIVING``), the same object every time: it keeps what it compiled.

    ``always``: it announces also where a closing barrier is faster; for measurements.
    """
    module, kind = ARRIVING[name]
    made: ArrivingBackend = getattr(importlib.import_module(module), kind)()
    if always:
        made.longest_keys = None
    return made


def require_counters(out: tuple[int, ...], kv_rows: int, arrivals: tuple[int, ...], dtype: str, stride: int) -> None:
    """Raise InvalidInputError unless counters of this shape, type and innermost stride fit an output [b, rows, h, d]."""
    batch, rows, heads, _ = out
    if arrivals != (batch, heads, rows) or dtype != "torch.int32" or (stride != 1 and rows > 1):
        raise InvalidInputError(
            f"arrivals are {dtype} {list(arrivals)} with innermost stride {stride}; expected torch.int32 "
            f"{[batch, heads, rows]} (b, h, rows of the output) with stride 1"
        )
    if not kv_rows:
        raise InvalidInputError("keys and values have no rows; expected at least 1: no tile would be computed, none announced")


def require_awaited(q: tuple[int, ...], awaits: tuple[int, ...], dtype: str, stride: int, expected: int) -> None:
    """Raise InvalidInputError unless a launch on q of this shape can wait for counters of this shape, type and stride."""
    if len(awaits) != 2 or dtype != "torch.int32" or 0 in awaits or (stride != 1 and awaits[1] > 1):
        raise InvalidInputError(
            f"awaits are {dtype} {list(awaits)} with innermost stride {stride}; expected torch.int32 [sequences, rows], both "
            "at least 1, with stride 1"
        )
    if expected < 1:
        raise InvalidInputError(f"expected is {expected}; expected the count of a row block that has arrived, from 1 on")
    if 0 in q:
        raise InvalidInputError(f"q is {list(q)}; expected a row to compute, as without one no kernel would run and wait")
