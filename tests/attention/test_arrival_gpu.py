"""Rows are whole the moment their counters say so, on two GPUs or more. Needs a kernel that announces."""

from pathlib import Path

import pytest
from rank_run import GPUS, answers_of_ranks

RANKS = Path(__file__).with_name("arrival_ranks.py")
TIMEOUT_S = 570

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
    """What both ranks found under each kernel."""
    out = tmp_path_factory.mktemp("arrival") / "rank.json"
    return answers_of_ranks(RANKS, 2, out, TIMEOUT_S, GPUS)


@pytest.fixture(params=["fa3-arrival", "fa4-arrival"])
def found(request, summaries):
    """What each rank found under one kernel."""
    kernels = [summary["kernels"][request.param] for summary in summaries]
    if "skipped" in kernels[0]:
        pytest.skip(kernels[0]["skipped"])
    return kernels


CHECKS = (
    "rounds, barrier",
    "rounds, inputs",
    "kernel waits",
    "loaded",
    "graph",
    "own kernel",
    "steady",
    "projection",
    "public",
)


def test_every_part_of_every_case_has_the_bits_of_serial_attention(found):
    for rank in found:
        cases = {name: arms for name, arms in rank.items() if name not in CHECKS}
        assert len([arms for arms in cases.values() if "refused" not in arms]) >= 13
        for name, arms in cases.items():
            assert all(arms.values()), (name, arms)
            # Serial; 4 arms of two calls with their counters, parts and bounds; the module and its counters.
            assert "refused" in arms or len(arms) == 1 + 4 * 6 + 2, name


def test_only_types_that_the_kernel_lacks_are_left_out(found):
    refused = {name: arms["refused"] for name, arms in found[0].items() if "refused" in arms}
    assert all("fp" in name and "takes" in reason for name, reason in refused.items()), refused


@pytest.mark.parametrize("check", CHECKS)
def test_late_ranks_a_loaded_link_graphs_own_kernels_and_projections_hold(found, check):
    for rank in found:
        assert len(rank[check]) >= 2
        assert all(rank[check].values()), rank[check]


def test_nothing_stays_mapped(summaries):
    assert [summary["ledger at the end"] for summary in summaries] == [[], []]
