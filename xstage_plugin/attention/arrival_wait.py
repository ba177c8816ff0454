"""Waits for arrival counters on a CUDA stream: ``arrival_wait.cu``, compiled at the first use. Needs no nvcc."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from xstage_plugin.bundled import bundled_folder
from xstage_plugin.burst_gap.nvrtc import CudaModule, compile_cuda

if TYPE_CHECKING:
    import torch

    from xstage_plugin.attention.arrivals import ArrivalBoard

SOURCE = "arrival_wait.cu"
MOST_THREADS, WARP = 1024, 32


def include_folder() -> Path:
    """Where ``arrival.cuh`` is, for compiling kernels of your own."""
    return bundled_folder("attention")


@functools.cache
def compile_wait(arch: str, output: str = "cubin") -> bytes:
    """The waiting kernel for ``arch`` ("sm_90"), as ``output`` ("cubin" or "ptx"). Needs no GPU.

    Raises:
        GpuError: no NVRTC here, or it refuses.
    """
    options = (f"--gpu-architecture={arch}", f"--include-path={include_folder()}")
    return compile_cuda(include_folder().joinpath(SOURCE).read_bytes(), SOURCE, options, output)


class StreamWait:
    """Puts the wait on the current stream of ``device``. Making it loads the kernel, which no capture allows.

    Raises:
        GpuError: no NVRTC here, or the driver refuses the kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = _loaded(device)

    def __call__(self, board: ArrivalBoard, blocks: range) -> None:
        """As :meth:`ArrivalBoard.take`."""
        import torch

        sequences = board.counters.shape[0]
        threads = min(MOST_THREADS, -(-sequences * len(blocks) // WARP) * WARP)
        numbers = (ctypes.c_uint32(number) for number in (sequences, blocks.start, len(blocks)))
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream().cuda_stream
            self._module.launch("xstage_take_blocks", 1, threads, stream, board.on_device(), *numbers)


@functools.cache
def _loaded(device: torch.device) -> CudaModule:
    import torch

    from xstage_plugin.attention.arrivals import DeviceArrivals

    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        module = CudaModule(compile_wait(f"sm_{major}{minor}"))
        # A first launch loads the code, which waits for what runs: not while a peer waits for this rank.
        module.launch("xstage_take_blocks", 1, WARP, stream, DeviceArrivals(), *(ctypes.c_uint32(0) for _ in range(3)))
        torch.cuda.synchronize()
    return module
