"""FlashAttention-3 with counters against a build without our patch on one GPU, without a peer: bits, every counter, then time.

    PYTHONPATH=. python tests/attention/fa3_arrival_check.py [--stock PACKAGE] [--only TEXT,TEXT] [--limit-s 60] [--no-timing]

PACKAGE is a build of the tree without XSTAGE_ARRIVALS, importable under a name of its own, which is also the namespace of its
operators. Without it the reference is the patched build's own call, without counters. Output and counters lie in local memory
of the form that peers' memory has. Output buffers hold NaN before each run and are compared as a whole, so that a row that
nobody wrote and a store beside the output are both seen. Every case also runs with a wait for its own counters, and some with
a count that comes late from another stream. Cases after the limit are named and count as failures.
"""

import argparse
import importlib
import statistics
import sys
import time
from dataclasses import dataclass

import torch

from xstage_plugin.attention.fa3_arrival import FlashAttention3Arrival

BF16, FP16 = torch.bfloat16, torch.float16
LAUNCHES = 3
CALLS, TRIALS = 10, 20
LATE_CYCLES = 4_000_000  # about 2 ms, of launches that are over in a tenth of it
SPARE_ROWS, SPARE_HEADS = 5, 1
# What the destinations of a launch are to the kernel: its batch, or its heads (then its batch are this rank's heads).
BATCH, HEADS = "slots as batch", "slots as heads"


@dataclass(frozen=True)
class Case:
    """One launch to ``slots`` destinations of ``rows`` rows and ``heads`` heads each."""

    rows: int
    heads: int
    head_dim: int = 128
    slots: int = 1
    form: str = BATCH
    kv_rows: int = 0
    kv_heads: int = 0
    dtype: torch.dtype = BF16
    causal: bool = False
    sms: int | None = None

    def __str__(self):
        what = f"{self.slots} x {self.rows} rows, {self.heads} heads, d {self.head_dim}, {self.form}"
        what += f", {self.kv_rows} keys" if self.kv_rows else ""
        what += f", {self.kv_heads} kv heads" if self.kv_heads else ""
        what += f", {self.sms} SMs" if self.sms else ""
        return what + (", fp16" if self.dtype == FP16 else "") + (", causal" if self.causal else "")


LENGTHS = ((1, 1), (127, 2), (128, 3), (129, 4), (1000, 5), (8192, 4))
CASES = (
    *(Case(rows, heads, d) for d in (128, 64, 96) for rows, heads in LENGTHS),
    *(Case(rows, heads, d, causal=True) for d in (128, 64, 96) for rows, heads in LENGTHS),
    *(Case(rows, 4, d, slots, BATCH, kv_rows=slots * rows) for d in (128, 64) for rows, slots in ((1, 2), (129, 3), (4096, 2))),
    *(Case(rows, 4, d, slots, HEADS, kv_rows=slots * rows) for d in (128, 64) for rows, slots in ((1, 2), (129, 3), (4096, 2))),
    *(Case(rows, 4, d, 2, kv_heads=2) for d in (128, 64) for rows in (129, 4096)),
    *(Case(rows, 5, kv_heads=1, slots=3, causal=causal) for rows in (191, 1000) for causal in (False, True)),
    Case(1, 4, kv_rows=8192),
    Case(20000, 5, kv_rows=64),
    Case(1000, 4, kv_rows=3000, causal=True),
    *(Case(4096, 4, sms=sms, causal=causal) for sms in (2, 101) for causal in (False, True)),
    *(Case(rows, 4, d, dtype=FP16, causal=causal) for rows in (129, 4096) for d in (128, 64) for causal in (False, True)),
)


# With SMs left for the stream that is late. Few CTAs wait for many blocks, many for few.
LATE_CASES = (
    Case(4096, 1, slots=3, kv_rows=64, sms=2),
    Case(1000, 4, slots=2, kv_rows=64, form=HEADS, sms=100),
    Case(1000, 3, 64, causal=True, sms=100),
)


class Launch:
    """A case's tensors as the kernel takes them, and fresh outputs and counters of the destinations at will."""

    def __init__(self, case):
        torch.manual_seed(case.rows)
        self.case = case
        self.kernel = FlashAttention3Arrival(case.sms)
        rows, heads, d = case.rows, case.heads, case.head_dim
        kv_rows, kv_heads = case.kv_rows or rows, case.kv_heads or heads
        noise = [torch.randn(*shape, device="cuda").to(case.dtype) for shape in (
            (case.slots, rows, heads, d), (1, kv_rows, kv_heads, d), (1, kv_rows, kv_heads, d)
        )]  # fmt: skip
        self.q = self.as_kernel_sees(noise[0])
        self.k, self.v = (
            (x.expand(case.slots, -1, -1, -1) if case.form == BATCH else x[0].transpose(0, 1).unsqueeze(2)) for x in noise[1:]
        )
        self.block = self.kernel.block_rows(d, case.dtype, case.causal)

    def as_kernel_sees(self, x):
        """[slots, rows, heads, d] as [kernel batch, rows, kernel heads, d]."""
        return x if self.case.form == BATCH else x.permute(2, 1, 0, 3)

    def fresh_out(self):
        case = self.case
        shape = (case.slots, case.rows + SPARE_ROWS, case.heads + SPARE_HEADS, case.head_dim)
        return torch.full(shape, float("nan"), device="cuda", dtype=case.dtype)

    def fresh_counters(self):
        return torch.zeros(self.case.slots, self.case.rows + SPARE_ROWS, device="cuda", dtype=torch.int32)

    def view(self, out):
        return self.as_kernel_sees(out[:, : self.case.rows, : self.case.heads])

    def arrivals(self, counters):
        per_slot = counters[:, : self.case.rows]
        if self.case.form == BATCH:
            return per_slot[:, None].expand(-1, self.case.heads, -1)
        return per_slot[None].expand(self.case.heads, -1, -1)

    def expected(self, launches):
        """Counters after so many launches."""
        counters = self.fresh_counters()
        counters[:, : self.case.rows : self.block] = launches * self.case.heads
        return counters

    def settings(self):
        return {"softmax_scale": self.case.head_dim**-0.5, "causal": self.case.causal}

    def announce(self, out, counters, expected=0):
        """``expected``: count of a block to wait for; 0: no wait."""
        awaited = {"awaits": counters[:, : self.case.rows], "expected": expected} if expected else {}
        self.kernel.announce(self.q, self.k, self.v, self.view(out), self.arrivals(counters), **self.settings(), **awaited)

    def call(self, out):
        self.kernel(self.q, self.k, self.v, self.view(out), **self.settings())


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def stock_call(package):
    """The call of an unpatched build."""
    importlib.import_module(f"{package}._C")
    forward = getattr(torch.ops, package).fwd

    def call(launch, out):
        scale, causal = launch.settings().values()
        forward(
            launch.q,
            launch.k,
            launch.v,
            out=launch.view(out),
            softmax_scale=scale,
            is_causal=causal,
            num_splits=1,
            pack_gqa=False,
        )

    return call


def wrong_with(case, stock):
    """What is wrong with one case, empty if nothing is; None where this build has no kernel for it."""
    launch_refusal = FlashAttention3Arrival().refusal(case.head_dim, case.dtype, torch.device("cuda"))
    if launch_refusal:
        return None
    launch = Launch(case)
    reference, plain, counters = launch.fresh_out(), launch.fresh_out(), launch.fresh_counters()
    stock(launch, reference)
    launch.call(plain)
    wrong = [] if same_bits(reference, plain) else ["without counters: other bits than stock"]
    for launches in range(1, LAUNCHES + 1):
        out = launch.fresh_out()
        launch.announce(out, counters)
        torch.cuda.synchronize()
        if not same_bits(reference, out):
            wrong.append(f"launch {launches}: other bits than stock")
        if not torch.equal(counters, launch.expected(launches)):
            bad = (counters != launch.expected(launches)).nonzero()
            first = tuple(bad[0].tolist())
            wrong.append(
                f"launch {launches}: {len(bad)} counters wrong, at {first} {int(counters[first])} instead of "
                f"{int(launch.expected(launches)[first])}"
            )
    out, counters = launch.fresh_out(), launch.fresh_counters()
    launch.announce(out, counters, expected=case.heads)
    torch.cuda.synchronize()
    return "; ".join(wrong + wrong_after_wait(reference, out, counters))


def wrong_after_wait(reference, out, counters):
    wrong = [] if same_bits(reference, out) else ["with a wait: other bits than stock"]
    return wrong + (["with a wait: counters were not cleared"] if counters.any() else [])


def wrong_with_late_count(case, stock):
    """What is wrong with a launch whose last block lacks one count until another stream adds it; as :func:`wrong_with`."""
    if FlashAttention3Arrival().refusal(case.head_dim, case.dtype, torch.device("cuda")):
        return None
    launch = Launch(case)
    reference, out, counters = launch.fresh_out(), launch.fresh_out(), launch.fresh_counters()
    stock(launch, reference)
    last_row = (case.rows - 1) // launch.block * launch.block
    counters[:, : case.rows : launch.block] += 1
    late = counters[-1, last_row : last_row + 1]
    late -= 1
    launch.call(torch.empty_like(out))  # loads the kernel
    torch.cuda.synchronize()
    about_to_add, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LATE_CYCLES)
        about_to_add.record()
        late += 1
    launch.announce(out, counters, expected=case.heads + 1)
    ended.record()
    torch.cuda.synchronize()
    wrong = wrong_after_wait(reference, out, counters)
    early_ms = ended.elapsed_time(about_to_add)
    return "; ".join(wrong + ([f"it ended {early_ms:.3f} ms before the late count"] if early_ms > 0 else []))


def graph_of(call):
    """A CUDA graph of :data:`CALLS` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def replay_us(graph):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end) / CALLS


def time_arms(seq_len, stock):
    """Median us of a call by arm, arms in turn and in reverse."""
    launch = Launch(Case(seq_len // 2, 4, slots=2, kv_rows=seq_len))
    out, counters, awaited = launch.fresh_out(), launch.fresh_counters(), launch.fresh_counters()
    arms = {
        "stock": graph_of(lambda: stock(launch, out)),
        "stock again": graph_of(lambda: stock(launch, out)),
        "patched, no counters": graph_of(lambda: launch.call(out)),
        "patched, counters": graph_of(lambda: launch.announce(out, counters)),
        "patched, counters and wait": graph_of(lambda: launch.announce(out, awaited, expected=launch.case.heads)),
    }
    samples = {name: [] for name in arms}
    for trial in range(TRIALS + 2):
        order = list(arms) if trial % 2 else list(arms)[::-1]
        for name in order:
            elapsed = replay_us(arms[name])
            if trial >= 2:
                samples[name].append(elapsed)
    return {name: statistics.median(values) for name, values in samples.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", help="package of a build without our patch")
    parser.add_argument("--only", default="", help="texts; cases that hold one of them")
    parser.add_argument("--limit-s", type=float, default=60)
    parser.add_argument("--no-timing", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    refusal = FlashAttention3Arrival().refusal(128, BF16, torch.device("cuda"))
    if refusal:
        sys.exit(refusal)
    stock = stock_call(options.stock) if options.stock else lambda launch, out: launch.call(out)
    checks = [(case, str(case), wrong_with) for case in CASES]
    checks += [(case, f"{case}, one count late", wrong_with_late_count) for case in LATE_CASES]
    chosen = [check for check in checks if any(text in check[1] for text in options.only.split(","))]
    faults, passed, absent = [], 0, []
    for case, name, check in chosen:
        if time.monotonic() - began > options.limit_s:
            faults.append(f"{name}: not run, the limit of {options.limit_s:g} s was reached")
            continue
        wrong = check(case, stock)
        if wrong is None:
            absent.append(name)
        elif wrong:
            faults.append(f"{name}: {wrong}")
        else:
            passed += 1
    print(
        f"{passed} of {len(chosen)} cases: same bits as stock, every counter right over {LAUNCHES} launches and 0 after a wait"
    )
    print(f"no kernel in this build: {len(absent)} cases{': ' + '; '.join(absent) if absent else ''}")
    print("\n".join(faults) or "no fault", flush=True)
    if not options.no_timing:
        for seq_len in (8192, 16384, 32768):
            times = time_arms(seq_len, stock)
            base = times["stock"]
            row = ", ".join(f"{name} {us:.2f} us ({100 * (us / base - 1):+.2f}%)" for name, us in times.items())
            print(f"{seq_len} x 4 heads x 128: {row}", flush=True)
    sys.exit(1 if faults or not passed else 0)


if __name__ == "__main__":
    main()
