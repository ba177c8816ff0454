"""FlashAttention-4 with counters against the stock kernel on one GPU, without a peer: bits, every counter, then time.

    PYTHONPATH=. python tests/attention/fa4_arrival_check.py [--only TEXT,TEXT] [--limit-s 100] [--no-timing]

On Blackwell, where nobody ran it, set XSTAGE_ALLOW_UNRUN=1.

Output and counters lie in local memory of the form that peers' memory has. Output buffers hold NaN before each run and are
compared as a whole, so that a row that nobody wrote and a store beside the output are both seen. Cases after the limit are
named and count as failures. Cases with awaited rows (--only awaits) wait for the very counters that they raise: the kernel must
leave them at 0, and must not end while one tile that another stream counts is missing.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch

from xstage_plugin.attention.fa4_arrival import FlashAttention4Arrival
from xstage_plugin.attention.kernels import fa4_launch
from xstage_plugin.attention.kernels.tile_walk import COMPLETE, ISSUED, SMEM_FREE

BF16, FP16 = torch.bfloat16, torch.float16
LAUNCHES = 3
IN_FLIGHT = 20
# How the destinations of a launch stand: none (one destination), as the kernel's batch, as its heads.
ONE, BATCH, HEADS = "one", "slots as batch", "head by head"
LATE_S = 2e-3  # how long a missing tile is held back
SPARE_ROWS = 5  # counters have more rows than a launch writes, as where ranks own unequally many


@dataclass(frozen=True)
class Case:
    """One launch; ``slots`` destinations where ``form`` is not ``ONE``, else a batch of so many sequences.

    ``ctas``: at most so many; 0: all SMs. ``awaits``: the kernel waits for its own counters. ``late``: and for one tile more.
    """

    rows: int
    heads: int
    head_dim: int = 128
    kv_rows: int = 0
    kv_heads: int = 0
    slots: int = 1
    form: str = ONE
    dtype: torch.dtype = BF16
    causal: bool = False
    ctas: int = 0
    awaits: bool = False
    late: bool = False

    def __str__(self):
        kv = f"{self.kv_rows or self.rows} keys, {self.kv_heads or self.heads} kv heads"
        what = f"{self.slots} x {self.rows} rows, {self.heads} heads, d {self.head_dim}, {kv}, {self.form}"
        what += (", fp16" if self.dtype == FP16 else "") + (", causal" if self.causal else "")
        what += f", {self.ctas} CTAs" if self.ctas else ""
        return what + (", awaits" if self.awaits else "") + (" a late tile" if self.late else "")


# In this order, and neighbours share a kernel: what matters most has been run when time runs out.
CASES = (
    *(
        Case(rows, heads, slots=batch, awaits=True)
        for rows, heads, batch in ((1, 1, 1), (1000, 5, 1), (129, 2, 2), (1000, 3, 3))
    ),
    *(Case(4100, 4, kv_rows=8192, slots=2, form=form, awaits=True) for form in (HEADS, BATCH)),
    *(Case(1000, 5, slots=batch, awaits=True, late=True) for batch in (1, 2)),
    *(Case(rows, 4, slots=batch, ctas=3, awaits=True) for rows, batch in ((20000, 1), (1000, 3))),
    *(Case(rows, 4, causal=True, slots=batch, awaits=True) for rows, batch in ((1000, 1), (129, 3), (8192, 1))),
    *(Case(rows, heads) for rows, heads in ((1, 1), (127, 2), (128, 3), (129, 4), (1000, 5), (8192, 4))),
    *(Case(rows, 2, slots=batch) for rows, batch in ((129, 2), (1000, 3))),
    Case(1, 4, kv_rows=8192),
    Case(20000, 5, kv_rows=64),
    *(Case(rows, 4, kv_rows=2 * rows, slots=2, form=HEADS) for rows in (1, 129, 4096)),
    *(Case(rows, 4, kv_rows=2 * rows, slots=2, form=BATCH) for rows in (127, 4096)),
    *(Case(rows, 4, head_dim=64, slots=batch) for rows, batch in ((1, 1), (191, 1), (193, 2), (8192, 1))),
    *(Case(rows, 4, head_dim=96, slots=batch) for rows, batch in ((1, 1), (191, 1), (193, 2), (8192, 1))),
    Case(20000, 5, head_dim=96, kv_rows=64),
    *(Case(rows, 4, causal=True, slots=batch) for rows, batch in ((1, 1), (129, 3), (1000, 1), (8192, 1))),
    Case(1000, 4, kv_rows=3000, causal=True),
    *(Case(rows, 4, kv_heads=2, slots=batch) for rows, batch in ((129, 2), (8192, 1))),
    *(Case(rows, 4, dtype=FP16) for rows in (129, 8192)),
    *(Case(rows, 4, head_dim=96, causal=True) for rows in (193, 8192)),
    *(Case(rows, 5, head_dim=64, kv_heads=1, dtype=FP16, causal=True, slots=2) for rows in (129, 4096)),
)


class Launch:
    """A case's tensors as the kernel takes them, and a fresh output and fresh counters at will."""

    def __init__(self, case, seed=0):
        torch.manual_seed(seed)
        self.case = case
        rows, heads, d = case.rows, case.heads, case.head_dim
        kv_rows, kv_heads = case.kv_rows or rows, case.kv_heads or heads

        def noise(*shape):
            return torch.randn(*shape, device="cuda").to(case.dtype)

        self.q = noise(case.slots, rows, heads, d)
        sequences = case.slots if case.form == ONE else 1
        self.k, self.v = noise(sequences, kv_rows, kv_heads, d), noise(sequences, kv_rows, kv_heads, d)
        if case.form == BATCH:
            self.k, self.v = (x.expand(case.slots, -1, -1, -1) for x in (self.k, self.v))
        elif case.form == HEADS:
            self.q, self.k, self.v = self.q.permute(2, 1, 0, 3), *(x[0].transpose(0, 1).unsqueeze(2) for x in (self.k, self.v))

    def output(self):
        """A poisoned buffer and the kernel's view of it: our heads among more, our rows among more."""
        case = self.case
        buffer = torch.full((case.slots, case.rows + SPARE_ROWS, case.heads + 1, case.head_dim), float("nan"), device="cuda")
        buffer = buffer.to(case.dtype)
        view = buffer[:, : case.rows, 1:]
        return buffer, view.permute(2, 1, 0, 3) if case.form == HEADS else view

    def counters(self):
        """Zeroed counters of every destination and the kernel's view of them."""
        case = self.case
        counters = torch.zeros(case.slots, case.rows + SPARE_ROWS, dtype=torch.int32, device="cuda")
        own = counters[:, : case.rows]
        if case.form == HEADS:
            return counters, own.unsqueeze(0).expand(case.heads, -1, -1)
        return counters, own.unsqueeze(1).expand(-1, case.heads, -1)

    def raised(self, block_rows, launches):
        """What the counters hold after so many launches."""
        counters = torch.zeros(self.case.slots, self.case.rows + SPARE_ROWS, dtype=torch.int32, device="cuda")
        if not self.case.awaits:
            counters[:, : self.case.rows : block_rows] = launches * self.case.heads
        return counters

    def awaits(self, counters):
        """How a launch waits for the tiles that it announces."""
        case = self.case
        return {"awaits": counters[:, : case.rows], "expected": case.heads + case.late} if case.awaits else {}

    def attention(self):
        return {"softmax_scale": self.case.head_dim**-0.5, "causal": self.case.causal}


def bits(tensor):
    return tensor.view(torch.int16)


def faults_when_late(launch, kernel, got, view, expected):
    """What is wrong with a kernel that waits for a tile of every block that another stream counts later."""
    case = launch.case
    counters, arrivals = launch.counters()
    blocks = counters[:, : case.rows : kernel.block_rows(case.head_dim, case.dtype, case.causal)]
    assert blocks.numel() * case.heads < torch.cuda.get_device_properties(0).multi_processor_count, "no SM is left to count"
    other, ended = torch.cuda.Stream(), torch.cuda.Event()

    def count():
        with torch.cuda.stream(other):
            blocks.add_(1)

    def attend():
        kernel.announce(launch.q, launch.k, launch.v, view, arrivals, **launch.attention(), **launch.awaits(counters))

    # Once with nothing late: a kernel that is loaded for its first launch may wait for those that run.
    count()
    torch.cuda.synchronize()
    attend()
    torch.cuda.synchronize()
    attend()
    ended.record()
    time.sleep(LATE_S)
    if ended.query():
        yield "the kernel ended before the last tile was counted"
    count()
    torch.cuda.synchronize()
    if counters.any():
        yield f"{int(counters.count_nonzero())} counters are not cleared"
    if not torch.equal(bits(got), bits(expected)):
        yield f"{int((bits(got) != bits(expected)).sum())} of {got.numel()} values differ"


def faults(case, kernel):
    """What is wrong with a case, in words."""
    launch = Launch(case)
    expected, view = launch.output()
    kernel(launch.q, launch.k, launch.v, view, **launch.attention())
    if case.late:
        yield from faults_when_late(launch, kernel, *launch.output(), expected)
        return
    counters, arrivals = launch.counters()
    block_rows = kernel.block_rows(case.head_dim, case.dtype, case.causal)
    how = launch.attention() | launch.awaits(counters)
    for number in range(1, LAUNCHES + 1):
        got, view = launch.output()
        kernel.announce(launch.q, launch.k, launch.v, view, arrivals, **how)
        torch.cuda.synchronize()
        if not torch.equal(bits(got), bits(expected)):
            yield f"launch {number}: {int((bits(got) != bits(expected)).sum())} of {got.numel()} values differ"
        if not torch.equal(counters, launch.raised(block_rows, number)):
            wrong = (counters != launch.raised(block_rows, number)).nonzero()[:4].tolist()
            yield f"launch {number}: counters are wrong at {wrong} and maybe elsewhere"
    for _ in range(IN_FLIGHT):
        kernel.announce(launch.q, launch.k, launch.v, view, arrivals, **how)
    torch.cuda.synchronize()
    if not torch.equal(counters, launch.raised(block_rows, LAUNCHES + IN_FLIGHT)):
        yield f"{IN_FLIGHT} launches in flight: counters are wrong"
    if not torch.equal(bits(got), bits(expected)):
        yield f"{IN_FLIGHT} launches in flight: values differ"


def arms(rows, kernel):
    """The same launch by the stock kernel, by ours with counters, with awaited ones, without: 4 heads to 2 destinations."""
    launch = Launch(Case(rows // 2, 4, kv_rows=rows, slots=2, form=HEADS, awaits=True))
    view, arrivals = launch.output()[1], launch.counters()[1]
    cleared, awaited = launch.counters()
    waits = launch.awaits(cleared)
    inputs, scale = (launch.q, launch.k, launch.v, view), launch.case.head_dim**-0.5
    return {
        "stock": lambda: kernel(*inputs, softmax_scale=scale, causal=False),
        "counters": lambda: kernel.announce(*inputs, arrivals, softmax_scale=scale, causal=False),
        "awaits": lambda: kernel.announce(*inputs, awaited, softmax_scale=scale, causal=False, **waits),
        "no counters": lambda: fa4_launch.launch(*inputs, None, None, scale, False, None),
    }


def graph_of(call, calls):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def measured_us(graph, calls):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def print_times(kernel, rounds):
    columns = ("stock", "counters", "awaits", "no counters")
    heading = " ".join(f"{name + ' us':>15}" for name in columns)
    print(f"{'rows':>6} {heading} {'counters / stock':>17} {'awaits / counters':>18}")
    for rows, calls in ((8192, 20), (16384, 10), (32768, 5)):
        graphs = {name: graph_of(call, calls) for name, call in arms(rows, kernel).items()}
        times = {name: [] for name in graphs}
        for number in range(rounds + 1):
            for name in (*graphs, *reversed(graphs)):
                time_us = measured_us(graphs[name], calls)
                if number:  # the first round warms up
                    times[name].append(time_us)
        medians = [statistics.median(times[name]) for name in columns]
        stock, counted, awaited, _ = medians
        row = " ".join(f"{median:15.1f}" for median in medians)
        print(f"{rows:6} {row} {counted / stock:17.4f} {awaited / counted:18.4f}", flush=True)


def print_spans(kernel, rows=8192):
    launch = Launch(Case(rows // 2, 4, kv_rows=rows, slots=2, form=HEADS))
    view, arrivals = launch.output()[1], launch.counters()[1]
    spans = torch.zeros(fa4_launch.spans_shape(launch.q, False), dtype=torch.int64, device="cuda")
    for _ in range(3):
        kernel.announce(launch.q, launch.k, launch.v, view, arrivals, spans=spans, **launch.attention())
    torch.cuda.synchronize()
    ns, cycles = spans.flatten(0, 2).cpu().unbind(-1)
    for name, entry in (("shared memory free", SMEM_FREE), ("complete", COMPLETE)):
        after_ns, after_cycles = (x[:, entry] - x[:, ISSUED] for x in (ns, cycles))
        print(
            f"spans at {rows}: {name} after {after_ns.median()} ns median, {after_ns.max()} ns at most; "
            f"{after_cycles.median()} cycles median, {after_cycles.max()} at most"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has one of these texts")
    parser.add_argument("--limit-s", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-timing", action="store_true")
    arguments = parser.parse_args()
    started = time.monotonic()
    kernel = FlashAttention4Arrival()
    few = {ctas: FlashAttention4Arrival(sms=ctas) for ctas in {case.ctas for case in CASES} if ctas}
    refusal = kernel.refusal(128, BF16, torch.device("cuda", 0))
    if refusal:
        sys.exit(refusal)
    texts = [text for text in arguments.only.split(",") if text]
    chosen = [case for case in CASES if not texts or any(text in str(case) for text in texts)]
    failed = []
    timed = arguments.no_timing
    for case in chosen:
        if not timed and case.head_dim != CASES[0].head_dim:  # behind the cases of the kernels that are timed
            print_times(kernel, arguments.rounds)
            print_spans(kernel)
            timed = True
        late = time.monotonic() - started > arguments.limit_s
        found = ["not run: out of time"] if late else list(faults(case, few.get(case.ctas, kernel)))
        failed += [case] if found else []
        print(f"{time.monotonic() - started:6.1f} s  {'FAILED' if found else 'ok':6} {case}  {'; '.join(found)}", flush=True)
    if not timed:
        print_times(kernel, arguments.rounds)
        print_spans(kernel)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} cases passed in {time.monotonic() - started:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
