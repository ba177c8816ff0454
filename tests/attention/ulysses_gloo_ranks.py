"""One rank of the Ulysses checks without a GPU, started by torchrun from test_ulysses_gloo.py."""

import argparse
import functools
import itertools
import json
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from attention.ulysses_doubles import CountedExchange, FakeSpan, PlainAttention, expected_attention
from rank_exit import leave

from xstage_plugin.attention.input_exchange import input_span_shape
from xstage_plugin.attention.layout import Q_ORDERS, UlyssesLayout
from xstage_plugin.attention.peer_span import PeerSpan, ledger
from xstage_plugin.attention.routes import BARRIER, INPUTS
from xstage_plugin.attention.serial import exchange_nccl
from xstage_plugin.attention.span_meeting import Meeting
from xstage_plugin.attention.ulysses import UlyssesAttention, UlyssesCall, prepare_ulysses, release_ulysses, ulysses_attention
from xstage_plugin.errors import XStageError

D = 8
# Layouts by number of ranks, and whether attention is causal.
CASES = {
    2: {
        "one row": (UlyssesLayout((1, 0), (2, 2), D), False),
        "one row, rank 1's": (UlyssesLayout((0, 1), (2, 2), D, kv_heads=1), False),
        "127": (UlyssesLayout.even(127, 4, D, 2), False),
        "128, 5 heads, 1 kv head": (UlyssesLayout.even(128, 5, D, 2, kv_heads=1), False),
        "129, 5 heads, 5 kv heads": (UlyssesLayout.even(129, 5, D, 2), False),
        "4095 x 2": (UlyssesLayout.even(8190, 2, D, 2, kv_heads=1), False),
        "batch 2": (UlyssesLayout.even(64, 4, D, 2, batch=2, kv_heads=2), False),
        "batch 3": (UlyssesLayout.even(129, 4, D, 2, batch=3), False),
        "text last": (UlyssesLayout.even(135, 4, D, 2, shared_rows=7), False),
        "text first, batch 2": (UlyssesLayout.even(136, 4, D, 2, batch=2, shared_rows=7, shared_at="first"), False),
        "only text": (UlyssesLayout((0, 0), (1, 2), D, shared_rows=5), False),
        "text last, rank 1 without rows": (UlyssesLayout((9, 0), (2, 2), D, kv_heads=2, shared_rows=5), False),
        "uneven": (UlyssesLayout((100, 29), (3, 1), D, kv_heads=4), False),
        "causal": (UlyssesLayout.even(129, 4, D, 2, kv_heads=2), True),
        "causal, batch 3, uneven": (UlyssesLayout((3, 61), (1, 3), D, batch=3), True),
    },
    3: {
        "130": (UlyssesLayout.even(130, 5, D, 3, kv_heads=5), False),
        "two equal, one not": (UlyssesLayout((40, 40, 8), (2, 2, 2), D, batch=2, kv_heads=3), False),
        "a gap": (UlyssesLayout((40, 0, 40), (1, 1, 2), D, kv_heads=1), False),
        "text first": (UlyssesLayout.even(100, 3, D, 3, shared_rows=10, shared_at="first"), False),
        "causal": (UlyssesLayout.even(100, 3, D, 3, batch=2), True),
    },
}
# Both sides compute in float64 and round once to float32.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
BACKEND = PlainAttention()


class BrokenAttention(PlainAttention):
    def refusal(self, head_dim, dtype, device):
        raise MemoryError("no memory left")


def model_inputs(layout, seed):
    """q [B, S, H, d], k and v [B, S, H_kv, d] of the whole model, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(layout.batch, layout.seq_len, heads, D) for heads in (layout.total_heads, *[layout.total_kv_heads] * 2)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def rows_of(x, ranges):
    return torch.cat([x[:, part.start : part.stop] for part in ranges], 1) if ranges else x[:, :0]


def share_of(layout, rank, order, q, k, v):
    first, count = layout.kv_heads_of(rank)
    heads = slice(layout.head_start(rank), layout.head_start(rank) + layout.heads[rank])
    return rows_of(q, layout.q_ranges(rank, order))[:, :, heads].contiguous(), *(x[:, :, first : first + count] for x in (k, v))


def check_case(layout, causal):
    """Every mode, order and ordering gives plain attention; returns how many arms were compared."""
    rank, compared = dist.get_rank(), 0
    span = FakeSpan(layout.span_shape, torch.float32)
    rounds = []
    for seed in (1, 2) if layout.seq_len < 1000 else (1,):
        q, k, v = model_inputs(layout, seed)
        expected = expected_attention(q, k, v, 0.3, causal)
        rounds.append((q, k, v, rows_of(expected, layout.local_ranges(rank))))
    settings = {"backend": BACKEND, "softmax_scale": 0.3, "causal": causal}

    def compare(run, buffer, enters=True):
        for whole in rounds:
            buffer.fill_(float("nan"))  # a row that nobody wrote is seen
            if not enters:
                dist.barrier()
            out = run(*whole[:3])
            assert out.shape == layout.out_shape(rank)
            torch.testing.assert_close(out.double(), whole[3], **TOLERANCE)
            assert not out.numel() or out.data_ptr() == buffer.data_ptr(), "the result is no view of the buffer"
            assert buffer[:, layout.local_rows(rank) :].isnan().all(), "a store beyond this rank's rows"
        return 1

    for mode, order in ((mode, order) for mode in ("fused", "serial") for order in Q_ORDERS):
        call = prepare_ulysses(layout, torch.float32, device="cpu", span=span, mode=mode, q_order=order, **settings)
        assert (call.mode, call.reason) == (mode, "asked for")
        compared += compare(lambda *x, c=call, o=order: c(*share_of(layout, rank, o, *x)), span.local())
        if mode == "serial":
            # The scratch still holds the last round: deliver it once more, without the span.
            scratch, out = call._route._attention.scratch, torch.full(layout.out_shape(rank), float("nan"))
            exchange_nccl(scratch, out, layout, rank, order)
            torch.testing.assert_close(out, call.out, rtol=0, atol=0)
            # No span can be had over CPUs: serial goes through all_to_all_single, and says so.
            call = prepare_ulysses(layout, torch.float32, device="cpu", mode=mode, q_order=order, **settings)
            assert call.reason.endswith("the output goes through all_to_all_single"), call.reason
            assert call.span is None
            compared += compare(lambda *x, c=call, o=order: c(*share_of(layout, rank, o, *x)), call.buffer)
    inputs = FakeSpan(input_span_shape(layout), torch.float32)
    for mode in ("fused", "serial"):
        layer = UlyssesAttention(layout, torch.float32, device="cpu", span=span, input_span=inputs, mode=mode, **settings)
        assert layer.call.ordering == INPUTS
        inputs.local().fill_(float("nan"))
        compared += compare(
            lambda *x, m=layer: m(*(rows_of(y, layout.local_ranges(rank)) for y in x)), span.local(), enters=False
        )
    # And a layer whose ranks cannot have a span: both exchanges through all_to_all_single.
    layer = UlyssesAttention(layout, torch.float32, device="cpu", mode="serial", **settings)
    assert layer.call.span is None
    compared += compare(lambda *x: layer(*(rows_of(y, layout.local_ranges(rank)) for y in x)), layer.call.buffer)
    return compared


def check_ordering(ordering):
    """Many rounds with changing inputs while one rank is late: nobody's result is overwritten before it was read."""
    layout = UlyssesLayout.even(12, dist.get_world_size(), D, dist.get_world_size())
    rank = dist.get_rank()
    span = FakeSpan(layout.span_shape, torch.float32)
    settings = {"span": span, "device": "cpu", "backend": BACKEND, "mode": "fused", "softmax_scale": 0.3}
    if ordering == INPUTS:
        inputs = FakeSpan(input_span_shape(layout), torch.float32)
        run = UlyssesAttention(layout, torch.float32, input_span=inputs, **settings)
    else:
        call = prepare_ulysses(layout, torch.float32, ordering=ordering, **settings)
    for turn in range(30):
        whole = model_inputs(layout, turn)
        if turn % dist.get_world_size() == rank:
            time.sleep(0.003)
        if ordering == INPUTS:
            out = run(*(rows_of(x, layout.local_ranges(rank)) for x in whole))
        else:
            out = call(*share_of(layout, rank, "sequence", *whole))
        if (turn + 1) % dist.get_world_size() == rank:
            time.sleep(0.003)  # a late reader
        expected = rows_of(expected_attention(*whole, 0.3, False), layout.local_ranges(rank))
        torch.testing.assert_close(out.double(), expected, **TOLERANCE)
    return "ok"


def check_public_call():
    """ulysses_attention without a layout: even rows, prepared once, then only launched."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = UlyssesLayout.even(10, 2 * ranks, D, ranks, kv_heads=ranks)
    span = FakeSpan(layout.span_shape, torch.float32)
    gathers, gather = [], dist.all_gather_object
    dist.all_gather_object = lambda *a, **b: (gathers.append(1), gather(*a, **b))
    counts = []
    try:
        for seed in range(3):
            whole = model_inputs(layout, seed)
            out = ulysses_attention(*share_of(layout, rank, "sequence", *whole), span=span, backend=BACKEND, mode="fused")
            expected = rows_of(expected_attention(*whole, D**-0.5, False), layout.local_ranges(rank))
            torch.testing.assert_close(out.double(), expected, **TOLERANCE)
            counts.append(len(gathers))
    finally:
        dist.all_gather_object = gather
    release_ulysses()
    assert counts[0] > 0
    return counts[1:] == counts[:1] * 2


def refusals():
    """What each rank is told where something does not fit; first-call errors must be the same on all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = UlyssesLayout.even(8, 2 * ranks, D, ranks)
    span = FakeSpan(layout.span_shape, torch.float32)
    other_span = FakeSpan((2, *layout.span_shape[1:]), torch.float32)
    closed = FakeSpan(layout.span_shape, torch.float32)
    closed.closed = True
    pair = dist.new_group([0, 1])
    last = dist.new_group([ranks - 1])
    everyone = dist.new_group(list(range(ranks)))

    def prepare(given=layout, dtype=torch.float32, device="cpu", **changes):
        return prepare_ulysses(given, dtype, device=device, **({"span": span, "backend": BACKEND, "mode": "fused"} | changes))

    mine = rank == 1
    everywhere = {
        "other rows": lambda: prepare(
            UlyssesLayout((9, *layout.rows[1:]), layout.heads, D) if mine else layout, span=None, mode="serial"
        ),
        "other modes": lambda: prepare(mode="serial" if mine else "fused"),
        "other scales": lambda: prepare(softmax_scale=0.5 if mine else None),
        "causal on one rank": lambda: prepare(causal=mine),
        "other orders": lambda: prepare(q_order="own_last" if mine else "sequence"),
        "other orderings": lambda: prepare(ordering=INPUTS if mine else BARRIER),
        "other types": lambda: prepare(dtype=torch.float16 if mine else torch.float32, span=None, mode="serial"),
        "a span on one rank": lambda: prepare(span=span if mine else None, mode="serial"),
        "a span of another layout": lambda: prepare(span=other_span if mine else span),
        "a span of another group": lambda: prepare(group=everyone),
        "a closed span": lambda: prepare(span=closed),
        "too many ranks": lambda: prepare(UlyssesLayout.even(8, 8, D, ranks + 1)),
        "not a type": lambda: prepare(dtype="float32"),
        "a fault of another kind": lambda: prepare(backend=BrokenAttention() if mine else BACKEND),
        "not a layout": lambda: prepare("even"),
        "unknown mode": lambda: prepare(mode="fuse"),
        "unknown order": lambda: prepare(q_order="delivery"),
        "unknown ordering": lambda: prepare(ordering="none"),
        "unknown backend": lambda: prepare(backend="fa2"),
        "a scale of 0": lambda: prepare(softmax_scale=0.0),
        "causal with text": lambda: prepare(UlyssesLayout.even(8, 2 * ranks, D, ranks, shared_rows=2), span=None, causal=True),
        "uneven kv groups": lambda: (
            prepare(UlyssesLayout((4,) * ranks, (3,) * ranks, D, kv_heads=ranks * 3 // 2 or 1), span=None)
            if ranks == 2
            else prepare(UlyssesLayout((4,) * ranks, (1, 1, 4), D, kv_heads=2), span=None)
        ),
        "a backend that one rank lacks": lambda: prepare(backend=PlainAttention("not here" if mine else "")),
        "fa4 on a CPU": lambda: prepare(backend="fa4"),
        "auto on a CPU": lambda: prepare(backend="auto"),
        "no platform for a CPU": lambda: prepare(mode="auto"),
        "unknown platform": lambda: prepare(mode="auto", platform="h100"),
        "a span over CPUs": lambda: prepare(span=None),
        "an input span of another layout": lambda: UlyssesAttention(
            layout,
            torch.float32,
            device="cpu",
            span=span,
            input_span=other_span if mine else None,
            backend=BACKEND,
            mode="fused",
        ),
        "a peer span on a CPU": lambda: PeerSpan((4,), torch.float32, device="cpu"),
        "a peer span without a GPU": lambda: PeerSpan((4,), torch.float32),
        "no shape": lambda: PeerSpan(() if mine else (4,), torch.float32, device="cpu"),
        "no dtype": lambda: PeerSpan((4,), "bfloat16" if mine else torch.float32, device="cpu"),
    }
    told = {name: message_of(attempt) for name, attempt in everywhere.items()}
    local = {}
    if rank > 1 or ranks == 1:
        local["not in the group"] = message_of(lambda: prepare(group=pair))
    if rank == 0 and ranks > 1:
        local["not in the group"] = message_of(lambda: prepare(group=last))
    calls = [prepare()]
    q, k, v = share_of(layout, rank, "sequence", *model_inputs(layout, 0))
    wide = torch.zeros(*k.shape[:-1], 2 * D)[..., ::2]
    for name, bad in {
        "q of fewer rows": (q[:, 1:], k, v),
        "k of fewer heads": (q, k[:, :, 1:], v),
        "v of another type": (q, k, v.half()),
        "v on another device": (q, k, v.to("meta")),
        "k with a stride along the head": (q, wide, v),
        "q with a gradient": (q.clone().requires_grad_(), k, v),
    }.items():
        local[name] = message_of(lambda bad=bad: calls[0](*bad))
    local["q of three dimensions"] = message_of(lambda: ulysses_attention(q[0], k, v))
    span.closed = True
    local["a span closed since"] = message_of(lambda: calls[0](q, k, v))
    inputs = FakeSpan(input_span_shape(layout), torch.float32)
    span.closed = False
    layer = UlyssesAttention(layout, torch.float32, device="cpu", span=span, input_span=inputs, backend=BACKEND, mode="fused")
    whole = [rows_of(x, layout.local_ranges(rank)) for x in model_inputs(layout, 0)]
    local["a layer with one head"] = message_of(lambda: layer(*(x[:, :, :1] for x in whole)))
    inputs.closed = True
    local["an input span closed since"] = message_of(lambda: layer(*whole))
    key = calls.pop().key
    local["a call that is gone"] = message_of(lambda: torch.ops.xstage.ulysses_deliver(q, k, v, span._slots[0], key))
    assert ledger() == ()
    return told, local


def message_of(attempt):
    """The error that ``attempt`` raises, also where a compiler wrapped it."""
    try:
        attempt()
    except (XStageError, MemoryError, torch._dynamo.exc.TorchDynamoException) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def check_subgroup():
    """Ranks {1, 2} of 3 by themselves: ranks are those of the group."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return "outside"
    layout = UlyssesLayout.even(9, 3, D, 2)
    rank = dist.get_rank(group)
    span = FakeSpan(layout.span_shape, torch.float32, group)
    whole = model_inputs(layout, 3)
    call = prepare_ulysses(layout, torch.float32, device="cpu", group=group, span=span, backend=BACKEND, mode="fused")
    out = call(*share_of(layout, rank, "sequence", *whole))
    expected = rows_of(expected_attention(*whole, D**-0.5, False), layout.local_ranges(rank))
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)
    return "ok"


def check_meeting():
    """The last rank has met alone before all meet, so that torch's count is another one there: the counts, and who met."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = dist.new_group([ranks - 1])
    exchange = CountedExchange()
    met = []
    with mock.patch.object(torch._C._distributed_c10d._SymmetricMemory, "rendezvous", exchange.rendezvous):
        if rank == ranks - 1:
            met.append(Meeting(alone, "alone").rendezvous(torch.tensor(7)))
        counts = [None] * ranks
        dist.all_gather_object(counts, exchange.count)
        together = Meeting(dist.group.WORLD, "together")
        met.append(together.rendezvous(torch.tensor(rank)))
    resolve = torch._C._distributed_c10d._resolve_process_group
    named = resolve("together") is dist.group.WORLD
    together.close()
    together.close()
    return {"counts": counts, "met": met[-1], "alone": met[:-1], "named": named}


def check_inference_mode():
    """Prepared inside or outside of inference_mode, a call works in both: {where it was made and where it runs: right}."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = UlyssesLayout((3, *(2,) * (ranks - 1)), (1,) * ranks, D, shared_rows=1)
    span, inputs = FakeSpan(layout.span_shape, torch.float32), FakeSpan(input_span_shape(layout), torch.float32)
    whole = model_inputs(layout, 8)
    expected = rows_of(expected_attention(*whole, D**-0.5, False), layout.local_ranges(rank))
    shares = {False: share_of(layout, rank, "sequence", *whole), True: [rows_of(x, layout.local_ranges(rank)) for x in whole]}
    found = {}
    for mode, made, runs, module in itertools.product(("fused", "serial"), *[(False, True)] * 3):
        settings = {"device": "cpu", "span": span, "backend": BACKEND, "mode": mode}
        with torch.inference_mode(made):
            if module:
                call = UlyssesAttention(layout, torch.float32, input_span=inputs, **settings)
            else:
                call = prepare_ulysses(layout, torch.float32, **settings)
        with torch.inference_mode(runs):
            dist.barrier()
            out = call(*shares[module])
            dist.barrier()
            close = torch.allclose(out.double(), expected, **TOLERANCE)
            found[f"{mode}, module {module}, made in it {made}, run in it {runs}"] = close
    return found


def check_compiled():
    """torch.compile keeps two calls and two modules over shared spans whole; functionalised or not, the results are plain."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = UlyssesLayout(tuple(range(5, 5 + ranks)), (1,) * ranks, D, 2)
    span = FakeSpan(layout.span_shape, torch.float32)
    inputs = FakeSpan(input_span_shape(layout), torch.float32)
    settings = {"span": span, "backend": BACKEND, "mode": "fused"}
    calls = [prepare_ulysses(layout, torch.float32, device="cpu", **settings) for _ in range(2)]
    layers = [UlyssesAttention(layout, torch.float32, device="cpu", input_span=inputs, **settings) for _ in range(2)]
    direct = [functools.partial(ulysses_attention, layout=layout, **settings)] * 2
    q, k, v = share_of(layout, rank, "sequence", *model_inputs(layout, 4))
    cold = message_of(lambda: torch.compile(direct[0], backend="eager", fullgraph=True)(q, k, v))
    direct[0](q, k, v)

    def twice(run, q, k, v):
        return run[0](q * 1, k, v) + 1, run[1](q, k * 1, v) * 2

    done = {"cold": cold}
    for compiler, runs in itertools.product(("eager", "aot_eager"), (calls, layers, direct)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v, r=runs: twice(r, q, k, v), backend=compiler, fullgraph=True)
        for seed in (5, 6):
            whole = model_inputs(layout, seed)
            expected = rows_of(expected_attention(*whole, D**-0.5, False), layout.local_ranges(rank))
            shares = (rows_of(x, layout.local_ranges(rank)) for x in whole)
            plus, double = compiled(*(shares if runs is layers else share_of(layout, rank, "sequence", *whole)))
            torch.testing.assert_close(plus.double() - 1, expected, **TOLERANCE)
            torch.testing.assert_close(double.double() / 2, expected, **TOLERANCE)
            dist.barrier()  # no compiler may have put something else into a peer's buffer
            torch.testing.assert_close(calls[0].out.double(), expected, **TOLERANCE)
            dist.barrier()
        done[f"{compiler}, {type(runs[0]).__name__}"] = "ok"
    release_ulysses()
    return done


def check_operator():
    """torch's own checks of the operator: schema, fake kernel, autograd registration, functionalisation."""
    layout = UlyssesLayout.even(6, 2, D, 1)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    span = FakeSpan(layout.span_shape, torch.float32, group)
    call = prepare_ulysses(layout, torch.float32, device="cpu", group=group, span=span, backend=BACKEND, mode="auto")
    assert isinstance(call, UlyssesCall)
    assert call.mode == "fused", call.reason
    tensors = model_inputs(layout, 1)
    return torch.library.opcheck(torch.ops.xstage.ulysses_deliver.default, (*tensors, call.out, call.key))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks, results = dist.get_world_size(), {}
    results["compared"] = {name: check_case(*case) for name, case in CASES[ranks].items()}
    results["ordering"] = {ordering: check_ordering(ordering) for ordering in (BARRIER, INPUTS)}
    results["prepared once"] = check_public_call()
    results["meeting"] = check_meeting()
    results["inference mode"] = check_inference_mode()
    results["told"], results["local"] = refusals()
    if ranks == 3:
        results["subgroup"] = check_subgroup()
    else:
        results["compiled"] = check_compiled()
        results["operator"] = check_operator()
    arguments.out.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
