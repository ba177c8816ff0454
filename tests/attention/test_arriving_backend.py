"""Counters that a kernel can raise, and those that it can wait for; the same for every kernel that announces."""

import pytest

from xstage_plugin.attention.arriving_backend import require_awaited, require_counters
from xstage_plugin.errors import InvalidInputError


def counters(**changes):
    return {"out": (2, 300, 4, 128), "kv_rows": 600, "arrivals": (2, 4, 300), "dtype": "torch.int32", "stride": 1} | changes


def test_counters_are_as_long_as_the_rows_of_the_output_and_contiguous():
    require_counters(**counters())


def test_the_stride_of_a_single_row_does_not_matter():
    require_counters(**counters(out=(2, 1, 4, 128), arrivals=(2, 4, 1), stride=7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"arrivals": (2, 300, 4)},
            r"arrivals are torch.int32 \[2, 300, 4\] with innermost stride 1; expected .*\[2, 4, 300\]",
        ),
        ({"dtype": "torch.int64"}, "arrivals are torch.int64 .* expected torch.int32"),
        ({"stride": 8}, "innermost stride 8; expected .* stride 1"),
        ({"kv_rows": 0}, "keys and values have no rows; expected at least 1"),
    ],
)
def test_what_a_kernel_could_not_announce_is_refused(change, message):
    with pytest.raises(InvalidInputError, match=message):
        require_counters(**counters(**change))


@pytest.mark.parametrize(("awaits", "stride"), [((3, 1000), 1), ((1, 1), 1), ((2, 1), 7)])
def test_a_launch_waits_for_counters_of_any_rows(awaits, stride):
    require_awaited((1, 5, 2, 128), awaits, "torch.int32", stride, expected=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"awaits": (3, 1, 1000)}, r"awaits are torch.int32 \[3, 1, 1000\] with innermost stride 1; expected"),
        ({"awaits": (3, 0)}, r"\[3, 0\] .*; expected torch.int32 \[sequences, rows\], both at least 1, with stride 1"),
        ({"awaits": (0, 1000)}, r"\[0, 1000\] .*both at least 1"),
        ({"dtype": "torch.int64"}, "awaits are torch.int64"),
        ({"stride": 2}, "with innermost stride 2; expected"),
        ({"expected": 0}, "expected is 0; expected the count of a row block that has arrived, from 1 on"),
        ({"q": (1, 0, 2, 128)}, r"q is \[1, 0, 2, 128\]; expected a row to compute"),
    ],
)
def test_counters_that_no_launch_can_wait_for_are_refused(changed, message):
    fits = {"q": (1, 5, 2, 128), "awaits": (3, 1000), "dtype": "torch.int32", "stride": 1, "expected": 8}
    with pytest.raises(InvalidInputError, match=message):
        require_awaited(**(fits | changed))
