"""Where probes run: one process a GPU under torchrun, over torch's symmetric memory, as the fused kernels will run.

Rank 0 calibrates; the others serve it. Every step is done by all ranks together and its failure on one is raised on all,
so that none waits for a rank that has given up.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from xstage_plugin import env
from xstage_plugin.burst_gap.gpu_info import GpuError
from xstage_plugin.burst_gap.probe import Destination, ProbeDevice, ProbeResult, Traffic, local_copy_gbps, run_concurrent
from xstage_plugin.burst_gap.probe_config import ProbeConfig
from xstage_plugin.burst_gap.topology import LOCAL, stores_to
from xstage_plugin.errors import XStageError

T = TypeVar("T")
RENDEZVOUS_TIMEOUT = datetime.timedelta(seconds=120)


class TorchrunBench:
    """The GPUs of torchrun's processes on one host. Make it on every rank; all but rank 0 then call :meth:`serve`.

    Raises:
        GpuError: no torch, ranks on several hosts, a local rank without a GPU.
    """

    how = "one process a GPU, torch symmetric memory"
    processes_per_gpu = 1

    def __init__(self) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise GpuError(f"cannot import torch ({error}); install the extra: pip install 'xstage-plugin[gpu]'") from None
        self._torch, self._dist = torch, dist
        self._rank, self.num_gpus = env.torchrun_rank(), env.torchrun_ranks()
        torch.cuda.set_device(env.torchrun_local_rank())
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=RENDEZVOUS_TIMEOUT)
        hosts = self._gather(socket.gethostname())
        if len(set(hosts)) > 1:
            raise GpuError(f"ranks run on {len(set(hosts))} hosts; expected one: peer memory is reached within a host")
        self._device = self._together(lambda: ProbeDevice(env.torchrun_local_rank()))
        facts = self._gather((self._device.num_sms, self._device.largest_staged_bytes))
        self.num_sms = min(sms for sms, _ in facts)
        self.largest_burst_kib = min(staged for _, staged in facts) / 1024
        self._buffer: Any = None
        self._bases: list[int] = []
        self._num_bytes = 0
        self._closed = False

    def serve(self) -> None:
        """Take part in what rank 0 does until it closes its bench. For every other rank."""
        while True:
            call, arguments = self._receive()
            if call == "close":
                self._shut_down()
                return
            try:
                getattr(self, f"_{call}")(*arguments)
            except XStageError:
                continue  # rank 0 raised the same and decides what follows

    def reserve(self, num_bytes: int) -> None:
        self._send("reserve", num_bytes)
        self._reserve(num_bytes)

    def run(self, config: ProbeConfig, topology: str) -> list[ProbeResult]:
        self._send("run", config, topology)
        return self._run(config, topology)

    def copy_rates_gbps(self) -> dict[str, float]:
        self._send("copy_rates")
        return self._copy_rates()

    def close(self) -> None:
        if not self._closed:
            self._send("close")
            self._shut_down()

    def _reserve(self, num_bytes: int) -> None:
        def allocate() -> tuple[Any, list[int]]:
            import torch.distributed._symmetric_memory as symmetric

            buffer = symmetric.empty(self._num_bytes, dtype=self._torch.uint8, device="cuda")
            handle = symmetric.rendezvous(buffer, self._dist.group.WORLD)
            return buffer, [int(pointer) for pointer in handle.buffer_ptrs]

        self._num_bytes = num_bytes * max(1, self.num_gpus - 1)
        self._buffer, self._bases = self._together(allocate)

    def _run(self, config: ProbeConfig, topology: str) -> list[ProbeResult]:
        pattern = stores_to(topology, self.num_gpus)
        parts = self._parts(pattern, config)
        mine = [(source, peer) for source, peer in parts if peer == self._rank]

        def poison() -> None:
            for key in mine:
                self._device.poison(self._at(parts[key]))

        self._together(poison)
        results = self._gather(self._together(lambda: self._launch(pattern, parts, config)))
        by_source = {source: result for source, result in enumerate(results) if result is not None}
        checked = self._gather(self._together(lambda: self._verify(mine, parts, pattern, by_source, config)))
        return [
            replace(
                by_source[source],
                target="local" if topology == LOCAL else "remote",
                mismatches=sum(count for rank in checked for origin, count, _ in rank if origin == source),
                first_mismatch=next((text for rank in checked for origin, _, text in rank if origin == source and text), ""),
            )
            for source, _ in pattern
        ]

    def _launch(self, pattern: Any, parts: dict[tuple[int, int], tuple[int, int, int]], config: ProbeConfig) -> Any:
        for source, peers in pattern:
            if source == self._rank:
                targets = tuple(self._at(parts[source, peer]) for peer in peers)
                return run_concurrent([Traffic(self._device, targets, config)])[0]
        return None

    def _verify(
        self, mine: Any, parts: dict[tuple[int, int], tuple[int, int, int]], pattern: Any, results: Any, config: ProbeConfig
    ) -> list[tuple[int, int, str]]:
        found = []
        peers_of = dict(pattern)
        for source, peer in mine:
            index, step = peers_of[source].index(peer), len(peers_of[source])
            bursts = results[source].num_bursts[index::step]
            if bursts:
                found.append((source, *self._device.verify(self._at(parts[source, peer]), config, bursts, index, step)))
        return found

    def _parts(self, pattern: Any, config: ProbeConfig) -> dict[tuple[int, int], tuple[int, int, int]]:
        """(rank that holds it, offset, bytes) of what each source writes at each of its destinations, side by side."""
        used = [0] * self.num_gpus
        parts = {}
        for source, peers in pattern:
            for peer in peers:
                size = config.region_bytes(len(peers))
                parts[source, peer] = (peer, used[peer], size)
                used[peer] += size
        return parts

    def _at(self, part: tuple[int, int, int]) -> Destination:
        peer, offset, size = part
        return Destination(peer, self._bases[peer], self._num_bytes).part(offset, size)

    def _copy_rates(self) -> dict[str, float]:
        # A copy between processes goes through the same mapping as the stores.
        def copy() -> dict[str, float]:
            rates = {"memcpy_local": local_copy_gbps(self._device)}
            if self._rank == 0 and self.num_gpus > 1:
                rates["memcpy_peer"] = self._device.copy_gbps(self._bases[1], self._bases[0], min(2**28, self._num_bytes))
            return rates

        return self._gather(self._together(copy))[0]

    def _shut_down(self) -> None:
        self._closed, self._buffer = True, None
        self._device.close()
        if self._dist.is_initialized():
            self._dist.destroy_process_group()

    def _together(self, step: Callable[[], T]) -> T:
        """``step()`` on every rank; if it fails on one, the same error on all."""
        value, failure = None, ""
        try:
            value = step()
        except Exception as error:  # torch raises many types; every rank must hear of any
            failure = f"rank {self._rank}: {(str(error) or type(error).__name__).splitlines()[0]}"
        failures = [text for text in self._gather(failure) if text]
        if failures:
            raise GpuError(failures[0])
        return value  # type: ignore[return-value]

    def _gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.num_gpus
        self._dist.all_gather_object(values, value)
        return values

    def _send(self, call: str, *arguments: Any) -> None:
        self._dist.broadcast_object_list([(call, arguments)], src=0, device=self._torch.device("cpu"))

    def _receive(self) -> tuple[str, tuple[Any, ...]]:
        message: list[Any] = [None]
        self._dist.broadcast_object_list(message, src=0, device=self._torch.device("cpu"))
        return message[0]  # type: ignore[no-any-return]
