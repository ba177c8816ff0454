"""What a call asks for, before any GPU: names and leads are checked, auto is the advisor's answer."""

from dataclasses import replace

import pytest

from xstage_plugin.burst_gap.catalog import load_platform
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe.routing import balanced_routing
from xstage_plugin.moe.schedule_choice import LARGEST_LEAD, ScheduleChoice, choose_schedule, parse_lead
from xstage_plugin.moe.workload import MoeWorkload

PAIR = load_platform("h200-nvlink-pair")
FINE = MoeWorkload(4096, 512, experts=128, topk=8, ranks=2, tokens_per_rank=8192, routing=balanced_routing(128))
COARSE = MoeWorkload(4096, 4096, experts=16, topk=2, ranks=2, tokens_per_rank=8192, routing=balanced_routing(16))


def test_auto_is_what_the_advisor_says():
    fine, coarse = choose_schedule(FINE, "auto", "auto", PAIR), choose_schedule(COARSE, "auto", "auto", PAIR)
    assert (fine.schedule, fine.lead_rows) == ("interleaved", 33)
    assert (coarse.schedule, coarse.lead_rows) == ("wave", 0)
    assert "stall" in fine.reason
    assert "no backpressure" in coarse.reason


def test_what_is_asked_for_is_done():
    assert choose_schedule(FINE, "wave", "auto", PAIR).lead_rows == 0
    assert choose_schedule(COARSE, "interleaved", 12, PAIR).lead_rows == 12
    assert choose_schedule(COARSE, "interleaved", "auto", PAIR).lead_rows == 5
    assert choose_schedule(FINE, "auto", 50, PAIR).lead_rows == 50


@pytest.mark.parametrize(
    ("asked", "can_share", "ranks", "pulls"),
    [
        ("auto", True, 2, "shared"),
        ("auto", False, 2, "stock"),  # a kernel that has none
        ("auto", True, 1, "stock"),  # nobody to pull from
        ("stock", True, 2, "stock"),
        ("shared", True, 1, "shared"),
    ],
)
def test_pulls_are_shared_where_that_can_gain(asked, can_share, ranks, pulls):
    workload = replace(FINE, ranks=ranks)
    assert choose_schedule(workload, "interleaved", 9, PAIR, asked, can_share).pulls == pulls


def test_the_wave_keeps_stock_pulls_unless_others_are_asked_for():
    for workload, schedule in ((FINE, "wave"), (COARSE, "auto")):
        assert choose_schedule(workload, schedule, "auto", PAIR).pulls == "stock"
        assert choose_schedule(workload, schedule, "auto", PAIR, "shared").pulls == "shared"
    assert choose_schedule(FINE, "auto", "auto", PAIR).pulls == "shared"


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        (ScheduleChoice(0, ""), 0),
        (ScheduleChoice(33, ""), 33),
        (ScheduleChoice(0, "", "shared"), 0x10000),
        (ScheduleChoice(LARGEST_LEAD, "", "shared"), 0x1FFFF),
    ],
)
def test_the_word_that_the_kernel_reads(choice, word):
    assert choice.word == word
    assert ScheduleChoice.of_word(word, "") == choice


def test_shared_pulls_of_a_kernel_without_them_are_refused():
    with pytest.raises(InvalidInputError, match="pulls is 'shared', which the kernel of this GPU has not"):
        choose_schedule(FINE, "auto", "auto", PAIR, "shared", can_share=False)
    with pytest.raises(InvalidInputError, match="pulls is 'fast'; expected one of auto, stock, shared"):
        choose_schedule(FINE, "auto", "auto", PAIR, "fast")


@pytest.mark.parametrize(
    ("schedule", "lead", "message"),
    [
        ("fast", "auto", "schedule is 'fast'; expected one of auto, wave, interleaved"),
        ("interleaved", 0, "lead is 0"),
        ("interleaved", -3, "lead is -3"),
        ("interleaved", 65536, "lead is 65536"),
        ("interleaved", 2.5, "lead is 2.5"),
        ("interleaved", True, "lead is True"),
        ("wave", 5, "lead is 5 under schedule 'wave'"),
    ],
)
def test_nonsense_is_refused(schedule, lead, message):
    with pytest.raises(InvalidInputError, match=message):
        choose_schedule(FINE, schedule, lead, PAIR)


def test_a_lead_from_the_environment_is_a_number_or_auto():
    assert parse_lead("auto") == "auto"
    assert parse_lead("24") == 24
    with pytest.raises(InvalidInputError, match="lead is 'many'"):
        parse_lead("many")
