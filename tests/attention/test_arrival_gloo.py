"""Rows that are consumed as they arrive, over gloo processes, without a GPU. Needs torch."""

import importlib.util
import os
from pathlib import Path

import pytest
from rank_run import GLOO, answers_of_ranks

RANKS = Path(__file__).with_name("arrival_gloo_ranks.py")
TIMEOUT_S = 240
NO_TORCH = importlib.util.find_spec("torch") is None

# CI has torch: there, a missing one is a fault and not a reason to skip.
pytestmark = pytest.mark.skipif(NO_TORCH and os.environ.get("CI") != "true", reason="torch is not installed")


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request, tmp_path_factory):
    """What every rank wrote."""
    out = tmp_path_factory.mktemp("arrival") / "rank.json"
    return answers_of_ranks(RANKS, request.param, out, TIMEOUT_S, GLOO)


def test_each_part_is_whole_when_its_consumer_is_called_and_every_counter_is_clear_again(ranks):
    # The ranks compare every part themselves; here, that each of them had several.
    for rank in ranks:
        assert len(rank["parts"]) >= 5
        assert all(len(counts) == 5 for counts in rank["parts"].values())
    assert max(max(counts) for counts in ranks[0]["parts"].values()) >= 3


def test_where_nothing_announces_the_consumer_gets_the_same_rows_once(ranks):
    for rank in ranks:
        assert rank["other ways"] == dict.fromkeys(rank["other ways"], True)
        assert len(rank["other ways"]) == 5


def test_a_consumer_may_wait_for_its_rows_itself(ranks):
    for rank in ranks:
        assert rank["waits itself"]["rows"]
        assert rank["waits itself"]["clear"]
    # The last rank is late: the others were called before its rows had come.
    assert all(rank["waits itself"]["early"] for rank in ranks[:-1])


@pytest.mark.parametrize("ordering", ["barrier", "inputs"])
def test_a_rank_that_is_a_round_ahead_overwrites_nothing_and_counts_nothing_twice(ranks, ordering):
    assert all(rank["rounds"][ordering] is True for rank in ranks)


def test_a_consumer_that_fails_on_one_rank_leaves_the_next_calls_alone(ranks):
    assert ranks[0]["failing consumer"] == {"calls": [True, '"the consumer\'s own"', True, True], "clear": True}
    for rank in ranks[1:]:
        assert rank["failing consumer"] == {"calls": [True] * 4, "clear": True}


def test_calls_over_one_output_share_its_counters_and_keep_no_consumer(ranks):
    for rank in ranks:
        assert (rank["public call"]["made"], rank["public call"]["closed"], rank["public call"]["kept"]) == (1, True, False)
        assert rank["public call"]["unwaited"].startswith("InvalidInputError: parts is 0, and nothing tells the consumer how")


def test_a_kernel_that_waits_takes_the_place_of_waits_on_the_stream_and_of_the_closing_barrier(ranks):
    # Waits of the kernel, barriers of the span, waits on the stream.
    expected = {
        "one part, barrier": [1, 1, 0],
        "two parts, barrier": [0, 1, 2],
        "no consumer, barrier": [1, 1, 0],
        "one part, inputs": [1, 0, 0],
        "two parts, inputs": [0, 0, 2],
        "no consumer, inputs": [0, 1, 0],  # the caller's exchange may rely on the closing barrier
    }
    assert [rank["kernel waits"] for rank in ranks] == [expected] * len(ranks)


def test_the_projection_of_parts_is_the_projection_of_all_rows(ranks):
    for rank in ranks:
        assert rank["projection"] == dict.fromkeys(rank["projection"], True)
        assert len(rank["projection"]) == 4


def test_a_group_that_is_not_the_world_works_by_its_own_ranks(ranks):
    if len(ranks) == 3:
        assert [rank["subgroup"] for rank in ranks] == ["outside", "ok", "ok"]


TOLD = {
    "a consumer on one rank": "whether consume= is given is False on rank 0 and True on rank 1; expected the same",
    "other parts": "parts is 2 on rank 0 and 1 on rank 1",
    "other orders of tiles": "head_by_head is False on rank 0 and True on rank 1",
    "other row blocks": "rows of a block of announcing is 16 on rank 0 and 8 on rank 1",
    "counters on one rank": "whether counters= is given is False on rank 0 and True on rank 1",
    "counters of another layout": "rank 1: the counter span's shape is (1, 3); this layout expects (1, 4)",
    "counters over CPUs": "rank 0 asks for a span on 'cpu'; expected a CUDA device",
    "closed counters": "rank 0: the counter span is closed; make a new one",
    "fewer parts than none": "rank 0: parts is -1; expected None or a whole number of at least 0",
    "half a part": "rank 0: parts is 0.5; expected None or a whole number of at least 0",
    "no part where nothing announces": "parts is 0 and no rows announce themselves (the mode is serial); expected parts from 1",
    "a consumer that cannot be called": "rank 1: consume is 5; expected a function of rows and first_row",
    "a mask by its name": "rank 0: causal is 'False'; expected True or False",
    "a backend that is a class": "is a class, not an object of it; expected a name or an AttentionBackend",
    "a backend without a refusal": "rank 0: backend None has no name; expected a name or an AttentionBackend",
    "parts that are a list": "rank 0: parts is [1]; expected None or a whole number of at least 0",
}


def test_what_stops_one_rank_stops_all_of_them_with_the_same_line(ranks):
    for rank in ranks:
        assert rank["told"] == ranks[0]["told"]
        assert rank["told"].keys() == TOLD.keys()
        for name, message in TOLD.items():
            assert message in rank["told"][name], rank["told"][name]
            assert "\n" not in rank["told"][name]


def test_what_does_not_fit_a_call_is_one_line_on_the_rank_that_has_it(ranks):
    for rank in ranks:
        for name, message in {
            "no consumer": "InvalidInputError: no consumer was given to a Ulysses call prepared with one; prepare it",
            "a consumer that was not prepared for": "InvalidInputError: a consumer was given to a Ulysses call prepared",
            "issued alone": "InvalidInputError: a call whose rows announce themselves cannot be issued alone; prepare one",
            "counters closed since": "SpanClosedError: the arrival counters of this Ulysses call were closed; prepare it again",
            "a weight of three dimensions": "InvalidInputError: weight is (1, 4, ",
            "a bias of another length": "InvalidInputError: bias is (",
            "a bias of another type": "InvalidInputError: bias is torch.float16 on cpu; expected torch.float32 on cpu",
            "rows beyond the result": "InvalidInputError: rows are (1, 4, ",
            "rows of another type": "InvalidInputError: rows are torch.float32 on cpu; expected torch.float64 on cpu",
            "a projection of rows below none": "InvalidInputError: rows is -1; expected a whole number of at least 0",
            "rows of fewer heads": "InvalidInputError: rows are (1, 4, ",
        }.items():
            assert rank["local"][name].startswith(message), rank["local"][name]
        assert "torch.compile met a Ulysses call with consume=; keep it outside" in rank["local"]["compiled"]
