"""Schedules and calls of MegaMoE over two gloo processes, with a stand-in for DeepGEMM: who hears of what. Needs torch."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).with_name("mega_moe_gloo_ranks.py")
TIMEOUT_S = 240
NO_TORCH = importlib.util.find_spec("torch") is None
SHARED = 0x10000

# CI has torch: there, a missing one is a fault and not a reason to skip.
pytestmark = pytest.mark.skipif(NO_TORCH and os.environ.get("CI") != "true", reason="torch is not installed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank saw."""
    out = tmp_path_factory.mktemp("mega_moe") / "rank.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(RANKS),
        "--out",
        str(out),
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XSTAGE_")}
    run = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(2)]


def test_what_is_set_is_the_advisors_choice_with_shared_pulls(ranks):
    for rank in ranks:
        chosen = rank["schedules"]["auto"]
        assert (chosen["lead_rows"], chosen["pulls"], chosen["word"]) == (33, "shared", 33 | SHARED)


def test_a_with_statement_sets_a_schedule_and_puts_the_earlier_one_back(ranks):
    for rank in ranks:
        assert (rank["schedules"]["inside"], rank["schedules"]["after"]) == (7, 33 | SHARED)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("different leads", "the ranks ask for leads of [5, 6] rows (0 is the expert wave); expected the same on all"),
        ("different schedules", "the ranks ask for leads of [0, 9] rows"),
        ("different pulls", "the ranks ask for pulls ['shared', 'stock']; expected the same on all"),
        ("one rank asks for nonsense", "rank 1: lead is 0; expected"),
        ("a lead of 0", "rank 0: lead is 0; expected"),
        ("unknown pulls", "rank 0: pulls is 'fast'; expected one of auto, stock, shared"),
        ("one rank gives a list", "rank 1: lead is [7]; expected a name or a number"),
        ("one rank fails in another way", "rank 1: the disk is gone"),
        ("a buffer is gone on one rank", "rank 1: the symmetric buffer was destroyed; make a new one"),
        ("platform of another GPU", "rank 0: platform paper-148sm is of sm_100 and this GPU of sm_90"),
    ],
)
def test_what_the_ranks_disagree_on_is_an_error_on_all_of_them_and_changes_nothing(ranks, case, message):
    for rank in ranks:
        assert rank["schedules"][case].startswith(f"ScheduleMismatchError: {message}")
        assert rank["schedules"]["unchanged"] == 33 | SHARED


def test_without_a_platform_the_bundled_one_of_the_gpus_generation_decides(ranks):
    assert [rank["schedules"]["without a platform"] for rank in ranks] == [33, 33]


def test_a_call_runs_the_schedule_that_it_names_and_leaves_it_set(ranks):
    for number, rank in enumerate(ranks):
        calls = rank["calls"]
        assert (calls["as set"], calls["wave with shared pulls"], calls["interleaved"], calls["stays"]) == (0, SHARED, 7, 7)
        assert calls["own order"] == 3 + number


def test_a_kernel_that_one_rank_cannot_compile_is_launched_on_none(ranks):
    for rank in ranks:
        expected = "CompileError: rank 1: nvcc is gone"
        assert rank["calls"]["compile fails on one rank"] == expected
        assert rank["calls"]["launches then"] == 0


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no tokens", "no error"),
        ("fewer SMs", "no error"),
        ("padding and duplicates", "no error"),
        ("too many tokens", "InvalidInputError: y has 8193 tokens; expected at most the buffer's 8192"),
        ("wrong hidden", "InvalidInputError: y is '(4, 8) bfloat16'; expected contiguous bfloat16 (tokens, 4096)"),
        ("wrong type", "InvalidInputError: y is '(4, 4096) float32'; expected contiguous bfloat16"),
        ("wrong weights", "InvalidInputError: l1_weights: '(3, 1024, 4096) float8_e4m3fn'; expected (64, 1024, 4096) float8"),
        ("float weights", "InvalidInputError: l1_weights: '(64, 1024, 4096) float32'; expected (64, 1024, 4096) float8_e4m3fn"),
        ("wrong scales", "InvalidInputError: l1_weights's scales: '(64, 1, 32) float32'; expected (64, 8, 32) float32"),
        ("no weights", "InvalidInputError: l1_weights is None; expected (values, scales)"),
        ("no y", "InvalidInputError: y is None; expected a tensor (tokens, 4096)"),
        ("weights of the operator", "InvalidInputError: l1_weights: '(3, 1024, 4096) float8_e4m3fn'; expected"),
        ("odd SMs of the operator", "InvalidInputError: DeepGEMM is set to 131 SMs"),
        ("stale", "InvalidInputError: the symmetric buffer of this call is gone"),
        ("first call, id out of range on one rank", "CompileError: rank 1: topk_idx[0, 0] is 128; expected an expert"),
        ("first call, no weights on one rank", "CompileError: rank 1: l1_weights is None; expected (values, scales)"),
        ("lead alone", "InvalidInputError: lead or pulls without schedule; give schedule= as well"),
        ("nonsense", "InvalidInputError: schedule is 'fast'; expected one of auto, wave, interleaved"),
        ("Blackwell", "InvalidInputError: mega_moe runs the FP8 kernel of Hopper; elsewhere use set_schedule"),
        ("odd SMs", "InvalidInputError: DeepGEMM is set to 131 SMs; MegaMoE takes an even number"),
        ("id out of range", "InvalidInputError: topk_idx[2, 1] is 128; expected an expert from 0 to 127, or -1"),
        ("a type", "InvalidInputError: x is '(4, 32) float32'; expected '(4, 4096) float8_e4m3fn'"),
        ("too many for the operator", "InvalidInputError: x has 8193 tokens; expected at most the buffer's 8192"),
        ("gone", "InvalidInputError: the symmetric buffer of this call is gone; prepare the call with the new one"),
        ("destroyed", "InvalidInputError: the symmetric buffer was destroyed; make a new one"),
    ],
)
def test_a_call_that_cannot_work_is_refused_before_it_launches(ranks, case, message):
    for rank in ranks:
        assert rank["calls"][case].startswith(message)


def test_ranks_that_meet_in_different_steps_are_told_so(ranks):
    steps = "the ranks are at different steps: set_schedule, the first MegaMoE call of a buffer"
    for rank, error in zip(ranks, ("ScheduleMismatchError", "CompileError"), strict=True):
        assert rank["calls"]["different steps"].startswith(f"{error}: {steps}")


def test_the_operator_is_sound_and_torch_compile_takes_a_prepared_call_whole(ranks):
    for rank in ranks:
        assert rank["calls"]["opcheck"] == "passed"
        assert rank["calls"]["compiled whole"] == 13  # the word, which the stand-in writes, and one
        assert rank["calls"]["inputs"] == [2, 3, 6, 7]
        assert rank["calls"]["no tokens of the operator"] == [0, 4096]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("right", "no error"),
        ("hidden", "InvalidInputError: MegaMoE takes no such buffer: hidden 4224 is no multiple of 256"),
        ("experts", "InvalidInputError: MegaMoE takes no such buffer: 129 experts are no multiple of the 2 ranks"),
        ("no tokens", "InvalidInputError: MegaMoE takes no such buffer: num_max_tokens_per_rank 0 is below 1"),
        ("two hosts", "InvalidInputError: the group spans 2 hosts (host-0, host-1); MegaMoE's buffers need one NVLink host"),
        ("ranks differ", "InvalidInputError: the ranks ask for num_topk [4, 5]; expected the same on all"),
    ],
)
def test_a_buffer_that_cannot_work_is_refused_on_all_ranks(ranks, case, message):
    for rank in ranks:
        assert rank["buffers"][case] == message
