"""The rate at which a GPU's SMs really ran while something was timed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from xstage_plugin.burst_gap.nvrtc import CudaModule, compile_cuda

SOURCE = Path(__file__).with_name("sm_clock.cu")
SM_SLOTS = 1024  # SM numbers may have gaps


class SmClock:
    """Stamps of the SM clocks before (0) and after (1) what is put on the current stream in between.

    Args:
        device: this process's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        arch = f"--gpu-architecture=sm_{properties.major}{properties.minor}"
        self._module = CudaModule(compile_cuda(SOURCE.read_bytes(), SOURCE.name, (arch,)))
        self._blocks = 2 * properties.multi_processor_count  # so that no SM is left out
        self._stamps = torch.zeros(2, SM_SLOTS, 2, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Forget the stamps."""
        self._stamps.zero_()

    def mhz(self) -> float:
        """Cycles over time between the stamps, median over the SMs. Waits for the GPU."""
        stamps = self._stamps.cpu()
        seen = (stamps[..., 1] != 0).all(0)
        cycles, nanoseconds = (stamps[1] - stamps[0])[seen].double().unbind(1)
        return float((cycles / nanoseconds).median() * 1e3)

    def stamp(self, which: int) -> None:
        """Put stamp 0 or 1 on the current stream; takes about 2 us there."""
        stream = torch.cuda.current_stream().cuda_stream
        self._module.launch("stamp_clocks", self._blocks, 32, stream, ctypes.c_void_p(self._stamps[which].data_ptr()))
