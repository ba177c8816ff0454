"""One rank of the check of arriving rows on GPUs, started by torchrun from test_arrival_gpu.py: a JSON summary, kept after
every check.

Each row block is compared the moment its counters say that it is there: the consumer gets one part a block, and a kernel
that the stream puts right behind the wait holds it against serial attention, bit by bit. Buffers hold NaN before each run.
"""

import argparse
import ctypes
import faulthandler
import functools
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ulysses_ranks import BF16, ROUNDS, SLEEP_CYCLES, Checks, cases, model_inputs, rows_of, same_bits, share_of
from ulysses_run import Run, chosen

from xstage_plugin.attention.arrival_rows import UNWAITED
from xstage_plugin.attention.arrival_wait import include_folder
from xstage_plugin.attention.arriving_backend import ARRIVING, arriving_backend
from xstage_plugin.attention.layout import OWN_FIRST, OWN_LAST, SEQUENCE, UlyssesLayout
from xstage_plugin.attention.peer_span import PeerSpan, ledger
from xstage_plugin.attention.projection import OutputProjection, projected
from xstage_plugin.attention.routes import BARRIER, INPUTS
from xstage_plugin.attention.ulysses import UlyssesAttention, prepare_ulysses, release_ulysses, ulysses_attention
from xstage_plugin.burst_gap.nvrtc import CudaModule, compile_cuda

EVERY_BLOCK = 2**20  # more parts than there are row blocks
# Order of q and of the tiles, and parts.
ARMS = ((SEQUENCE, True, None), (OWN_LAST, True, EVERY_BLOCK), (OWN_LAST, False, EVERY_BLOCK), (OWN_FIRST, True, 1))
# Somebody's own consumer: a block of threads a row block, which waits for it by itself.
COMPARE_ROWS = b"""
#include "arrival.cuh"
extern "C" __global__ void compare_rows(const __grid_constant__ xstage::Arrivals arrivals, const unsigned short* out,
                                        const unsigned short* expected, unsigned long long* wrong, unsigned num_rows,
                                        unsigned row_elements) {
    const unsigned first_row = blockIdx.x * arrivals.block_rows;
    const unsigned count = min(arrivals.block_rows, num_rows - first_row);
    if (threadIdx.x == 0) xstage::wait_for_rows(arrivals, 0, first_row, count);
    __syncthreads();
    for (unsigned i = threadIdx.x; i < count * row_elements; i += blockDim.x) {
        const unsigned long long at = static_cast<unsigned long long>(first_row) * row_elements + i;
        if (out[at] != expected[at]) atomicAdd(wrong, 1ull);
    }
}
"""


class Comparing:
    """A consumer that holds what it gets against ``expected``: ``wrong`` parts, on the device, and ``calls``."""

    def __init__(self, expected):
        self.expected, self.calls = expected, 0
        self.wrong = torch.zeros((), dtype=torch.int64, device=expected.device)

    def __call__(self, rows, first_row):
        self.calls += 1
        # NaN, that is a row that has not come, equals nothing.
        self.wrong += (rows != self.expected[:, first_row : first_row + rows.shape[1]]).any()


class ArrivalChecks(Checks):
    """What one rank found under one kernel."""

    def find(self, name, table):
        """What the case of ``table`` or the check of this name finds; {refused: reason} where the kernel cannot run a case."""
        if name not in table:
            found = CHECKS[name](self)
            release_ulysses()
            return found
        layout, dtype, _ = table[name]
        refused = self.kernel.refusal(layout.head_dim, dtype, self.device)
        return {"refused": refused} if refused else self.case(*table[name])

    def poison(self, call):
        call.buffer.fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier()  # nobody may poison after a peer's store

    def clear(self, call):
        """Whether this rank's counters are 0 once all ranks have ended."""
        torch.cuda.synchronize()
        dist.barrier()
        return not bool(call.board.counters.any())

    def case(self, layout, dtype, causal):
        """Every arm gives the bits of serial attention, part by part: {arm: right}."""
        whole = model_inputs(layout, dtype, 11)
        serial = prepare_ulysses(layout, dtype, mode="serial", causal=causal, **self.settings())
        reference = serial(*share_of(layout, self.rank, SEQUENCE, *whole)).clone()
        found = {"serial is finite": not bool(reference.isnan().any())}
        for order, head_by_head, parts in ARMS:
            consumer = Comparing(reference)
            call = prepare_ulysses(
                layout,
                dtype,
                mode="fused",
                q_order=order,
                causal=causal,
                consume=consumer,
                parts=parts,
                head_by_head=head_by_head,
                **self.settings(),
            )
            share = share_of(layout, self.rank, order, *whole)
            name = f"{order}, {'head by head' if head_by_head else 'owner by owner'}, {parts or 'default'} parts"
            for turn in range(2):
                self.poison(call)
                out = call(*share)
                found[f"{name}, call {turn}"] = same_bits(out, reference)
                found[f"{name}, call {turn}, counters"] = self.clear(call)
            found[f"{name}, parts"] = not int(consumer.wrong) and consumer.calls == 2 * len(call.consumption.parts.ranges)
            found[f"{name} stays within its rows"] = bool(call.buffer[:, layout.local_rows(self.rank) :].isnan().all())
        consumer = Comparing(reference)
        options = {"consume": consumer, "parts": EVERY_BLOCK}
        layer = UlyssesAttention(layout, dtype, mode="fused", causal=causal, **options, **self.settings())
        self.poison(layer.call)
        out = layer(*(rows_of(x, layout.local_ranges(self.rank)) for x in whole))
        found["module"] = same_bits(out, reference) and not int(consumer.wrong)
        found["module, counters"] = self.clear(layer.call)
        release_ulysses()
        return found

    def consuming(self, layout, **more):
        """A call with a part a row block; its consumer is given at every call."""
        settings = {"mode": "fused", "q_order": OWN_LAST, "consume": print, "parts": EVERY_BLOCK} | more
        return prepare_ulysses(layout, BF16, **settings, **self.settings())

    def rounds(self, ordering):
        """Changing inputs, one rank late before its stores and another one late to read: {what: right}."""
        layout, whole, expected = self.small()
        consumers = [Comparing(one) for one in expected]
        if ordering == INPUTS:
            layer = UlyssesAttention(layout, BF16, mode="fused", consume=print, parts=EVERY_BLOCK, **self.settings())
            call, shares = layer.call, [[rows_of(x, layout.local_ranges(self.rank)) for x in one] for one in whole]

            def run(turn):
                call.consumer = consumers[turn % 4]
                return layer(*shares[turn % 4])

        else:
            call, shares = self.consuming(layout), [share_of(layout, self.rank, OWN_LAST, *one) for one in whole]

            def run(turn):
                return call(*shares[turn % 4], consume=consumers[turn % 4])

        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for turn in range(ROUNDS):
            if turn % self.ranks == self.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            out = run(turn)
            if (turn // 2) % self.ranks == self.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            wrong += (out != expected[turn % 4]).any()
        self.require_ended(f"rounds, {ordering}")
        found = {"rows": not int(wrong), "parts": not sum(int(one.wrong) for one in consumers)}
        blocks = len(call.consumption.parts.ranges)
        found["a part a block"] = blocks > 1 and sum(one.calls for one in consumers) == ROUNDS * blocks
        return found | {"counters": self.clear(call)}

    def kernel_waits(self):
        """The kernel ends when this rank's rows are there, in place of a closing barrier: {what: right}."""
        layout, whole, expected = self.small()
        consumers, found = [Comparing(one) for one in expected], {}
        shares = [share_of(layout, self.rank, OWN_LAST, *one) for one in whole]
        for name, consumes in (("no consumer", False), ("one part", True)):
            call = self.consuming(layout, parts=None, consume=print if consumes else None)
            wrong = torch.zeros((), dtype=torch.int64, device=self.device)
            for turn in range(ROUNDS):
                if turn % self.ranks == self.rank:
                    torch.cuda._sleep(SLEEP_CYCLES)
                out = call(*shares[turn % 4], consume=consumers[turn % 4] if consumes else None)
                if (turn // 2) % self.ranks == self.rank:
                    torch.cuda._sleep(SLEEP_CYCLES)
                wrong += (out != expected[turn % 4]).any()
            self.require_ended(f"kernel waits, {name}")
            found |= {f"{name}, rows": not int(wrong), f"{name}, counters": self.clear(call)}
        return found | {"parts": not sum(int(one.wrong) for one in consumers)}

    def loaded(self):
        """A second stream copies memory and over the link meanwhile: {what: right}."""
        layout, whole, expected = self.small()
        call, consumers = self.consuming(layout), [Comparing(one) for one in expected]
        shares = [share_of(layout, self.rank, OWN_LAST, *one) for one in whole]
        with PeerSpan((2**25,), BF16, device=self.device) as load:
            local, copy = (torch.ones(2**25, dtype=BF16, device=self.device) for _ in range(2))
            peer = load.of((self.rank + 1) % self.ranks)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            for turn in range(ROUNDS):
                with torch.cuda.stream(side):
                    copy.copy_(local)
                    peer.copy_(copy)
                call(*shares[turn % 4], consume=consumers[turn % 4])
            self.require_ended("loaded")
            return {"parts": not sum(int(one.wrong) for one in consumers), "counters": self.clear(call)}

    def graph(self):
        """Captured once, replayed with other inputs in the same memory; consumer, waits and all."""
        layout, whole, expected = self.small()
        fresh, local = (
            [share_of(layout, self.rank, SEQUENCE, *one) for one in whole],
            [[rows_of(x, layout.local_ranges(self.rank)) for x in one] for one in whole],
        )
        found = {}
        for name in ("call", "module"):
            shares = fresh if name == "call" else local
            static, kept = [x.clone() for x in shares[0]], expected[0].clone()
            consumer = Comparing(kept)
            if name == "call":
                run = call = self.consuming(layout, q_order=SEQUENCE, consume=consumer)
            else:
                options = {"consume": consumer, "parts": EVERY_BLOCK}
                run = UlyssesAttention(layout, BF16, mode="fused", **options, **self.settings())
                call = run.call
            run(*static)
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = run(*static)
            for turn in range(4):
                for memory, new in zip((*static, kept), (*shares[turn], expected[turn]), strict=True):
                    memory.copy_(new)
                self.poison(call)
                graph.replay()
                torch.cuda.synchronize()
                found[f"{name} {turn}"] = same_bits(out, expected[turn])
                found[f"{name} {turn}, counters"] = self.clear(call)
            found[f"{name}, parts"] = not int(consumer.wrong)
            graph.reset()
        return found

    def own_kernel(self):
        """A consumer whose kernel waits for each row block by arrival.cuh, put on the stream before its rows are there."""
        layout, whole, expected = self.small()
        major, minor = torch.cuda.get_device_capability(self.device)
        options = (f"--gpu-architecture=sm_{major}{minor}", f"--include-path={include_folder()}")
        module = CudaModule(compile_cuda(COMPARE_ROWS, "compare_rows.cu", options))
        wrong, number = torch.zeros(1, dtype=torch.int64, device=self.device), [0]

        def consume(rows, first_row):
            stream = torch.cuda.current_stream().cuda_stream
            addresses = (rows.data_ptr(), expected[number[0]].data_ptr(), wrong.data_ptr())
            sizes = (rows.shape[1], rows[0, 0].numel())
            blocks = -(-rows.shape[1] // call.board.block_rows)
            arguments = (*(ctypes.c_uint64(x) for x in addresses), *(ctypes.c_uint32(x) for x in sizes))
            module.launch("compare_rows", blocks, 128, stream, call.board.on_device(), *arguments)

        call = self.consuming(layout, consume=consume, parts=UNWAITED)
        for turn in range(ROUNDS):
            number[0] = turn % 4
            if turn % self.ranks == self.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            call(*share_of(layout, self.rank, OWN_LAST, *whole[turn % 4]))
        self.require_ended("own kernel")
        return {"rows": not int(wrong), "counters": self.clear(call)}

    def steady(self):
        """Calls after the first take no memory from the driver."""
        layout, whole, _ = self.small()
        weight = torch.randn(256, layout.total_heads * 128, dtype=BF16, device=self.device)
        projection = OutputProjection(weight, batch=1, rows=layout.local_rows(self.rank))
        call, share = self.consuming(layout, consume=projection), share_of(layout, self.rank, OWN_LAST, *whole[0])
        for _ in range(3):
            call(*share)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        for _ in range(20):
            call(*share)
        torch.cuda.synchronize()
        return {"memory": (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == before, "counters": self.clear(call)}

    def projection(self):
        """The projection of parts, of one and of two sequences, against that of all rows: within twice bf16's own error."""
        found = {}
        for batch, parts in ((1, 1), (1, 2), (1, 4), (2, 2)):
            layout = UlyssesLayout.even(2048, 4 * self.ranks, 128, self.ranks, batch=batch)
            width = layout.total_heads * 128
            generator = torch.Generator(self.device).manual_seed(3)
            weight, bias = (
                torch.randn(shape, dtype=BF16, device=self.device, generator=generator) for shape in ((width, width), (width,))
            )
            consumer = OutputProjection(weight, bias, batch=batch, rows=layout.local_rows(self.rank))
            consumer.result.fill_(float("nan"))
            call = self.consuming(layout, consume=consumer, parts=parts)
            out = call(*share_of(layout, self.rank, OWN_LAST, *model_inputs(layout, BF16, 5)))
            exact = projected(out.double(), weight.double(), bias.double())
            allowed = 2 * (projected(out, weight, bias).double() - exact).abs().max()
            found[f"{parts} parts, batch {batch}"] = bool((consumer.result.double() - exact).abs().max() <= allowed)
        return found

    def public(self):
        """ulysses_attention with a consumer, beside calls without one over the same output."""
        layout, whole, expected = self.small()
        consumers = [Comparing(one) for one in expected]
        settings = {"layout": layout, "backend": self.kernel, "mode": "fused"}
        good = True
        for turn in range(8):
            share = share_of(layout, self.rank, SEQUENCE, *whole[turn % 4])
            out = ulysses_attention(*share, **settings, consume=consumers[turn % 4], parts=EVERY_BLOCK)
            good &= same_bits(out, expected[turn % 4])
            good &= same_bits(ulysses_attention(*share, **settings), expected[turn % 4])
        return {"rows": good, "parts": not sum(int(one.wrong) for one in consumers)}


CHECKS = {
    "rounds, barrier": lambda checks: checks.rounds(BARRIER),
    "rounds, inputs": lambda checks: checks.rounds(INPUTS),
    "kernel waits": lambda checks: checks.kernel_waits(),
    "loaded": lambda checks: checks.loaded(),
    "graph": lambda checks: checks.graph(),
    "own kernel": lambda checks: checks.own_kernel(),
    "steady": lambda checks: checks.steady(),
    "projection": lambda checks: checks.projection(),
    "public": lambda checks: checks.public(),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="also keep the summary here, as OUT.RANK.json")
    parser.add_argument("--backends", default=",".join(ARRIVING))
    parser.add_argument(
        "--only", help="a case or check by name, or beginnings of names, comma-separated ('127', 'rounds,graph')"
    )
    parser.add_argument("--limit-s", type=float, default=100, help="seconds that one case or check may take")
    arguments = parser.parse_args()
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    table = cases(ranks)
    try:
        # The short ones first: a fault in the counters shows in them.
        names = chosen([*CHECKS, *table], arguments.only)
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
    for name in arguments.backends.split(","):
        checks = ArrivalChecks(arriving_backend(name, always=True))
        reason = checks.kernel.refusal(128, BF16, checks.device)
        if reason:
            summary["kernels"][name] = {"skipped": reason}
            continue
        for check in names:
            run.check(name, check, functools.partial(checks.find, check, table))
    torch.cuda.synchronize()
    run.end(**{"ledger at the end": [str(entry) for entry in ledger()]})
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
