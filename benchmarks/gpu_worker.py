"""What the GPU workers of the A/B scripts share: the group, the meeting before a sample, rates, the end of the process."""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist
from harness import serve
from sm_clock import SmClock

COPY_BYTES = 2**31
SLEEP_CYCLES = 1_000_000  # about 0.5 ms: longer than the launches of any rank take
DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class GpuWorker:
    """One process on one GPU in a process group of its own. Steps are collectives over the workers of a family."""

    def join(self, rank: int, ranks: int, local_rank: int, port: int, timeout_s: float) -> None:
        """Enter the group; every wait in it ends after ``timeout_s``."""
        self.rank, self.ranks = rank, ranks
        self.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.device)
        wait = datetime.timedelta(seconds=timeout_s)
        # A store of our own: under torchrun, init_process_group would look for the agent's.
        store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=wait)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=wait, device_id=self.device)
        self.token = torch.zeros(1, device=self.device)
        self._clock: SmClock | None = None

    def meet(self) -> None:
        """All ranks on the host, with nothing left on their devices."""
        dist.barrier()
        torch.cuda.synchronize()

    def event_us(self, launch: Callable[[], object]) -> float:
        """Event time on this rank of what ``launch`` puts on the stream, microseconds.

        All ranks meet on the host, then a sleep on the device hides the launches, a tiny all-reduce lets the ranks meet on
        their devices, and CUDA events stand around the work.
        """
        self.meet()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(self.token)
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end) * 1e3)

    def clocked_us(self, launch: Callable[[], object]) -> tuple[float, float]:
        """:meth:`event_us`, and the mean SM clock meanwhile in MHz. The events stand outside of the clock's stamps."""
        if self._clock is None:
            self._clock = SmClock(self.device)
        clock = self._clock
        clock.clear()

        def stamped() -> None:
            clock.stamp(0)
            launch()
            clock.stamp(1)

        return self.event_us(stamped), clock.mhz()

    def load_state(self) -> dict[str, object]:
        """What this GPU draws and what holds its clock back, now: ask while it works. Empty where NVML cannot say."""
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
            reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            return {
                "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "power_w": round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
                "power_limit_w": round(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
                "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                "held_by_power_limit": bool(reasons & pynvml.nvmlClocksEventReasonSwPowerCap),
                "held_by_temperature": bool(reasons & pynvml.nvmlClocksEventReasonSwThermalSlowdown),
            }
        except Exception:  # not installed, not permitted, another version: none of it stops a measurement
            return {}

    def best_us(self, step: Callable[[], object]) -> float:
        """The least of 10 timed calls after 3 others, this rank by itself."""
        best = float("inf")
        for number in range(13):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            if number >= 3:
                best = min(best, begin.elapsed_time(end) * 1e3)
        return best

    def copy_gbps(self) -> float:
        """Bytes read and written by a copy within this GPU's memory, GB/s."""
        halves = torch.empty(2, COPY_BYTES, dtype=torch.uint8, device=self.device)
        return 2 * COPY_BYTES / self.best_us(lambda: halves[0].copy_(halves[1])) / 1e3

    def matrix_tflops(self) -> float:
        """bfloat16 products of 8192 x 8192 x 8192, TFLOP/s."""
        n = 8192
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * n**3 / self.best_us(lambda: a @ b.t()) / 1e6


def work(handler: object) -> NoReturn:
    """Answer the parent's steps until it says close or is gone."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, 9)
    serve(handler, int(sys.argv[-1]))
    sys.stdout.flush()
    os._exit(0)  # a library that waits for a peer at exit must not keep the GPU
