"""The process that runs the attention arms on one GPU for ab_ulysses.py.

Every arm is captured once a case as a CUDA graph of several calls, and the graph that is checked is the one that is timed.
Inputs depend on seed, shape and rank only.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpu_worker import GpuWorker, work
from ulysses_arms import Inputs, UlyssesArms
from ulysses_figures import ATTENTION, FLASHINFER, NCCL
from ulysses_others import Flashinfer

from xstage_plugin.attention.backends import candidates
from xstage_plugin.attention.layout import UlyssesLayout
from xstage_plugin.attention.peer_span import PeerSpan

DTYPE = torch.bfloat16
SETTLE_US, SETTLE_FROM_US = 1.5e6, 2000.0  # long kernels run at the power limit; until then the clock falls by a tenth


class Sample:
    """The calls of one sample as a CUDA graph."""

    def __init__(self, call: Callable[[], object], calls: int) -> None:
        self.calls = calls
        self._graph = torch.cuda.CUDAGraph()
        # Another thread of this process, NCCL's watchdog, may query events meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()

    def launch(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()


class UlyssesWorker(GpuWorker):
    """The steps that ab_ulysses.py asks for. Every one is a collective over the workers."""

    def start(self, family: str, rank: int, ranks: int, local_rank: int, port: int, timeout_s: float) -> None:
        """Join the process group; captured NCCL calls get a communicator of their own."""
        self.join(rank, ranks, local_rank, port, timeout_s)
        self.exchange_group = dist.new_group(list(range(ranks)))
        self.arms: UlyssesArms | None = None
        self.samples: dict[str, Sample] = {}
        self.reference: torch.Tensor | None = None
        self.span: PeerSpan | None = None
        self.other: Flashinfer | None = None
        self.meet()

    def missing(self, backends: Sequence[str], others: Sequence[str], head_dim: int) -> dict[str, str]:
        """Why each backend and other library cannot be used here; empty where it can."""
        found = {name: candidates(name)[0].refusal(head_dim, DTYPE, self.device) for name in backends}
        return found | {name: Flashinfer.refusal() for name in others}

    def prepare(self, backend: str, arms: Sequence[str], seed: int, seq_len: int, heads: int, head_dim: int) -> dict[str, Any]:
        """Inputs, span and arms of one case, each arm run once; long ones run until clock and power have settled.

        Returns the time of attention alone in microseconds, and the state of the GPU under it.
        """
        self._release()
        layout = UlyssesLayout.even(seq_len, heads * self.ranks, head_dim, self.ranks)
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        shape = (1, seq_len, heads, head_dim)
        q, k, v = (torch.randn(shape, device=self.device, dtype=DTYPE, generator=generator) for _ in range(3))
        self.span = PeerSpan(layout.span_shape, DTYPE, device=self.device)
        inputs = Inputs(q, k, v, self.exchange_group)
        self.arms = UlyssesArms(layout, self.rank, candidates(backend)[0], inputs, self.span)
        if FLASHINFER.name in arms:
            self.other = Flashinfer(self.exchange_group, self.arms.scratch, self.arms.out)
            self.arms.steps[FLASHINFER.name] = self.arms.serial(self.other)
        for name in arms:  # the first call compiles
            self.arms.steps[name].call()
            self.meet()
        return self.settled(self.arms.steps[ATTENTION.name].call)

    def settled(self, attend: Callable[[], object]) -> dict[str, Any]:
        """The time of ``attend`` and the state of the GPU under it, once clock and power have settled."""
        call_us = self.event_us(attend)
        for _ in range(math.ceil((SETTLE_US if call_us > SETTLE_FROM_US else 0) / call_us)):
            attend()
        state = self.load_state()
        self.meet()
        return {"call_us": call_us, "load": state}

    def check(self, name: str, calls: int) -> dict[str, bool]:
        """Whether this rank's rows, poisoned before, are all finite and those of the first ``serial nccl``, bit by bit."""
        if self.arms is None:
            raise ValueError("no case is prepared")
        if name not in self.samples:
            self.samples[name] = Sample(self.arms.steps[name].call, calls)
        for tensor in self.arms.poisonable:
            tensor.fill_(float("nan"))
        self.meet()  # nobody stores before everybody is poisoned
        self.samples[name].launch()
        self.meet()  # every peer's stores have arrived
        rows = self.arms.steps[name].result()
        if self.reference is None:
            if name != NCCL.name:
                raise ValueError(f"{name} is checked before {NCCL.name}, which it is held against")
            self.reference = rows.clone()
        equal = torch.equal(rows.view(torch.int16), self.reference.view(torch.int16))
        return {"equal": equal, "finite": bool(torch.isfinite(rows).all())}

    def run(self, name: str) -> tuple[float, float]:
        """Event time of one call on this rank, microseconds (that of the sample's calls over their number); SM clock, MHz."""
        sample = self.samples[name]
        us, mhz = self.clocked_us(sample.launch)
        return us / sample.calls, mhz

    def close(self) -> None:
        """Let go of what the peers map, together."""
        if dist.is_initialized():
            self._release()
            dist.destroy_process_group()

    def _release(self) -> None:
        """Graphs before what they use, and all of it only when no peer may still store here."""
        self.meet()
        while self.samples:
            self.samples.popitem()[1].reset()
        if self.other is not None:
            self.other.close()
        # Views of the span must be gone before it is unmapped.
        self.arms = self.reference = self.other = None
        gc.collect()
        if self.span is not None:
            self.span.close()
            self.span = None
        torch.cuda.empty_cache()
        self.meet()


if __name__ == "__main__":
    work(UlyssesWorker())
