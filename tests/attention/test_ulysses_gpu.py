"""Fused Ulysses attention gives the bits of serial attention, on two GPUs or more. Needs flash-attn-4 or fa3-fwd."""

from pathlib import Path

import pytest
from rank_run import GPUS, answers_of_ranks

RANKS = Path(__file__).with_name("ulysses_ranks.py")
TIMEOUT_S = 570

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
    """What both ranks found under each kernel."""
    out = tmp_path_factory.mktemp("ulysses") / "rank.json"
    return answers_of_ranks(RANKS, 2, out, TIMEOUT_S, GPUS)


@pytest.fixture(params=["fa3", "fa4"])
def found(request, summaries):
    """What each rank found under one kernel."""
    kernels = [summary["kernels"][request.param] for summary in summaries]
    if "skipped" in kernels[0]:
        pytest.skip(kernels[0]["skipped"])
    return kernels


CHECKS = (
    "spans",
    "in flight",
    "rounds, barrier",
    "rounds, inputs",
    "loaded",
    "graph",
    "steady",
    "compiled",
    "choice",
    "refusals",
)


def test_every_arm_of_every_case_has_the_bits_of_serial_attention(found):
    for rank in found:
        cases = {name: arms for name, arms in rank.items() if name not in CHECKS}
        compared = [arms for arms in cases.values() if "refused" not in arms]
        assert len(compared) >= 13
        for name, arms in cases.items():
            assert all(arms.values()), (name, arms)
            # 6 calls, each within its rows, NCCL twice, and the module.
            assert "refused" in arms or len(arms) >= 6 * 2 + 2 + 1, name


def test_only_types_that_the_kernel_lacks_are_left_out(found):
    refused = {name: arms["refused"] for name, arms in found[0].items() if isinstance(arms, dict) and "refused" in arms}
    assert all("fp" in name and "takes" in reason for name, reason in refused.items()), refused


@pytest.mark.parametrize("check", ["rounds, barrier", "rounds, inputs", "loaded"])
def test_late_ranks_late_readers_and_a_loaded_link_change_no_result(found, check):
    assert [rank[check] for rank in found] == [0, 0]


@pytest.mark.parametrize("check", ["spans", "in flight", "graph", "steady", "compiled"])
def test_spans_many_calls_graphs_compiled_calls_and_steady_state_hold(found, check):
    for rank in found:
        assert len(rank[check]) >= 2
        assert all(rank[check].values()), rank[check]


def test_auto_decides_alike_on_all_ranks(found):
    assert found[0]["choice"] == found[1]["choice"]
    assert found[0]["choice"]["same on all ranks"]
    assert found[0]["choice"]["bits"]


def test_what_cannot_be_is_refused_with_the_same_line_on_both_ranks(found):
    assert found[0]["refusals"] == found[1]["refusals"]
    for name, message in {
        "head dimension 100": "multiples of 8",
        "float32": "takes bfloat16",
        "shapes that differ": "SpanRefusedError: shape_per_rank is (4,) on rank 0 and (5,) on rank 1",
        "types that differ": "SpanRefusedError: dtype is torch.bfloat16 on rank 0 and torch.float16 on rank 1",
        "two ranks on one GPU": "SpanRefusedError: ranks 0 and 1 share GPU",
        "no elements": "SpanRefusedError: shape_per_rank is (4, 0); expected at least one element",
        "a closed span": "SpanClosedError: the output span of this Ulysses call was closed",
        "its memory": "SpanClosedError: the span over 2 ranks was closed; make a new one",
    }.items():
        assert message in found[0]["refusals"][name], name


def test_nothing_stays_mapped(summaries):
    assert [summary["ledger at the end"] for summary in summaries] == [[], []]
