"""One rank of the checks of MegaMoE's calls without a GPU, started by torchrun from test_mega_moe_gloo.py.

A stand-in for deep_gemm takes the calls: it writes what it was told into ``y``, so that the order of events can be seen.
"""

import argparse
import json
import sys
import types
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rank_exit import leave

from xstage_plugin.errors import XStageError
from xstage_plugin.moe import buffer_schedule, current_schedule, mega_moe, moe_call, prepare_mega_moe, schedule, set_schedule
from xstage_plugin.moe import schedule_word as word_module
from xstage_plugin.moe.registration import check_buffer
from xstage_plugin.upstream.pins import load_pin

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 4096, 512, 128, 8, 8192
PLATFORM = "h200-nvlink-pair"


class Buffer:
    """What deep_gemm's symmetric buffer is to us."""

    def __init__(self):
        self.hidden, self.intermediate_hidden = HIDDEN, INTERMEDIATE
        self.num_experts, self.num_topk, self.num_max_tokens_per_rank = EXPERTS, TOPK, TOKENS
        self.group, self.buffer = dist.group.WORLD, torch.zeros(64, dtype=torch.int8)
        self.x = torch.zeros(TOKENS, HIDDEN, dtype=torch.float8_e4m3fn)
        self.x_sf = torch.zeros(TOKENS, HIDDEN // 128)
        self.topk_idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
        self.topk_weights = torch.zeros(TOKENS, TOPK)


class Library(types.ModuleType):
    """deep_gemm: a kernel that writes its schedule word into ``y``."""

    def __init__(self):
        super().__init__("deep_gemm")
        self.sms, self.launches = 132, 0

    def get_num_sms(self):
        return self.sms

    def fp8_mega_moe(self, y, l1_weights, l2_weights, sym_buffer):
        self.launches += 1
        y.fill_(int(sym_buffer.buffer[28:32].view(torch.int32)))


def told(step):
    try:
        step()
    except XStageError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def weights(experts=EXPERTS // 2):
    """Of the right shapes; one value each is enough, since nobody reads them."""
    value, scale = torch.zeros((), dtype=torch.uint8).view(torch.float8_e4m3fn), torch.zeros(())
    return tuple(
        (value.expand(experts, n, k), scale.expand(experts, n // 128, k // 128))
        for n, k in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    )


def check_schedules(rank):
    buffer, seen = Buffer(), {}
    seen["auto"] = vars(set_schedule(buffer, platform=PLATFORM)) | {"word": current_schedule(buffer).word}
    with schedule(buffer, "interleaved", 7, pulls="stock"):
        seen["inside"] = current_schedule(buffer).word
    seen["after"] = current_schedule(buffer).word
    for name, arguments, options in (
        ("different leads", ("interleaved", 5 + rank), {}),
        ("different schedules", ("wave",) if rank == 0 else ("interleaved", 9), {}),
        ("different pulls", ("wave",), {"pulls": "stock" if rank else "shared"}),
        ("one rank asks for nonsense", ("interleaved", 0) if rank == 1 else ("interleaved", 9), {}),
        ("a lead of 0", ("interleaved", 0), {}),
        ("unknown pulls", ("wave",), {"pulls": "fast"}),
        ("platform of another GPU", ("auto",), {"platform": "paper-148sm"}),
    ):
        seen[name] = told(lambda arguments=arguments, options=options: set_schedule(buffer, *arguments, **options))
    seen["unchanged"] = current_schedule(buffer).word
    seen["one rank gives a list"] = told(lambda: set_schedule(buffer, "interleaved", [7] if rank else 7))
    other_fault = OSError("the disk is gone") if rank else buffer_schedule.choose_schedule
    with mock.patch.object(buffer_schedule, "choose_schedule", side_effect=other_fault):
        buffer_schedule._choose.cache_clear()
        seen["one rank fails in another way"] = told(lambda: set_schedule(buffer, "auto", platform=PLATFORM))
    with mock.patch.dict("os.environ", {"XSTAGE_PLATFORM": ""}):
        seen["without a platform"] = set_schedule(buffer).lead_rows
    gone = Buffer()
    gone.buffer = None if rank else gone.buffer

    def inside():
        with schedule(gone, "wave"):
            pass

    seen["a buffer is gone on one rank"] = told(inside)
    return seen


def check_calls(rank, library):
    buffer, seen = Buffer(), {}
    l1, l2 = weights()
    y = torch.empty(4, HIDDEN, dtype=torch.bfloat16)

    def call(**options):
        mega_moe(y, l1, l2, buffer, **options)
        return float(y[0, 0])

    moe_call._compile = lambda *_: None  # there is nothing to compile with here
    fresh = Buffer()
    fresh.topk_idx[0, 0] = EXPERTS if rank else 0
    seen["first call, id out of range on one rank"] = told(lambda: mega_moe(y, l1, l2, fresh, check_ids=True))
    seen["first call, no weights on one rank"] = told(lambda: prepare_mega_moe(None if rank else l1, l2, fresh))
    seen["different steps"] = told(lambda: mega_moe(y, l1, l2, fresh) if rank else set_schedule(fresh, "wave"))

    def fails_on_rank_1(*_):
        if rank == 1:
            raise RuntimeError("nvcc is gone\nand more")

    moe_call._compile = fails_on_rank_1
    seen["compile fails on one rank"] = told(call)
    seen["launches then"] = library.launches
    moe_call._compile = lambda *_: None
    seen["as set"] = call()
    seen["wave with shared pulls"] = call(schedule="wave", pulls="shared")
    seen["interleaved"] = call(schedule="interleaved", lead=7, pulls="stock")
    seen["stays"] = call()
    # One rank asks for another order than the other: it is its own affair.
    seen["own order"] = call(schedule="interleaved", lead=3 + rank, pulls="stock")
    seen["no tokens"] = told(lambda: mega_moe(y[:0], l1, l2, buffer))
    for name, step in {
        "too many tokens": lambda: mega_moe(y[:1].expand(TOKENS + 1, HIDDEN).contiguous(), l1, l2, buffer),
        "wrong hidden": lambda: mega_moe(torch.empty(4, 8, dtype=torch.bfloat16), l1, l2, buffer),
        "wrong type": lambda: mega_moe(y.float(), l1, l2, buffer),
        "wrong weights": lambda: mega_moe(y, *weights(3), buffer),
        "no y": lambda: mega_moe(None, l1, l2, buffer),
        "no weights": lambda: mega_moe(y, None, l2, buffer),
        "float weights": lambda: mega_moe(y, (l1[0].float(), l1[1]), l2, buffer),
        "wrong scales": lambda: mega_moe(y, (l1[0], l1[1][:, :1]), l2, buffer),
        "lead alone": lambda: mega_moe(y, l1, l2, buffer, lead=3),
        "nonsense": lambda: mega_moe(y, l1, l2, buffer, schedule="fast"),
    }.items():
        seen[name] = told(step)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(10, 0)):
        seen["Blackwell"] = told(call)
    library.sms = 131
    seen["odd SMs"] = told(call)
    library.sms = 130
    seen["fewer SMs"] = told(call)
    buffer.topk_idx[2, 1] = EXPERTS
    seen["id out of range"] = told(lambda: call(check_ids=True))
    buffer.topk_idx[2, 1] = -1
    buffer.topk_idx[3] = 5
    seen["padding and duplicates"] = told(lambda: call(check_ids=True))
    seen |= check_operator(library, buffer, l1, l2)
    seen["destroyed"] = told(call)
    return seen


def check_operator(library, buffer, l1, l2):
    call = prepare_mega_moe(l1, l2, buffer, schedule="interleaved", lead=12, pulls="stock")
    x = torch.full((4, HIDDEN), 2.0).to(torch.float8_e4m3fn)
    inputs = (x, torch.full((4, HIDDEN // 128), 3.0), torch.full((4, TOPK), 6), torch.full((4, TOPK), 7.0))

    def layer(*inputs):
        return call(*inputs, l1, l2) + 1

    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = {"compiled whole": float(whole(*inputs)[0, 0])}
    found["inputs"] = [float(part[3, 0]) for part in (buffer.x.float(), buffer.x_sf, buffer.topk_idx, buffer.topk_weights)]
    arguments = (*inputs, *l1, *l2, call.key, 5)
    tests = ("test_faketensor", "test_autograd_registration")  # "test_schema" multiplies its inputs, which FP8 cannot
    torch.library.opcheck(torch.ops.xstage.mega_moe.default, arguments, test_utils=tests)
    found["opcheck"] = "passed"
    found["no tokens of the operator"] = tuple(call(*(part[:0] for part in inputs), l1, l2).shape)
    found["weights of the operator"] = told(lambda: call(*inputs, *weights(3)))
    library.sms = 131
    found["odd SMs of the operator"] = told(lambda: call(*inputs, l1, l2))
    library.sms = 132
    found["a type"] = told(lambda: call(inputs[1], *inputs[1:], l1, l2))
    found["too many for the operator"] = told(lambda: call(x[:1].expand(TOKENS + 1, HIDDEN), *inputs[1:], l1, l2))
    # A buffer in the place of one that is gone is another one.
    first = Buffer()
    stale = prepare_mega_moe(l1, l2, first, schedule="interleaved", lead=11)
    place = id(first)
    del first
    kept = []
    while len(kept) < 50:
        kept.append(Buffer())
        if id(kept[-1]) == place:
            break
    for other in kept[-1:]:
        prepare_mega_moe(l1, l2, other, schedule="wave")
    found["stale"] = told(lambda: stale(*inputs, l1, l2))
    buffer.buffer = None
    found["gone"] = told(lambda: call(*inputs, l1, l2))
    return found


def check_buffers(rank):
    shape = dict(
        zip(
            ("hidden", "intermediate_hidden", "num_experts", "num_topk", "num_max_tokens_per_rank"),
            (HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS),
            strict=True,
        )
    )
    cases = {
        "right": {},
        "hidden": {"hidden": 4224},
        "experts": {"num_experts": 129},
        "no tokens": {"num_max_tokens_per_rank": 0},
        "ranks differ": {"num_topk": 4 + rank},
    }
    found = {name: told(lambda change=change: check_buffer(dist.group.WORLD, shape | change)) for name, change in cases.items()}
    with mock.patch("socket.gethostname", return_value=f"host-{rank}"):
        found["two hosts"] = told(lambda: check_buffer(dist.group.WORLD, shape))
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    library = sys.modules["deep_gemm"] = Library()
    activation = types.SimpleNamespace(pin=load_pin("sgl-deep-gemm-0.1.3"))
    for module in (word_module, buffer_schedule, moe_call):
        module.require_overlay = lambda: activation
    # A CPU has no compute capability; the advisor's platform is of an H200.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    rank = dist.get_rank()
    seen = {"schedules": check_schedules(rank), "calls": check_calls(rank, library), "buffers": check_buffers(rank)}
    arguments.out.with_suffix(f".{rank}.json").write_text(json.dumps(seen))
    leave()


if __name__ == "__main__":
    main()
