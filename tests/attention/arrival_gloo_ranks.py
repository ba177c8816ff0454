"""One rank of the checks of arriving rows without a GPU, started by torchrun from test_arrival_gloo.py."""

import argparse
import gc
import itertools
import json
import weakref
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from attention.ulysses_doubles import AnnouncingAttention, FakeSpan, HostTake, PlainAttention, expected_attention
from attention.ulysses_gloo_ranks import CASES, TOLERANCE, D, message_of, model_inputs, rows_of, share_of
from rank_exit import leave

from xstage_plugin.attention import span_cache
from xstage_plugin.attention.arrivals import ArrivalCounters, counter_shape
from xstage_plugin.attention.input_exchange import input_span_shape
from xstage_plugin.attention.layout import OWN_FIRST, OWN_LAST, SEQUENCE, UlyssesLayout
from xstage_plugin.attention.projection import OutputProjection, projected
from xstage_plugin.attention.routes import BARRIER, INPUTS
from xstage_plugin.attention.ulysses import UlyssesAttention, prepare_ulysses, release_ulysses, ulysses_attention

SCALE = 0.3
# Order of q, of the tiles, and parts. 100 is more than there are row blocks: one part a block.
ARMS = ((SEQUENCE, True, None), (OWN_LAST, True, 100), (OWN_LAST, False, 3), (OWN_FIRST, True, 1), (SEQUENCE, False, 100))


class Reader:
    """A consumer that keeps what it saw at the moment at which it was called; false until then, as a list is."""

    def __init__(self):
        self.seen = []

    def __len__(self):
        return len(self.seen)

    def __call__(self, rows, first_row):
        self.seen.append((first_row, rows.clone()))

    def rows(self):
        """All rows in their order; every row was given once."""
        at = 0
        for first_row, rows in self.seen:
            assert first_row == at, "the parts leave a gap, or overlap"
            assert rows.shape[1] > 0
            at += rows.shape[1]
        return torch.cat([rows for _, rows in self.seen], 1)


class Layer:
    """A layout with spans, counters and settings over all ranks."""

    def __init__(self, layout, block_rows=16, causal=False, delay=lambda *_: 0.0, group=None, awaits_rows=False):
        self.layout, self.rank = layout, dist.get_rank(group)
        self.span = FakeSpan(layout.span_shape, torch.float32, group)
        self.take = HostTake()
        self.counters = ArrivalCounters(FakeSpan(counter_shape(layout), torch.int32, group), self.take)
        self.backend = AnnouncingAttention(block_rows, delay, awaits_rows)
        self.causal = causal
        self.settings = {"backend": self.backend, "softmax_scale": SCALE, "causal": causal, "span": self.span, "device": "cpu"}

    def prepare(self, **more):
        more = {"counters": self.counters, "mode": "fused", "consume": print} | more
        return prepare_ulysses(self.layout, torch.float32, **self.settings | more)

    def module(self, **more):
        inputs = FakeSpan(input_span_shape(self.layout), torch.float32)
        more = {"counters": self.counters, "mode": "fused", "input_span": inputs} | more
        return UlyssesAttention(self.layout, torch.float32, **self.settings | more)

    def share(self, order, whole):
        return share_of(self.layout, self.rank, order, *whole)

    def local(self, whole):
        return [rows_of(x, self.layout.local_ranges(self.rank)) for x in whole]

    def expected(self, whole):
        return rows_of(expected_attention(*whole, SCALE, self.causal), self.layout.local_ranges(self.rank))

    def poison(self):
        """NaN in every row of this rank, seen by all before anybody stores."""
        self.span.local().fill_(float("nan"))
        dist.barrier()

    def clear(self):
        """Whether no counter is raised once all ranks are here."""
        dist.barrier()
        return not bool(self.counters.span.local().any())


def right(rows, expected):
    torch.testing.assert_close(rows.double(), expected, **TOLERANCE)
    return True


def check_case(layout, causal):
    """Under every arm each part is whole when the consumer gets it; returns the number of parts of each arm."""
    layer = Layer(layout, causal=causal)
    rank, blocks, counts = layer.rank, -(-layout.local_rows(layer.rank) // layer.backend.rows), []
    for (order, head_by_head, parts), seed in zip(ARMS, itertools.count(1), strict=False):
        whole = model_inputs(layout, seed)
        reader = Reader()
        call = layer.prepare(q_order=order, head_by_head=head_by_head, parts=parts, consume=reader)
        assert call.consumption.meets is False
        layer.poison()
        out = call(*layer.share(order, whole))
        expected = layer.expected(whole)
        right(out, expected)
        if layout.local_rows(rank):
            right(reader.rows(), expected)
        assert layer.clear()
        assert len(reader.seen) == min(blocks, 1 if parts is None else parts)
        # Every block is taken once.
        assert sorted(block for taken in layer.take.taken for block in taken) == list(range(blocks))
        layer.take.taken.clear()
        counts.append(len(reader.seen))
    assert layer.backend.announced > 0
    return counts


def check_other_ways():
    """Where nothing announces, the consumer gets all rows once, and the same ones: {way: right}."""
    layout = UlyssesLayout.even(70, 2 * dist.get_world_size(), D, dist.get_world_size(), shared_rows=6)
    layer, whole, found = Layer(layout), model_inputs(layout, 3), {}
    silent = {"backend": PlainAttention(), "counters": None}
    for name, more in {
        "fused, a kernel that announces nothing": silent,
        "serial": {"mode": "serial"},
        "serial without a span": {"mode": "serial", "span": None, "counters": None},
    }.items():
        reader = Reader()
        call = layer.prepare(**more, consume=reader)
        call.buffer.fill_(float("nan"))
        dist.barrier()
        out = call(*layer.share(SEQUENCE, whole))
        found[name] = (
            len(reader.seen) == 1 and right(reader.rows(), layer.expected(whole)) and right(out, layer.expected(whole))
        )
        assert call.board is None
        assert call.consumption.meets
        assert not layer.take.taken
    layer.backend.longest_keys = layout.seq_len - 1
    found["fused, keys at which announcing does not pay"] = layer.prepare(consume=print).board is None
    layer.backend.longest_keys = layout.seq_len
    found["fused, the longest keys at which it does"] = layer.prepare(consume=print).board is not None
    return found


def check_kernel_waits():
    """A kernel that waits for its rows: the consumer of one part, and a call without one and without a closing barrier."""
    ranks, found = dist.get_world_size(), {}
    layout = UlyssesLayout((40, *(33,) * (ranks - 1)), (2,) * ranks, D, 2, shared_rows=6)
    for ordering in (BARRIER, INPUTS):
        layer = Layer(layout, delay=lambda *_: 0.001 * (dist.get_rank() == ranks - 1), awaits_rows=True)
        reader, options = Reader(), {"ordering": ordering, "q_order": OWN_LAST}
        calls = {
            "one part": layer.prepare(consume=reader, **options),
            "two parts": layer.prepare(consume=reader, parts=2, **options),
            "no consumer": layer.prepare(consume=None, **options),
        }
        for seed, (name, call) in enumerate(calls.items()):
            whole, reader.seen = model_inputs(layout, seed), []
            layer.poison()
            awaited, layer.span.met = layer.backend.awaited, 0
            out = call(*layer.share(OWN_LAST, whole)).clone()
            met = layer.span.met
            expected = layer.expected(whole)
            right(out, expected)
            if call.consumption is not None:
                right(reader.rows(), expected)
            assert layer.clear()
            found[f"{name}, {ordering}"] = [layer.backend.awaited - awaited, met, len(layer.take.taken)]
            layer.take.taken.clear()
    return found


def check_waits_itself():
    """With parts=0 the consumer gets the rows before they are there, and waits by the board."""
    ranks = dist.get_world_size()
    layer = Layer(UlyssesLayout.even(64, ranks, D, ranks), delay=lambda *_: 0.02 * (dist.get_rank() == ranks - 1))
    early, whole = [], model_inputs(layer.layout, 5)

    def consume(rows, first_row):
        early.append(bool(rows.isnan().any()))
        layer.take.wait(call.board, range(1))
        right(rows[:, :16], layer.expected(whole)[:, :16])

    call = layer.prepare(consume=consume, parts=0, q_order=OWN_LAST)
    layer.poison()
    out = call(*layer.share(OWN_LAST, whole))
    return {"rows": right(out, layer.expected(whole)), "clear": layer.clear(), "early": early[0]}


def check_rounds(ordering):
    """Rounds with changing inputs while one rank is late: rows are whole when consumed, and nothing is left behind."""
    ranks = dist.get_world_size()
    late = [0]

    def delay(b, head, block):
        # Late with its last tiles, so that a peer has all of its rows long before this rank's kernel ends.
        return 0.03 * (late[0] % ranks == dist.get_rank() and (b, head, block) == (1, ranks - 1, 0))

    layout = UlyssesLayout.even(36 * ranks, 2 * ranks, D, ranks)
    layer = Layer(layout, delay=delay)
    reader = Reader()
    if ordering == INPUTS:
        run = layer.module(consume=reader, parts=3)
    else:
        run = layer.prepare(consume=reader, parts=3, q_order=OWN_LAST)
    for turn in range(10):
        late[0] = turn
        whole = model_inputs(layout, turn)
        out = run(*(layer.local(whole) if ordering == INPUTS else layer.share(OWN_LAST, whole)))
        right(out, layer.expected(whole))
        right(reader.rows(), layer.expected(whole))
        reader.seen.clear()
    return layer.clear()


def check_failing_consumer():
    """A consumer that fails on one rank leaves counters that the next call can use."""
    ranks = dist.get_world_size()
    layer = Layer(UlyssesLayout.even(50, ranks, D, ranks))
    reader = Reader()

    def fails(rows, first_row):
        raise KeyError("the consumer's own")

    call, seen = layer.prepare(consume=reader, parts=3), []
    for turn in range(4):
        whole = model_inputs(layer.layout, turn)
        try:
            out = call(*layer.share(SEQUENCE, whole), consume=fails if turn == 1 and layer.rank == 0 else None)
            seen.append(right(out, layer.expected(whole)))
        except KeyError as error:
            seen.append(str(error))
    return {"calls": seen, "clear": layer.clear()}


def check_public_call():
    """ulysses_attention with a consumer of its own in each call: prepared once, and no consumer is kept."""
    ranks = dist.get_world_size()
    layer = Layer(UlyssesLayout.even(40, 2 * ranks, D, ranks))
    made = []

    def span(shape, dtype, group, device):
        made.append(FakeSpan(shape, dtype, group))
        return made[-1]

    options = {"layout": layer.layout, "backend": layer.backend, "mode": "fused", "softmax_scale": SCALE, "span": layer.span}
    with mock.patch.multiple(span_cache, PeerSpan=span, StreamWait=lambda device: HostTake()):
        for turn in range(3):
            whole, reader = model_inputs(layer.layout, turn), Reader()
            out = ulysses_attention(*layer.share(SEQUENCE, whole), **options, consume=reader)
            right(out, layer.expected(whole))
            right(reader.rows(), layer.expected(whole))
        right(ulysses_attention(*layer.share(SEQUENCE, whole), **options), layer.expected(whole))
        # Another call over the same output uses the same counters.
        ulysses_attention(*layer.share(SEQUENCE, whole), **options, consume=reader, parts=1)
        kept = weakref.ref(reader)
        del reader
        gc.collect()
    unwaited = message_of(lambda: ulysses_attention(*layer.share(SEQUENCE, whole), **options, consume=print, parts=0))
    release_ulysses()
    return {"made": len(made), "closed": made[0].closed, "kept": kept() is not None, "unwaited": unwaited}


def check_projection():
    """The output projection of rows as they arrive, of two sequences; and of rows behind the exchange."""
    ranks = dist.get_world_size()
    layout = UlyssesLayout.even(41, 2 * ranks, D, ranks, batch=2, shared_rows=3)
    layer, whole, found = Layer(layout), model_inputs(layout, 7), {}
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, layout.total_heads * D, generator=generator), torch.randn(24, generator=generator)
    sizes = {"batch": 2, "rows": layout.local_rows(layer.rank)}
    for mode, added in itertools.product(("fused", "serial"), (None, bias)):
        projection = OutputProjection(weight.requires_grad_(), added, **sizes)
        call = layer.prepare(mode=mode, consume=projection)
        layer.poison()
        projection.result.fill_(float("nan"))
        out = call(*layer.share(SEQUENCE, whole))
        reference = projected(out, weight, added).detach()
        torch.testing.assert_close(projection.result, reference)
        found[f"{mode}, {'no ' if added is None else ''}bias"] = right(out, layer.expected(whole))
    return found


def check_subgroup():
    """Ranks {1, 2} of 3 by themselves."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return "outside"
    layer, reader = Layer(UlyssesLayout.even(60, 3, D, 2), group=group), Reader()
    whole = model_inputs(layer.layout, 3)
    call = layer.prepare(group=group, consume=reader)
    call(*layer.share(SEQUENCE, whole))
    right(reader.rows(), layer.expected(whole))
    return "ok"


def refusals():
    """What the ranks are told where something does not fit; and what one of them is told about its own call."""
    ranks = dist.get_world_size()
    mine = dist.get_rank() == 1
    layer = Layer(UlyssesLayout.even(4 * ranks, 2 * ranks, D, ranks))
    other = Layer(UlyssesLayout.even(3 * ranks, 2 * ranks, D, ranks))
    closed = Layer(layer.layout)
    call, plain = layer.prepare(consume=Reader()), layer.prepare(consume=None)
    gone = closed.prepare(consume=Reader())
    closed.counters.span.close()
    share = layer.share(SEQUENCE, model_inputs(layer.layout, 0))
    told = {
        "a consumer on one rank": lambda: layer.prepare(consume=Reader() if mine else None),
        "other parts": lambda: layer.prepare(parts=1 if mine else 2),
        "other orders of tiles": lambda: layer.prepare(head_by_head=mine),
        "other row blocks": lambda: layer.prepare(backend=AnnouncingAttention(8 if mine else 16)),
        "counters on one rank": lambda: layer.prepare(counters=layer.counters if mine else None),
        "counters of another layout": lambda: layer.prepare(counters=other.counters if mine else layer.counters),
        "counters over CPUs": lambda: layer.prepare(counters=None),
        "closed counters": lambda: layer.prepare(counters=closed.counters),
        "fewer parts than none": lambda: layer.prepare(parts=-1),
        "half a part": lambda: layer.prepare(parts=0.5),
        "no part where nothing announces": lambda: layer.prepare(parts=0, mode="serial"),
        "a consumer that cannot be called": lambda: layer.prepare(consume=5 if mine else Reader()),
        "a mask by its name": lambda: layer.prepare(causal="False"),
        "a backend that is a class": lambda: layer.prepare(backend=PlainAttention),
        "a backend without a refusal": lambda: layer.prepare(backend=None),
        "parts that are a list": lambda: ulysses_attention(*share, layout=layer.layout, span=layer.span, parts=[1]),
    }
    call.consumer = None
    local = {
        "no consumer": lambda: call(*share),
        "a consumer that was not prepared for": lambda: plain(*share, consume=print),
        "issued alone": lambda: call.issue(*share),
        "counters closed since": lambda: gone(*share),
        "compiled": lambda: torch.compile(lambda *x: call(*x, consume=print), backend="eager", fullgraph=True)(*share),
    }
    weight = torch.zeros(4, layer.layout.total_heads * D)
    rows = call.out
    local |= {
        "a weight of three dimensions": lambda: OutputProjection(weight[None], batch=1, rows=4),
        "a bias of another length": lambda: OutputProjection(weight, weight[0], batch=1, rows=4),
        "a bias of another type": lambda: OutputProjection(weight, weight[:, 0].half(), batch=1, rows=4),
        "rows beyond the result": lambda: OutputProjection(weight, batch=1, rows=4)(rows, 2),
        "rows of another type": lambda: OutputProjection(weight.double(), batch=1, rows=4)(rows, 0),
        "a projection of rows below none": lambda: OutputProjection(weight, batch=1, rows=-1),
        "rows of fewer heads": lambda: OutputProjection(weight, batch=1, rows=4)(rows[:, :, 1:], 0),
    }
    return [{name: message_of(attempt) for name, attempt in table.items()} for table in (told, local)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks, results = dist.get_world_size(), {}
    # The double is slow for its many tiles.
    cases = {name: case for name, case in CASES[ranks].items() if case[0].seq_len < 1000}
    results["parts"] = {name: check_case(*case) for name, case in cases.items()}
    results["other ways"] = check_other_ways()
    results["waits itself"] = check_waits_itself()
    results["kernel waits"] = check_kernel_waits()
    results["rounds"] = {ordering: check_rounds(ordering) for ordering in (BARRIER, INPUTS)}
    results["failing consumer"] = check_failing_consumer()
    results["public call"] = check_public_call()
    results["projection"] = check_projection()
    results["told"], results["local"] = refusals()
    if ranks == 3:
        results["subgroup"] = check_subgroup()
    arguments.out.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
