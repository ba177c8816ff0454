"""The process that runs the arms of ab_projection.py on one GPU; graphs, samples and timing are those of ulysses_worker.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gpu_worker import work
from projection_arms import ProjectionArms
from projection_figures import ATTENTION, NCCL
from ulysses_arms import Inputs
from ulysses_worker import DTYPE, Sample, UlyssesWorker

from xstage_plugin.attention.arriving_backend import arriving_backend
from xstage_plugin.attention.backends import candidates
from xstage_plugin.attention.layout import UlyssesLayout
from xstage_plugin.attention.peer_span import PeerSpan
from xstage_plugin.attention.projection import projected
from xstage_plugin.attention.ulysses import release_ulysses


class ProjectionWorker(UlyssesWorker):
    """The steps that ab_projection.py asks for. Every one is a collective over the workers."""

    def missing(self, backends: Sequence[str], head_dim: int) -> dict[str, str]:
        """Why each announcing kernel, or the stock one beside it, cannot be used here; empty where both can."""
        found = {}
        for name in backends:
            kernels = (arriving_backend(name), *candidates(name.removesuffix("-arrival")))
            reasons = (kernel.refusal(head_dim, DTYPE, self.device) for kernel in kernels)
            found[name] = next((reason for reason in reasons if reason), "")
        return found

    def prepare(self, backend: str, arms: Sequence[str], seed: int, seq_len: int, heads: int, head_dim: int) -> dict[str, Any]:
        """Inputs, span, weight and arms of one case, each arm run once; as :meth:`UlyssesWorker.prepare`."""
        self._release()
        layout = UlyssesLayout.even(seq_len, heads * self.ranks, head_dim, self.ranks)
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        shape, width = (1, seq_len, heads, head_dim), layout.total_heads * head_dim
        q, k, v = (torch.randn(shape, device=self.device, dtype=DTYPE, generator=generator) for _ in range(3))
        weight = torch.randn(width, width, device=self.device, dtype=DTYPE, generator=generator)
        self.span = PeerSpan(layout.span_shape, DTYPE, device=self.device)
        (stock,), arriving = candidates(backend.removesuffix("-arrival")), arriving_backend(backend, always=True)
        inputs = Inputs(q, k, v, self.exchange_group)
        self.arms = ProjectionArms(layout, self.rank, stock, arriving, inputs, self.span, weight)
        self.weight = weight
        for name in arms:  # the first call compiles
            self.arms.steps[name].call()
            self.meet()
        return self.settled(self.arms.steps[ATTENTION.name].call)

    def check(self, name: str, calls: int) -> dict[str, bool]:
        """What holds of the arm's poisoned outputs after its graph has run.

        ``finite`` and ``equal``: this rank's rows, bit by bit those of the first ``serial nccl``; ``projected``: within twice
        bfloat16's own error; ``counted``: its counters show every tile. True where the arm has no such thing.
        """
        if self.arms is None:
            raise ValueError("no case is prepared")
        steps = self.arms.steps[name]
        if name not in self.samples:
            self.samples[name] = Sample(steps.call, calls)
        self.arms.begin_check()
        self.meet()  # nobody stores before everybody is poisoned
        self.samples[name].launch()
        self.meet()  # every peer's stores have arrived
        found = {"finite": True, "equal": True, "projected": True, "counted": steps.counted is None or steps.counted(calls)}
        if steps.rows is not None:
            rows = steps.rows()
            if self.reference is None:
                if name != NCCL.name:
                    raise ValueError(f"{name} is checked before {NCCL.name}, which it is held against")
                self.reference = rows.clone()
            found["equal"] = torch.equal(rows.view(torch.int16), self.reference.view(torch.int16))
            found["finite"] = bool(torch.isfinite(rows).all())
        if steps.projection is not None and steps.projected_rows is not None:
            rows = steps.projected_rows()
            exact = projected(rows.float(), self.weight.float())
            allowed = 2 * (projected(rows, self.weight) - exact).abs().max()
            found["projected"] = bool((steps.projection.result - exact).abs().max() <= allowed)
        return found

    def _release(self) -> None:
        super()._release()
        release_ulysses()  # the counters, once nobody may raise them


if __name__ == "__main__":
    work(ProjectionWorker())
