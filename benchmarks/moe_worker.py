"""The process that runs one family of MegaMoE arms on one GPU for ab_moe.py: ``stock`` or ``xstage``.

Timing: all ranks meet on the host, then a sleep on the device hides the launches, a tiny all-reduce lets the ranks meet on
their devices, and CUDA events stand around the one call. Every timed call follows an untimed one of the same arm, so that
an arm does not pay for what ran before it. Inputs depend on seed, shape and rank only: both families compute the same.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import serve

SLEEP_CYCLES = 1_000_000  # about 0.5 ms: longer than the launches of any rank take
COPY_BYTES = 2**31
BLOCK = 128  # side of the blocks of weights, and length of the runs of activations, that share a scale
FP8_MAX = 448.0
DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def set_lead(buffer: Any, lead: int) -> None:
    """Schedule of the next calls on the symmetric buffer: 0 the expert wave, n interleaved with a lead of n rows."""
    buffer.buffer[28:32].view(torch.int32).fill_(lead)


class MoeWorker:
    """The steps that ab_moe.py asks for. Every one is a collective over the workers of the family."""

    def start(self, family: str, rank: int, ranks: int, local_rank: int, port: int, timeout_s: float) -> dict[str, Any]:
        """Join the family's process group; load the library, under ``xstage`` with the overlay."""
        self.family, self.rank, self.ranks = family, rank, ranks
        self.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.device)
        wait = datetime.timedelta(seconds=timeout_s)
        # A store of our own: under torchrun, init_process_group would look for the agent's.
        store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=wait)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=wait, device_id=self.device)
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
        self._meet()
        return {"library_root": os.path.basename(root) or "deep_gemm", "in_place": in_place}

    def rates(self) -> dict[str, float | None]:
        """What this GPU does at best: a copy (bytes read and written), and matrix products of 8192 x 8192 x 8192."""
        n = 8192
        halves = torch.empty(2, COPY_BYTES, dtype=torch.uint8, device=self.device)
        copy_us = self._best_us(lambda: halves[0].copy_(halves[1]))
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        bf16_us = self._best_us(lambda: a @ b.t())
        fp8_us = None
        try:
            one = torch.ones((), device=self.device)
            a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
            fp8_us = self._best_us(
                lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
            )
        except (RuntimeError, TypeError) as error:  # a torch or a GPU without it: the parent falls back on bf16
            print(f"moe_worker: no FP8 product here: {error}", file=sys.stderr)
        return {
            "copy_gbps": 2 * COPY_BYTES / copy_us / 1e3,
            "bf16_tflops": 2 * n**3 / bf16_us / 1e6,
            "fp8_tflops": 2 * n**3 / fp8_us / 1e6 if fp8_us else None,
        }

    def prepare(self, shape: Mapping[str, int], tokens: int, shares: Sequence[Sequence[float]], seed: int) -> list[int]:
        """Inputs, weights and the symmetric buffer of one case. Returns this rank's routed tokens per expert."""
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
        self._meet()
        return [int(count) for count in torch.bincount(ids.flatten(), minlength=experts).tolist()]

    def run(self, lead: int | None) -> float:
        """Event time of one call on this rank, microseconds."""
        self._set(lead)
        self._call()
        self._meet()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(self.token)
        begin.record()
        self._call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end) * 1e3)

    def check(self, lead: int | None) -> dict[str, Any]:
        """Digest of this rank's result over a poisoned ``y``, and whether all of it is finite."""
        self._set(lead)
        self.y.fill_(float("nan"))
        self._meet()
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

    def _set(self, lead: int | None) -> None:
        if lead is not None:
            set_lead(self.buffer, lead)

    def _call(self) -> None:
        l1, l2 = self.weights
        self.library.fp8_mega_moe(self.y, l1, l2, self.buffer)

    def _meet(self) -> None:
        self.token = torch.zeros(1, device=self.device)
        dist.barrier()
        torch.cuda.synchronize()

    def _release(self) -> None:
        if self.buffer is not None:
            self._meet()  # no peer may still store into it
            self.buffer = self.y = None
            gc.collect()
            torch.cuda.empty_cache()

    def _best_us(self, step: Any) -> float:
        """The least of 10 timed calls after 3 others."""
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
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, 9)
    serve(MoeWorker(), int(sys.argv[-1]))
    sys.stdout.flush()
    os._exit(0)  # a library that waits for a peer at exit must not keep the GPU
