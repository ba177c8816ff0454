"""The process that runs one family of MegaMoE arms on one GPU for ab_moe.py: ``stock`` or ``xstage``.

Every timed call follows an untimed one of the same arm, so that an arm does not pay for what ran before it. Inputs depend on
seed, shape and rank only: both families compute the same.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpu_worker import GpuWorker, work

BLOCK = 128  # side of the blocks of weights, and length of the runs of activations, that share a scale
FP8_MAX = 448.0


class MoeWorker(GpuWorker):
    """The steps that ab_moe.py asks for. Every one is a collective over the workers of the family."""

    def start(self, family: str, rank: int, ranks: int, local_rank: int, port: int, timeout_s: float) -> dict[str, Any]:
        """Join the family's process group; load the library, under ``xstage`` with the overlay."""
        self.family = family
        self.join(rank, ranks, local_rank, port, timeout_s)
        root, in_place = "", False
        if family == "xstage":
            from xstage_plugin.upstream.activate import ensure_active

            activation = ensure_active()
            root, in_place = str(activation.library_root), activation.in_place
        import deep_gemm

        self.library = deep_gemm
        self.key: tuple[Any, ...] = ()
        self.buffer: Any = None
        self.weights: Any = None
        self.meet()
        return {"library_root": os.path.basename(root) or "deep_gemm", "in_place": in_place}

    def rates(self) -> dict[str, float | None]:
        """What this GPU does at best: a copy (bytes read and written), and matrix products of 8192 x 8192 x 8192."""
        n, fp8_us = 8192, None
        try:
            one = torch.ones((), device=self.device)
            a8, b8 = (torch.randn(n, n, device=self.device).to(torch.float8_e4m3fn) for _ in range(2))
            fp8_us = self.best_us(
                lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
            )
        except (RuntimeError, TypeError) as error:  # a torch or a GPU without it: the parent falls back on bf16
            print(f"moe_worker: no FP8 product here: {error}", file=sys.stderr)
        return {
            "copy_gbps": self.copy_gbps(),
            "bf16_tflops": self.matrix_tflops(),
            "fp8_tflops": 2 * n**3 / fp8_us / 1e6 if fp8_us else None,
        }

    def prepare(
        self, shape: Mapping[str, int], tokens: int, shares: Sequence[Sequence[float]], seed: int
    ) -> dict[str, list[int]]:
        """Inputs, weights and the symmetric buffer of one case, and its kernel compiled.

        Returns how many of this rank's routed tokens go to each expert, and how many of its tokens go to each rank at all.
        """
        hidden, intermediate, experts, topk = (shape[name] for name in ("hidden", "intermediate", "experts", "topk"))
        self._release()
        key = (hidden, intermediate, experts, seed)
        if key != self.key:
            self.weights = None
            torch.cuda.empty_cache()
            local = experts // self.ranks
            l1 = draw_weights(local, 2 * intermediate, hidden, 1000 * seed + 2 * self.rank, self.device)
            l2 = draw_weights(local, hidden, intermediate, 1000 * seed + 2 * self.rank + 1, self.device)
            self.weights = self.library.transform_weights_for_mega_moe_sm90(l1, l2)
            self.key = key
        self.buffer = self.library.get_symm_buffer_for_mega_moe(dist.group.WORLD, experts, tokens, topk, hidden, intermediate)
        generator = torch.Generator(self.device).manual_seed(1000 * seed + 500 + self.rank)
        values, scales = quantise(torch.randn(tokens, hidden, device=self.device, generator=generator))
        ids = draw_ids(tokens, topk, shares[self.rank], generator)
        weights = torch.rand(tokens, topk, device=self.device, generator=generator)
        inputs = {"x": values, "x_sf": scales, "topk_idx": ids, "topk_weights": weights}
        for name, value in inputs.items():
            getattr(self.buffer, name)[:tokens].copy_(value)
        self.y = torch.empty(tokens, hidden, device=self.device, dtype=torch.bfloat16)
        self._compile()
        self.meet()
        ranks_of = torch.zeros(tokens, self.ranks, dtype=torch.bool, device=self.device)
        ranks_of.scatter_(1, ids // (experts // self.ranks), True)
        return {
            "pairs": [int(count) for count in torch.bincount(ids.flatten(), minlength=experts).tolist()],
            "tokens": [int(count) for count in ranks_of.sum(0).tolist()],
        }

    def run(self, lead: int | None, pulls: str | None) -> float:
        """Event time of one call on this rank, microseconds."""
        self._set(lead, pulls)
        self._call()
        return self.event_us(self._call)

    def check(self, lead: int | None, pulls: str | None) -> dict[str, Any]:
        """Digest of this rank's result over a poisoned ``y``, and whether all of it is finite."""
        self._set(lead, pulls)
        self.y.fill_(float("nan"))
        self.meet()
        self._call()
        torch.cuda.synchronize()
        if self.family == "xstage":
            from xstage_plugin.upstream.activate import require_in_effect

            require_in_effect()  # the library has compiled by now, and it must have been ours
        return {"digest": digest(self.y), "finite": bool(torch.isfinite(self.y).all())}

    def close(self) -> None:
        """Let go of what the peers map, together."""
        if dist.is_initialized():
            self._release()
            dist.destroy_process_group()

    def _set(self, lead: int | None, pulls: str | None) -> None:
        """Schedule of the next calls; the untouched library has none."""
        if self.family == "xstage":
            from xstage_plugin.moe.schedule_choice import STOCK_PULLS, ScheduleChoice
            from xstage_plugin.moe.schedule_word import write_choice

            write_choice(self.buffer, ScheduleChoice(lead or 0, "an arm", pulls or STOCK_PULLS))

    def _call(self) -> None:
        l1, l2 = self.weights
        self.library.fp8_mega_moe(self.y, l1, l2, self.buffer)

    def _compile(self) -> None:
        """Capturing the call compiles its kernel and launches nothing."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            self._call()

    def _release(self) -> None:
        if self.buffer is not None:
            self.meet()  # no peer may still store into it
            self.buffer = self.y = None
            gc.collect()
            torch.cuda.empty_cache()


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations (tokens, hidden) as FP8 and a float scale per run of 128."""
    runs = x.reshape(*x.shape[:-1], -1, BLOCK)
    scales = runs.abs().amax(-1).clamp(1e-4) / FP8_MAX
    return (runs / scales[..., None]).reshape(x.shape).to(torch.float8_e4m3fn), scales


def draw_weights(experts: int, n: int, k: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal weights (experts, n, k) of variance 1/k as FP8, and a float scale per block of 128 x 128."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(experts, n // BLOCK, k // BLOCK, device=device)
    for expert in range(experts):  # one at a time: in float they are four times as large
        blocks = (torch.randn(n, k, device=device, generator=generator) / k**0.5).reshape(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        scales[expert] = blocks.abs().amax((1, 3)) / FP8_MAX
        values[expert] = (blocks / scales[expert][:, None, :, None]).reshape(n, k).to(torch.float8_e4m3fn)
    return values, scales


def draw_ids(tokens: int, topk: int, shares: Sequence[float], generator: torch.Generator) -> torch.Tensor:
    """topk distinct experts a token, drawn without replacement in proportion to ``shares`` (Gumbel's trick)."""
    device = generator.device
    logits = torch.tensor(shares, device=device, dtype=torch.float32).log()
    noise = torch.rand(tokens, len(shares), device=device, generator=generator)
    return (logits - (-noise.clamp(1e-12).log()).log()).topk(topk, -1).indices


def digest(y: torch.Tensor) -> str:
    """128 bits of the bytes of ``y``."""
    return hashlib.blake2b(y.contiguous().view(torch.uint8).cpu().numpy().tobytes(), digest_size=16).hexdigest()


if __name__ == "__main__":
    work(MoeWorker())
