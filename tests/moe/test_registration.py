"""What the environment asks of MegaMoE is checked before anything is built, and the message names the variable."""

import pytest

from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe.registration import check_environment


@pytest.fixture
def environment(monkeypatch):
    def set_variables(**values):
        for name in ("SCHEDULE", "LEAD", "PULLS"):
            monkeypatch.delenv(f"XSTAGE_MOE_{name}", raising=False)
        for name, value in values.items():
            monkeypatch.setenv(f"XSTAGE_MOE_{name}", value)

    return set_variables


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"SCHEDULE": ""},
        {"SCHEDULE": "auto"},
        {"SCHEDULE": "wave", "PULLS": "shared"},
        {"PULLS": "shared"},
        {"SCHEDULE": "interleaved", "LEAD": "33", "PULLS": "stock"},
        {"SCHEDULE": "auto", "LEAD": "auto"},
    ],
)
def test_what_a_buffer_can_be_set_to_passes(environment, values):
    environment(**values)
    check_environment()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"SCHEDULE": "AUTO"}, "XSTAGE_MOE_SCHEDULE is 'AUTO'; expected one of auto, wave, interleaved"),
        ({"PULLS": "fast"}, "XSTAGE_MOE_PULLS is 'fast'; expected one of auto, stock, shared"),
        ({"SCHEDULE": "auto", "LEAD": "0"}, "XSTAGE_MOE_LEAD is '0'; expected 'auto' or whole rows from 1 to 65535"),
        ({"SCHEDULE": "auto", "LEAD": "-3"}, "XSTAGE_MOE_LEAD is '-3'"),
        ({"SCHEDULE": "auto", "LEAD": "1_0"}, "XSTAGE_MOE_LEAD is '1_0'"),
        ({"SCHEDULE": "auto", "LEAD": "9" * 5000}, "XSTAGE_MOE_LEAD is '999"),
        ({"LEAD": "7"}, "XSTAGE_MOE_LEAD is set and XSTAGE_MOE_SCHEDULE is not; a lead needs"),
        ({"LEAD": "7", "PULLS": "shared"}, "XSTAGE_MOE_LEAD is set and XSTAGE_MOE_SCHEDULE is not; a lead needs"),
    ],
)
def test_what_no_buffer_could_be_set_to_names_the_variable(environment, values, message):
    environment(**values)
    with pytest.raises(InvalidInputError, match=message):
        check_environment()
