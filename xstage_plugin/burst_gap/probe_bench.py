"""Where probes run: all GPUs in one process. The calibration sees a bench and not how its GPUs are reached."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from xstage_plugin.burst_gap.probe import (
    Destination,
    ProbeDevice,
    ProbeResult,
    Traffic,
    local_copy_gbps,
    memcpy_peer_gbps,
    run_concurrent,
)
from xstage_plugin.burst_gap.probe_config import ProbeConfig
from xstage_plugin.burst_gap.topology import stores_to


class Bench(Protocol):
    """GPUs with memory to store to.

    Attributes:
        num_gpus: GPUs of the bench.
        num_sms: of one GPU.
        largest_burst_kib: what one producer can stage in shared memory (bulk stores).
        how: how the memory is reached, for the record.
        processes_per_gpu: processes of ours on each GPU.
    """

    num_gpus: int
    num_sms: int
    largest_burst_kib: float
    how: str
    processes_per_gpu: int

    def reserve(self, num_bytes: int) -> None:
        """Make ``num_bytes`` ready on each GPU for one source; called once, before the first run."""

    def run(self, config: ProbeConfig, topology: str) -> list[ProbeResult]:
        """One launch on each source of ``topology``, all at once, checked at every destination."""

    def copy_rates_gbps(self) -> dict[str, float]:
        """Rates of plain copies for comparison, GB/s: ``memcpy_peer`` and ``memcpy_local``."""

    def close(self) -> None:
        """Give the GPUs back."""


class OneProcessBench:
    """All GPUs of one host, driven by this process over CUDA peer access.

    Raises:
        GpuError: a GPU does not exist, or one of them cannot reach another's memory.
    """

    how = "one process, CUDA peer access"
    processes_per_gpu = 1

    def __init__(self, ordinals: Sequence[int]) -> None:
        self._devices: list[ProbeDevice] = []
        self._memory: list[Destination] = []
        try:
            for ordinal in ordinals:
                self._devices.append(ProbeDevice(ordinal))
            for device in self._devices:
                for peer in self._devices:
                    device.enable_peer_access(peer)
        except BaseException:
            self.close()
            raise
        self.num_gpus = len(self._devices)
        self.num_sms = min(device.num_sms for device in self._devices)
        self.largest_burst_kib = min(device.largest_staged_bytes for device in self._devices) / 1024

    def reserve(self, num_bytes: int) -> None:
        self._memory = [device.allocate(num_bytes * max(1, self.num_gpus - 1)) for device in self._devices]

    def run(self, config: ProbeConfig, topology: str) -> list[ProbeResult]:
        return run_concurrent(
            [
                Traffic(self._devices[source], tuple(self._memory[peer] for peer in peers), config)
                for source, peers in stores_to(topology, self.num_gpus)
            ]
        )

    def copy_rates_gbps(self) -> dict[str, float]:
        rates = {"memcpy_local": local_copy_gbps(self._devices[0])}
        if self.num_gpus > 1:
            rates["memcpy_peer"] = memcpy_peer_gbps(self._devices[0], self._devices[1])
        return rates

    def close(self) -> None:
        devices, self._devices, self._memory = self._devices, [], []
        for device in devices:
            device.close()

    def __enter__(self) -> OneProcessBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
