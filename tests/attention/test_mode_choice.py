import pytest

from xstage_plugin.attention.layout import UlyssesLayout
from xstage_plugin.attention.mode_choice import choose_mode
from xstage_plugin.burst_gap.catalog import load_platform, platform_for
from xstage_plugin.errors import InvalidInputError

LONG, SHORT = (UlyssesLayout.even(rows, 8, 128, 2) for rows in (16384, 256))
H200 = load_platform("h200-nvlink-pair-bulk")


@pytest.mark.parametrize(
    ("seq_len", "heads", "mode", "reason"),
    [
        (1024, 8, "fused", "both bounds hold"),
        (16384, 8, "fused", "the predicted cost of"),
        (128, 128, "serial", "is not below the"),
    ],
)
def test_auto_is_what_the_advisor_says_with_its_reason(seq_len, heads, mode, reason):
    choice = choose_mode(UlyssesLayout.even(seq_len, heads, 128, 2), "auto", H200, "sm_90")
    assert choice.mode == mode
    assert reason in choice.reason


def test_a_mode_that_was_asked_for_needs_no_platform():
    for mode in ("fused", "serial"):
        choice = choose_mode(SHORT, mode, None, "")
        assert (choice.mode, choice.reason) == (mode, "asked for")


def test_one_rank_is_fused_because_its_own_output_is_the_result():
    assert choose_mode(UlyssesLayout((128,), (4,), 128), "auto", None, "").mode == "fused"


@pytest.mark.parametrize(
    ("platform", "arch", "message"),
    [
        (H200, "sm_100", "platform h200-nvlink-pair-bulk is of sm_90 and this device is sm_100; give platform="),
        (None, "sm_90", "there is no platform and this device is sm_90"),
    ],
)
def test_auto_does_not_answer_for_another_generation(platform, arch, message):
    with pytest.raises(InvalidInputError, match=message):
        choose_mode(LONG, "auto", platform, arch)


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(InvalidInputError, match="unknown mode 'piggyback'; known: auto, fused, serial"):
        choose_mode(LONG, "piggyback", H200, "sm_90")


@pytest.mark.parametrize(
    ("given", "variable", "arch", "name"),
    [
        (None, "", "sm_90", "h200-nvlink-pair-bulk"),  # nobody chose: the bundled one with bulk stores
        (None, "", "sm_100", "paper-148sm"),
        (None, "", "sm_120", "paper-148sm"),  # none of this generation: choose_mode refuses it
        (None, "h200-nvlink-pair", "sm_90", "h200-nvlink-pair"),
        (None, "h200-nvlink-pair", "sm_100", "h200-nvlink-pair"),
        ("paper-148sm", "", "sm_90", "paper-148sm"),
    ],
)
def test_the_platform_is_the_given_one_the_variables_or_a_bundled_one_of_this_generation(
    monkeypatch, given, variable, arch, name
):
    monkeypatch.setenv("XSTAGE_PLATFORM", variable)
    assert platform_for(given, arch, "bulk").name == name
