"""The process that times output tiles on one GPU for tile_spans.py: flash-attn-4 with our storing role, stamps switched on."""

from __future__ import annotations

from typing import Any

import torch
from gpu_worker import GpuWorker, work

from xstage_plugin.attention.delivery import FusedDelivery
from xstage_plugin.attention.fa4_arrival import FlashAttention4Arrival
from xstage_plugin.attention.launch_plan import fused_plan
from xstage_plugin.attention.layout import OWN_LAST, UlyssesLayout
from xstage_plugin.attention.peer_span import PeerSpan

DTYPE = torch.bfloat16
WARM_UP = 3


class Stamped(FlashAttention4Arrival):
    """The backend with a span for every tile."""

    spans: torch.Tensor

    def announce(self, *tensors: torch.Tensor, softmax_scale: float, causal: bool, spans: Any = None) -> None:
        super().announce(*tensors, softmax_scale=softmax_scale, causal=causal, spans=self.spans)


class SpanWorker(GpuWorker):
    """The steps that tile_spans.py asks for. Every one is a collective over the workers."""

    def start(self, family: str, rank: int, ranks: int, local_rank: int, port: int, timeout_s: float) -> None:
        self.join(rank, ranks, local_rank, port, timeout_s)
        self.meet()

    def refusal(self, head_dim: int) -> str:
        """Why the kernel cannot run here; empty if it can."""
        return FlashAttention4Arrival().refusal(head_dim, DTYPE, self.device)

    def spans(self, seq_len: int, heads: int, head_dim: int, head_by_head: bool, local: bool) -> dict[str, list[list[int]]]:
        """Spans of the tiles for other ranks and of those for this one, of a warm call; checks bits and counters.

        ``local``: everything goes into this GPU's memory instead, at the same distances.
        """
        from xstage_plugin.attention.kernels.fa4_launch import spans_shape

        layout = UlyssesLayout.even(seq_len, heads * self.ranks, head_dim, self.ranks)
        plan = fused_plan(layout, self.rank, OWN_LAST, head_by_head=head_by_head)
        (launch,) = plan.launches
        generator = torch.Generator(self.device).manual_seed(self.rank)
        q, k, v = (
            torch.randn(1, seq_len, heads, head_dim, device=self.device, dtype=DTYPE, generator=generator) for _ in "qkv"
        )
        backend = Stamped()
        destinations = (heads, launch.rows, self.ranks) if launch.head_by_head else (self.ranks, launch.rows, heads)
        shape = spans_shape(torch.empty(*destinations, head_dim, device="meta"), False)
        backend.spans = torch.zeros(shape, dtype=torch.int64, device=self.device)
        with (
            PeerSpan(layout.span_shape, DTYPE, device=self.device) as output,
            PeerSpan(layout.span_shape[:2], torch.int32, device=self.device) as counters,
        ):
            slots, entries = output.slots(plan.first_rank), counters.slots(plan.first_rank)
            if local:
                slots, entries = (
                    torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in (slots, entries)
                )
            scale = head_dim**-0.5
            delivery = FusedDelivery(plan, layout, self.rank, slots, DTYPE, backend, scale, False, entries)
            for _ in range(WARM_UP + 1):
                entries.zero_()  # the peers' too: nobody stores yet
                self.meet()
                torch.cuda._sleep(1_000_000)
                delivery.store(q, k, v)
                self.meet()
            arrived = entries[-1] if local else counters.local()
            expected = heads if local else layout.total_heads
            blocks = arrived[0, :: backend.block_rows(head_dim, DTYPE, False)]
            if not bool((blocks == expected).all()) or int(arrived.sum()) != expected * blocks.numel():
                raise ValueError(f"counters are {blocks.unique().tolist()}; expected {expected} at every row block")
            stamps = backend.spans[..., 0]  # [kernel batch, kernel heads, blocks, 3]
            by_destination = stamps.transpose(0, 1) if launch.head_by_head else stamps
            found = {"remote": by_destination[:-1], "own": by_destination[-1]}
            del delivery, slots, entries
            return {name: part.reshape(-1, 3).tolist() for name, part in found.items()}


if __name__ == "__main__":
    work(SpanWorker())
