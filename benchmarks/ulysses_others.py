"""Other libraries' exchange of attention's output, as arms of ab_ulysses.py. Imported only where the arm is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness import one_line

if TYPE_CHECKING:
    import torch


class Flashinfer:
    """flashinfer-python's UlyssesCommunicator over NVLink; it compiles its kernel at the first use (nvcc and ninja).

    Args:
        group: the ranks, over NCCL.
        scratch: [B, S, h, d], contiguous: attention's output of this rank's heads.
        out: [B, S / P, P h, d], contiguous.
    """

    def __init__(self, group: Any, scratch: torch.Tensor, out: torch.Tensor) -> None:
        from flashinfer.comm import UlyssesCommunicator

        self._scratch, self._out = scratch, out
        self._communicator = UlyssesCommunicator(
            group, max_bytes=scratch.nbytes, dtype=scratch.dtype, backend="nvlink", device=scratch.device
        )

    def __call__(self) -> None:
        self._communicator.gather_heads(self._scratch, out=self._out)

    def close(self) -> None:
        """Collective."""
        self._communicator.close()

    @staticmethod
    def refusal() -> str:
        """Why it cannot be used here, in one line; empty if it can be imported."""
        try:
            from flashinfer.comm import UlyssesCommunicator  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            return f"flashinfer cannot be imported ({one_line(error)}); install flashinfer-python"
        return ""
