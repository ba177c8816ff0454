"""The data path and the collective logic of Ulysses attention over gloo processes, without a GPU. Needs torch."""

import importlib.util
import os
from pathlib import Path

import pytest
from rank_run import GLOO, answers_of_ranks

RANKS = Path(__file__).with_name("ulysses_gloo_ranks.py")
TIMEOUT_S = 240
NO_TORCH = importlib.util.find_spec("torch") is None

# CI has torch: there, a missing one is a fault and not a reason to skip.
pytestmark = pytest.mark.skipif(NO_TORCH and os.environ.get("CI") != "true", reason="torch is not installed")


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request, tmp_path_factory):
    """What every rank wrote."""
    out = tmp_path_factory.mktemp("ulysses") / "rank.json"
    return answers_of_ranks(RANKS, request.param, out, TIMEOUT_S, GLOO)


def test_every_mode_order_and_module_gives_plain_attention_over_the_whole_sequence(ranks):
    for rank in ranks:
        assert len(rank["compared"]) >= 5
        # In 3 orders: fused, serial by copies, serial by all_to_all_single. And the module, fused, serial and without spans.
        assert set(rank["compared"].values()) == {3 * 3 + 3}


def test_late_ranks_and_late_readers_change_no_result_in_either_ordering(ranks):
    for rank in ranks:
        assert rank["ordering"] == {"barrier": "ok", "inputs": "ok"}


def test_only_the_first_call_talks_to_the_other_ranks(ranks):
    assert all(rank["prepared once"] is True for rank in ranks)


def test_ranks_of_a_span_meet_also_when_one_of_them_has_met_another_group_before(ranks):
    everybody = list(range(len(ranks)))
    for rank in ranks:
        assert rank["meeting"]["counts"] == [0] * (len(ranks) - 1) + [1], "the double does not count like torch"
        assert rank["meeting"]["met"] == everybody
        assert rank["meeting"]["named"]
    assert ranks[-1]["meeting"]["alone"] == [[7]]


def test_calls_prepared_inside_or_outside_of_inference_mode_run_in_both(ranks):
    for rank in ranks:
        assert len(rank["inference mode"]) == 16
        assert all(rank["inference mode"].values()), rank["inference mode"]


TOLD = {
    "other rows": "GroupMismatchError: layout is UlyssesLayout(rows=(",
    "other modes": "GroupMismatchError: mode is fused on rank 0 and serial on rank 1; expected the same on all ranks",
    "other scales": "GroupMismatchError: softmax_scale is None on rank 0 and 0.5 on rank 1",
    "causal on one rank": "GroupMismatchError: causal is False on rank 0 and True on rank 1",
    "other orders": "GroupMismatchError: q_order is sequence on rank 0 and own_last on rank 1",
    "other orderings": "GroupMismatchError: ordering is barrier on rank 0 and inputs on rank 1",
    "other types": "GroupMismatchError: dtype is torch.float32 on rank 0 and torch.float16 on rank 1",
    "a span on one rank": "GroupMismatchError: whether span= is given is False on rank 0 and True on rank 1",
    "a span of another layout": "GroupMismatchError: rank 1: the span's shape is (2,",
    "a span of another group": "GroupMismatchError: rank 0: the span was made over another group of ranks; make one",
    "a closed span": "GroupMismatchError: rank 0: the span is closed; make a new one",
    "too many ranks": "GroupMismatchError: rank 0: the layout is for",
    "not a type": "GroupMismatchError: rank 0: dtype is 'float32'; expected a torch dtype",
    "a fault of another kind": "MemoryError: no memory left",
    "not a layout": "GroupMismatchError: rank 0: layout is 'even'; expected a UlyssesLayout",
    "unknown mode": "GroupMismatchError: rank 0: unknown mode 'fuse'; did you mean fused?",
    "unknown order": "GroupMismatchError: rank 0: unknown order of query rows 'delivery'; known: own_first, own_last",
    "unknown ordering": "GroupMismatchError: rank 0: unknown ordering 'none'; known: barrier, inputs",
    "unknown backend": "GroupMismatchError: rank 0: unknown attention backend 'fa2'; did you mean fa",
    "a scale of 0": "GroupMismatchError: rank 0: softmax_scale is 0; expected",
    "causal with text": "GroupMismatchError: rank 0: causal attention with 2 shared rows; expected none",
    "uneven kv groups": "unevenly; expected equal groups",
    "a backend that one rank lacks": "GroupMismatchError: no attention backend runs this on all ranks; rank 1: not here",
    "fa4 on a CPU": "no attention backend runs this on all ranks; rank 0: fa4 runs on CUDA devices, not on cpu",
    "auto on a CPU": "rank 0: fa4 runs on CUDA devices, not on cpu; rank 0: fa3 runs on CUDA devices, not on cpu",
    "no platform for a CPU": "GroupMismatchError: rank 0: platform paper-148sm is of sm_100 and this device is no GPU; give",
    "unknown platform": "GroupMismatchError: rank 0: unknown platform 'h100'; known: h200-nvlink-pair",
    "a span over CPUs": "SpanRefusedError: rank 0 asks for a span on 'cpu'; expected a CUDA device",
    "an input span of another layout": "GroupMismatchError: rank 1: input_span is (2,",
    "a peer span on a CPU": "SpanRefusedError: rank 0 asks for a span on 'cpu'; expected a CUDA device",
    "a peer span without a GPU": "SpanRefusedError: rank 0: no CUDA device is visible; a span needs one GPU a rank",
    "no shape": "SpanRefusedError: rank 1: shape_per_rank is (); expected a tuple of whole numbers",
    "no dtype": "SpanRefusedError: rank 1: dtype is 'bfloat16'; expected a torch dtype",
}


def test_what_stops_one_rank_stops_all_of_them_with_the_same_line(ranks):
    for place, rank in enumerate(ranks):
        # The rank that had it keeps its own error, with its traceback.
        if place != 1:
            assert rank["told"]["a fault of another kind"].startswith("GroupMismatchError: rank 1: MemoryError: ")
            rank["told"]["a fault of another kind"] = ranks[1]["told"]["a fault of another kind"]
        assert rank["told"] == ranks[1]["told"]
        for name, message in TOLD.items():
            assert message in rank["told"][name], name
        assert rank["told"].keys() == TOLD.keys(), "a refusal without an expected line"
        assert not any("\n" in message for message in rank["told"].values())


def test_inputs_that_do_not_fit_are_one_line_on_the_rank_that_has_them(ranks):
    for rank in ranks:
        for name, message in {
            "q of fewer rows": "InvalidInputError: q is (1, 7, 2, 8); this rank's layout expects (1, 8, 2, 8)",
            "k of fewer heads": "InvalidInputError: k is (1, 8, 1, 8); this rank's layout expects (1, 8, 2, 8)",
            "v of another type": "InvalidInputError: v is torch.float16; the call was prepared for torch.float32",
            "v on another device": "InvalidInputError: v is on meta; the call was prepared for cpu",
            "k with a stride along the head": "InvalidInputError: k has stride 2 along the head dimension; expected 1",
            "q with a gradient": "InvalidInputError: q requires a gradient; this is forward only",
            "q of three dimensions": "InvalidInputError: q is (8, 2, 8) and k (1, 8, 2, 8); expected [B, S, heads, d]",
            "a span closed since": "SpanClosedError: the output span of this Ulysses call was closed",
            "an input span closed since": "SpanClosedError: a span of this Ulysses layer was closed; make a new layer",
            "a call that is gone": "InvalidInputError: no prepared Ulysses call is named",
        }.items():
            assert rank["local"][name].startswith(message), rank["local"][name]
        assert rank["local"]["a layer with one head"].startswith("InvalidInputError: q is (1, ")


def test_a_rank_outside_the_group_is_told_so(ranks):
    outside = [rank["local"]["not in the group"] for rank in ranks if "not in the group" in rank["local"]]
    assert outside
    assert all("is not in this group; only the group's own ranks may take part" in message for message in outside)


def test_a_group_that_is_not_the_world_works_by_its_own_ranks(ranks):
    if len(ranks) == 3:
        assert [rank["subgroup"] for rank in ranks] == ["outside", "ok", "ok"]


def test_torch_compile_keeps_calls_whole_and_leaves_the_peers_memory_alone(ranks):
    if len(ranks) == 2:
        for rank in ranks:
            cold = rank["compiled"].pop("cold")
            assert "torch.compile met a Ulysses call that is not prepared; call it once before" in cold
            assert len(rank["compiled"]) == 6
            assert set(rank["compiled"].values()) == {"ok"}


def test_the_operator_passes_torchs_own_checks(ranks):
    if len(ranks) == 2:
        for rank in ranks:
            assert len(rank["operator"]) >= 4
            assert set(rank["operator"].values()) == {"SUCCESS"}
