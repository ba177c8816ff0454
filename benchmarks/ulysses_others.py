"""Other libraries' exchange of attention's output, as arms of ab_ulysses.py. Imported only where the arm is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness import one_line

from xstage_plugin.attention.agreement import gather

if TYPE_CHECKING:
    import torch

PROBE_BYTES = 1024


class Flashinfer:
    """flashinfer-python's UlyssesCommunicator over NVLink; it compiles its kernel at the first use (nvcc and ninja).

    One call copies ``scratch`` into a buffer that the peers map, and each rank pulls its rows from there into ``out``, heads
    in order of the ranks. Between two barriers on the device; nothing waits on the host, so a CUDA graph can hold it.
    Collective. On every rank RuntimeError if flashinfer cannot use NVLink between the ranks.

    Args:
        group: the ranks, over NCCL: 2, 4, 6 or 8 on one host, NVLink between any two.
        scratch: [B, S, h, d], contiguous, float16, bfloat16 or float32, below 2**31 elements: this rank's heads.
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
        """Collective, after the graphs that hold calls are gone."""
        self._communicator.close()

    @staticmethod
    def refusal() -> str:
        """Why it cannot be used here, in one line; empty if it can. Collective over all ranks; compiles."""
        import torch

        fault = ""
        try:
            from flashinfer.comm import UlyssesCommunicator
        except Exception as error:  # importing it runs much code of other libraries, whose versions may not fit
            fault = f"flashinfer cannot be imported ({one_line(error)}); install flashinfer-python"
        # No rank may enter the constructor, which is collective, while another cannot.
        if fault := next(filter(None, gather(None, fault)), ""):
            return fault
        try:  # what it demands of ranks, links and compiler is its own to say, and it says the same on every rank
            UlyssesCommunicator(max_bytes=PROBE_BYTES, dtype=torch.bfloat16, backend="nvlink").close()
        except (RuntimeError, ValueError) as error:
            return f"flashinfer refuses ({one_line(error)}); run 2, 4, 6 or 8 ranks on one host with NVLink, nvcc and ninja"
        return ""
