"""One rank of the Ulysses check on GPUs, started by torchrun from test_ulysses_gpu.py: a JSON summary, kept after every check.

Every result is compared bit by bit: moving tiles elsewhere must not change them. Buffers hold NaN before each run, so that a
row that nobody wrote is seen. A comparison that fails is recorded and the run goes on; a rank that stopped alone would leave
its peers waiting.
"""

import argparse
import faulthandler
import functools
import importlib.util
import itertools
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ulysses_run import Run, chosen

from xstage_plugin.attention.backends import BACKENDS
from xstage_plugin.attention.launch_plan import serial_plan
from xstage_plugin.attention.layout import OWN_FIRST, OWN_LAST, SEQUENCE, UlyssesLayout
from xstage_plugin.attention.peer_span import PeerSpan, ledger
from xstage_plugin.attention.routes import BARRIER, INPUTS
from xstage_plugin.attention.serial import LocalAttention, NcclExchange
from xstage_plugin.attention.ulysses import UlyssesAttention, prepare_ulysses, release_ulysses, ulysses_attention
from xstage_plugin.errors import XStageError

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
ROUNDS = 100
SLEEP_CYCLES = 1_000_000  # some 0.5 ms
STILL_S = 40


def cases(ranks):
    """Layout, type and mask by name."""
    even = UlyssesLayout.even
    shares = tuple(700 - 100 * rank for rank in range(ranks))
    one_head_less = (3, *(1,) * (ranks - 1))
    return {
        "1 row": (UlyssesLayout((1, *(0,) * (ranks - 1)), (2,) * ranks, 128), BF16, False),
        "127": (even(127, 2 * ranks, 128, ranks), BF16, False),
        "128, 5 heads over 2, 1 kv head, d 64": (even(128, 2 * ranks + 1, 64, ranks, kv_heads=1), BF16, False),
        "129, 5 heads over 2, 5 kv heads, d 96": (even(129, 2 * ranks + 1, 96, ranks), BF16, False),
        "129, fp16": (even(129, 2 * ranks, 128, ranks), FP16, False),
        "4095 x 2, 24 heads": (even(8190, 24, 128, ranks), BF16, False),
        "8192, fp16, d 64": (even(8192, 2 * ranks, 64, ranks), FP16, False),
        "8192, 40 heads, 8 kv heads": (even(8192, 40, 128, ranks, kv_heads=8), BF16, False),
        "8192, 4 heads, fewer kv heads than ranks": (even(8192, 2 * ranks, 128, ranks, kv_heads=1), BF16, False),
        "57826 with 226 of text, 30 heads": (even(57826, 30, 128, ranks, shared_rows=226), BF16, False),
        "text first, d 64": (even(2100, 2 * ranks, 64, ranks, shared_rows=52, shared_at="first"), BF16, False),
        "batch 2": (even(1000, 2 * ranks, 128, ranks, batch=2, kv_heads=ranks), BF16, False),
        "batch 3, uneven rows and heads, d 96": (UlyssesLayout(shares, one_head_less, 96, 3), BF16, False),
        "batch 2, text last": (even(1100, 2 * ranks, 128, ranks, batch=2, shared_rows=77), BF16, False),
        "causal, 4095 x 2": (even(8190, 2 * ranks, 128, ranks, kv_heads=ranks), BF16, True),
        "causal, batch 2, uneven rows": (UlyssesLayout(shares, (2,) * ranks, 64, 2), BF16, True),
        "fp8": (even(2048, 2 * ranks, 128, ranks), FP8, False),
    }


def model_inputs(layout, dtype, seed):
    """q [B, S, H, d], k and v [B, S, H_kv, d] of the whole model, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = (layout.total_heads, layout.total_kv_heads, layout.total_kv_heads)
    shapes = [(layout.batch, layout.seq_len, count, layout.head_dim) for count in counts]
    return [torch.randn(shape, device="cuda", dtype=BF16, generator=generator).to(dtype) for shape in shapes]


def rows_of(x, ranges):
    if not ranges:
        return x[:, :0]
    # Concatenation knows no FP8; the bytes are the same.
    bits = x.view(torch.uint8) if x.dtype == FP8 else x
    return torch.cat([bits[:, part.start : part.stop] for part in ranges], 1).view(x.dtype)


def share_of(layout, rank, order, q, k, v):
    first, count = layout.kv_heads_of(rank)
    heads = slice(layout.head_start(rank), layout.head_start(rank) + layout.heads[rank])
    q = rows_of(q, layout.q_ranges(rank, order))[:, :, heads].contiguous()
    return q, *(x[:, :, first : first + count].contiguous() for x in (k, v))


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


class Checks:
    """What one rank found under one kernel."""

    def __init__(self, kernel):
        self.kernel, self.rank, self.ranks = kernel, dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device())

    def settings(self, **more):
        return {"backend": self.kernel, "device": self.device} | more

    def find(self, name, table):
        """What the case of ``table`` or the check of this name finds; {refused: reason} where the kernel cannot run a case."""
        if name not in table:
            found = CHECKS[name](self)
            release_ulysses()
            return found
        layout, dtype, _ = table[name]
        refused = self.kernel.refusal(layout.head_dim, dtype, self.device)
        return {"refused": refused} if refused else self.case(*table[name])

    def case(self, layout, dtype, causal):
        """All arms of one case against the first: {arm: same bits}."""
        whole = model_inputs(layout, dtype, 11)
        found, reference = {}, None
        for mode in ("serial", "fused"):
            for order in (SEQUENCE, OWN_LAST, OWN_FIRST):
                call = prepare_ulysses(layout, dtype, mode=mode, q_order=order, causal=causal, **self.settings())
                share = share_of(layout, self.rank, order, *whole)
                call.buffer.fill_(float("nan"))
                out = call(*share)
                assert call.mode == mode
                if reference is None:
                    reference = out.clone()
                found[f"{mode} {order}"] = same_bits(out, reference) and not bool(out.isnan().any())
                beyond = call.buffer[:, layout.local_rows(self.rank) :]
                found[f"{mode} {order} stays within its rows"] = bool(beyond.isnan().all())
        for order in (SEQUENCE, OWN_LAST):
            steps = serial_plan(layout, self.rank, order, causal)
            scale = call.softmax_scale
            attention = LocalAttention(steps, layout, self.rank, reference.dtype, self.device, self.kernel, scale, causal)
            out = torch.full(layout.out_shape(self.rank), float("nan"), dtype=reference.dtype, device=self.device)
            exchange = NcclExchange(layout, self.rank, order, attention.scratch, out, dist.group.WORLD)
            attention(*share_of(layout, self.rank, order, *whole))
            found[f"nccl {order}"] = same_bits(exchange(), reference)
        layer = UlyssesAttention(layout, dtype, mode="fused", causal=causal, **self.settings())
        layer.call.buffer.fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier()  # a layer has no entry barrier: nobody may poison after a peer's store
        out = layer(*(rows_of(x, layout.local_ranges(self.rank)) for x in whole))
        found["module"] = same_bits(out, reference)
        if layout.seq_len < 1200 and dtype != FP8 and layout.local_rows(self.rank):
            found["close to float32"] = self.close(layout, whole, reference, causal)
        release_ulysses()
        return found

    def close(self, layout, whole, out, causal):
        """Within twice the error of torch's own attention in the same type."""
        group = layout.total_heads // layout.total_kv_heads
        q, k, v = (x.transpose(1, 2) for x in (whole[0], *(x.repeat_interleave(group, 2) for x in whole[1:])))
        attend = torch.nn.functional.scaled_dot_product_attention
        exact = attend(q.double(), k.double(), v.double(), is_causal=causal).transpose(1, 2)
        usual = attend(q, k, v, is_causal=causal).transpose(1, 2)
        exact, usual = (rows_of(x, layout.local_ranges(self.rank)) for x in (exact, usual))
        allowed = 2 * (usual.double() - exact).abs().max() + torch.finfo(out.dtype).eps
        return bool((out.double() - exact).abs().max() <= allowed)

    def small(self):
        """A layout for the checks below, and inputs of four rounds with the result of each."""
        layout = UlyssesLayout.even(1024, 2 * self.ranks, 128, self.ranks)
        whole = [model_inputs(layout, BF16, seed) for seed in range(4)]
        call = prepare_ulysses(layout, BF16, mode="serial", **self.settings())
        return layout, whole, [call(*share_of(layout, self.rank, SEQUENCE, *x)).clone() for x in whole]

    def in_flight(self):
        """Many calls that the host does not wait for, by what they consist of: {part: right, or at least ended}."""
        layout, whole, expected = self.small()
        call = prepare_ulysses(layout, BF16, mode="fused", q_order=OWN_LAST, **self.settings())
        shares = [share_of(layout, self.rank, OWN_LAST, *one) for one in whole]
        span, own = call.span, call.span.local().view(-1)[:1]
        peer = span.of((self.rank + 1) % self.ranks).view(-1)[:1]

        def signals(turn):
            peer.fill_(turn)
            span.barrier()
            wrong = own != turn
            span.barrier()
            return wrong

        def entry(turn):
            span.barrier()
            call.issue(*shares[turn % 4])

        def closing(turn):
            call.issue(*shares[turn % 4])
            span.barrier()

        def both(turn):
            return (call(*shares[turn % 4]) != expected[turn % 4]).any()

        found = {}
        for part, late in itertools.product((signals, entry, closing, both), (False, True)):
            name = f"{part.__name__}, one rank late" if late else part.__name__
            wrong = torch.zeros((), dtype=torch.int64, device=self.device)
            for turn in range(ROUNDS):
                if late and turn % self.ranks == self.rank:
                    torch.cuda._sleep(SLEEP_CYCLES)
                result = part(turn)
                if result is not None:
                    wrong += result.sum()
            self.require_ended(name)
            found[name] = not int(wrong)
            dist.barrier()  # parts without a closing barrier leave peers that still store
        return found

    def require_ended(self, what):
        """Everything launched ends within ``STILL_S``; where it does not, no later check could say anything."""
        event = torch.cuda.Event()
        event.record()
        end = time.monotonic() + STILL_S
        while not event.query():
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank}: {what} stands still on the GPU")
            time.sleep(0.001)

    def rounds(self, ordering):
        """Changing inputs, one rank late before its stores and another one late to read: wrong rounds."""
        layout, whole, expected = self.small()
        if ordering == INPUTS:
            run = UlyssesAttention(layout, BF16, mode="fused", **self.settings())
            shares = [[rows_of(x, layout.local_ranges(self.rank)) for x in one] for one in whole]
        else:
            run = prepare_ulysses(layout, BF16, mode="fused", q_order=OWN_LAST, ordering=ordering, **self.settings())
            shares = [share_of(layout, self.rank, OWN_LAST, *one) for one in whole]
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for turn in range(ROUNDS):
            if turn % self.ranks == self.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            out = run(*shares[turn % 4])
            if (turn // 2) % self.ranks == self.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            wrong += (out != expected[turn % 4]).any()
        self.require_ended(f"rounds, {ordering}")
        return int(wrong)

    def loaded(self):
        """A second stream copies memory and over the link meanwhile: wrong rounds."""
        layout, whole, expected = self.small()
        call = prepare_ulysses(layout, BF16, mode="fused", q_order=OWN_LAST, **self.settings())
        shares = [share_of(layout, self.rank, OWN_LAST, *one) for one in whole]
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        with PeerSpan((2**25,), BF16, device=self.device) as load:
            local, copy = (torch.ones(2**25, dtype=BF16, device=self.device) for _ in range(2))
            peer = load.of((self.rank + 1) % self.ranks)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            for turn in range(ROUNDS):
                with torch.cuda.stream(side):
                    copy.copy_(local)
                    peer.copy_(copy)
                wrong += (call(*shares[turn % 4]) != expected[turn % 4]).any()
            torch.cuda.synchronize()
            dist.barrier()
        return int(wrong)

    def graph(self):
        """Captured once, replayed with other inputs in the same memory; a first call inside a capture is refused."""
        layout, whole, expected = self.small()
        call = prepare_ulysses(layout, BF16, mode="fused", **self.settings())
        layer = UlyssesAttention(layout, BF16, mode="fused", **self.settings())
        static = [x.clone() for x in share_of(layout, self.rank, SEQUENCE, *whole[0])]
        local = [rows_of(x, layout.local_ranges(self.rank)).clone() for x in whole[0]]
        call(*static)
        layer(*local)
        torch.cuda.synchronize()
        dist.barrier()
        found = {}
        for name, run, memory in (("call", call, static), ("module", layer, local)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = run(*memory)
            for turn in range(4):
                fresh = share_of(layout, self.rank, SEQUENCE, *whole[turn])
                if run is layer:
                    fresh = [rows_of(x, layout.local_ranges(self.rank)) for x in whole[turn]]
                for kept, new in zip(memory, fresh, strict=True):
                    kept.copy_(new)
                call.buffer.fill_(float("nan"))
                torch.cuda.synchronize()
                dist.barrier()
                graph.replay()
                torch.cuda.synchronize()
                found[f"{name} {turn}"] = same_bits(out, expected[turn])
                dist.barrier()
            del graph
        other = UlyssesLayout.even(512, 2 * self.ranks, 128, self.ranks)
        for name, attempt in {
            "call": lambda: prepare_ulysses(other, BF16, mode="fused", **self.settings()),
            "span": lambda: PeerSpan((4,), BF16),
        }.items():
            message, refused = "no error", torch.cuda.CUDAGraph()
            with torch.cuda.graph(refused, capture_error_mode="thread_local"):
                static[0].add_(0)
                message = message_of(attempt)
            found[f"{name} in a capture is refused"] = "inside a CUDA-graph capture; warm up first" in message
            del refused
        torch.cuda.synchronize()
        return found

    def steady(self):
        """Calls after the first take no memory from the driver."""
        layout, whole, _ = self.small()
        share = share_of(layout, self.rank, SEQUENCE, *whole[0])
        found = {}
        for mode in ("fused", "serial"):
            call = prepare_ulysses(layout, BF16, mode=mode, **self.settings())
            for _ in range(3):
                call(*share)
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
            for _ in range(20):
                call(*share)
            torch.cuda.synchronize()
            found[mode] = (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == before
        return found

    def compiled(self):
        """torch.compile keeps calls and modules whole; also where it moves code to Triton, if that is there."""
        layout, whole, expected = self.small()
        call = prepare_ulysses(layout, BF16, mode="fused", **self.settings())
        layer = UlyssesAttention(layout, BF16, mode="fused", **self.settings())
        settings = {"backend": self.kernel, "mode": "fused"}
        ulysses_attention(*share_of(layout, self.rank, SEQUENCE, *whole[0]), layout=layout, **settings)
        compilers = ["aot_eager"]
        if importlib.util.find_spec("triton") and (shutil.which("gcc") or shutil.which("cc")):
            compilers.append("inductor")
        found = {}
        for compiler in compilers:
            for name, run in {
                "call": call,
                "function": lambda q, k, v: ulysses_attention(q, k, v, layout=layout, **settings),
                "module": layer,
            }.items():
                torch._dynamo.reset()

                def around(q, k, v, run=run):
                    return run(q + 0, k, v) * 1, run(q, k, v + 0) * 1

                whole_graph = torch.compile(around, backend=compiler, fullgraph=True)
                good = True
                for turn in range(3):
                    share = share_of(layout, self.rank, SEQUENCE, *whole[turn])
                    if run is layer:
                        share = [rows_of(x, layout.local_ranges(self.rank)) for x in whole[turn]]
                    good &= all(same_bits(out, expected[turn]) for out in whole_graph(*share))
                found[f"{compiler} {name}"] = good
        return found

    def choice(self):
        """``auto`` decides alike on all ranks, by the bundled platform of this generation, and gives the same bits."""
        layout, whole, expected = self.small()
        call = prepare_ulysses(layout, BF16, mode="auto", **self.settings())
        modes = [None] * self.ranks
        dist.all_gather_object(modes, (call.mode, call.reason))
        out = call(*share_of(layout, self.rank, SEQUENCE, *whole[1]))
        return {"same on all ranks": len(set(modes)) == 1, "bits": same_bits(out, expected[1]), "reason": call.reason}

    def refusals(self):
        """What is refused before anything is launched; the same on all ranks."""
        layout = UlyssesLayout.even(64, 2 * self.ranks, 100, self.ranks)
        good = UlyssesLayout.even(64, 2 * self.ranks, 128, self.ranks)
        mine = self.rank == self.ranks - 1
        closed = PeerSpan(good.span_shape, BF16, device=self.device)
        call = prepare_ulysses(good, BF16, span=closed, mode="fused", **self.settings())
        share = share_of(good, self.rank, SEQUENCE, *model_inputs(good, BF16, 0))
        call(*share)
        torch.cuda.synchronize()
        dist.barrier()
        closed.close()
        return {
            "head dimension 100": message_of(lambda: prepare_ulysses(layout, BF16, mode="fused", **self.settings())),
            "float32": message_of(lambda: prepare_ulysses(good, torch.float32, mode="fused", **self.settings())),
            "shapes that differ": message_of(lambda: PeerSpan((4 + mine,), BF16, device=self.device)),
            "types that differ": message_of(lambda: PeerSpan((4,), FP16 if mine else BF16, device=self.device)),
            "two ranks on one GPU": message_of(lambda: PeerSpan((4,), BF16, device="cuda:0")),
            "no elements": message_of(lambda: PeerSpan((4, 0), BF16, device=self.device)),
            "a closed span": message_of(lambda: call(*share)),
            "its memory": message_of(closed.local),
        }

    def spans(self):
        """Shape, order, bytes and ledger of a span; groups that are not the world."""
        found = {}
        with PeerSpan((3, 5), BF16, device=self.device) as span:
            span.local().fill_(self.rank)
            span.barrier()
            for start in range(self.ranks + 1):
                order = [(start + k) % self.ranks for k in range(self.ranks)]
                slots = span.slots(start)
                found[f"slots from {start}"] = slots.shape == (self.ranks, 3, 5) and slots[:, 0, 0].tolist() == order
            found["of"] = [int(span.of(rank)[2, 4]) for rank in range(self.ranks)] == list(range(self.ranks))
            span.barrier()
            span.of((self.rank + 1) % self.ranks).fill_(100 + self.rank)
            span.barrier()
            found["stores arrive"] = span.local().eq(100 + (self.rank - 1) % self.ranks).all().item()
            (entry,) = [one for one in ledger() if one.shape == (3, 5)]
            found["ledger"] = (entry.ranks, entry.nbytes, entry.mapped_bytes) == (self.ranks, span.nbytes, span.mapped_bytes)
            found["bytes"] = span.mapped_bytes == (2 * self.ranks - 1) * span.nbytes
            torch.cuda.synchronize()
            dist.barrier()
        found["closed"] = span.closed and not any(one.shape == (3, 5) for one in ledger())
        members = [self.ranks - 1] if self.ranks < 4 else [2, 3]
        group = dist.new_group(members)
        if self.rank in members:
            with PeerSpan((7,), torch.float32, group, device=self.device) as span:
                span.local().fill_(self.rank)
                span.barrier()
                found["a group of some ranks"] = span.slots(0)[:, 0].tolist() == members
                span.barrier()
                torch.cuda.synchronize()
        else:
            found["a group of others"] = "is not in this group" in message_of(lambda: PeerSpan((7,), torch.float32, group))
        dist.barrier()
        # The ranks of that group have met once more than the others.
        with PeerSpan((7,), torch.float32, device=self.device) as span:
            span.local().fill_(self.rank)
            span.barrier()
            found["all ranks after a group of some"] = span.slots(0)[:, 0].tolist() == list(range(self.ranks))
            span.barrier()
            torch.cuda.synchronize()
        return found


def message_of(attempt):
    try:
        attempt()
    except XStageError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


CHECKS = {
    "spans": lambda checks: checks.spans(),
    "in flight": lambda checks: checks.in_flight(),
    "rounds, barrier": lambda checks: checks.rounds(BARRIER),
    "rounds, inputs": lambda checks: checks.rounds(INPUTS),
    "loaded": lambda checks: checks.loaded(),
    "graph": lambda checks: checks.graph(),
    "steady": lambda checks: checks.steady(),
    "compiled": lambda checks: checks.compiled(),
    "choice": lambda checks: checks.choice(),
    "refusals": lambda checks: checks.refusals(),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="also keep the summary here, as OUT.RANK.json")
    parser.add_argument("--backends", default=",".join(kernel.name for kernel in BACKENDS))
    parser.add_argument(
        "--only", help="a case or check by name, or beginnings of names, comma-separated ('127', 'spans,rounds')"
    )
    parser.add_argument("--limit-s", type=float, default=100, help="seconds that one case or check may take")
    arguments = parser.parse_args()
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    table = cases(ranks)
    try:
        names = chosen([*table, *CHECKS], arguments.only)
    except ValueError as error:
        parser.error(str(error))
    # The launcher ends this rank when another one ended: then it says where it was, too.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    torch.cuda.set_device(local)
    # A peer that died must not keep this one for long.
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local), timeout=timedelta(seconds=90))
    rank = dist.get_rank()
    summary = {"rank": rank, "ranks": ranks, "torch": torch.__version__, "kernels": {}, "seconds": {}}
    run = Run(summary, rank, arguments.out, arguments.limit_s)
    for kernel in (kernel for kernel in BACKENDS if kernel.name in arguments.backends.split(",")):
        checks = Checks(kernel)
        reason = kernel.refusal(128, BF16, checks.device)
        if reason:
            summary["kernels"][kernel.name] = {"skipped": reason}
            continue
        for name in names:
            run.check(kernel.name, name, functools.partial(checks.find, name, table))
    torch.cuda.synchronize()
    run.end(**{"ledger at the end": [str(entry) for entry in ledger()]})
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
