import pytest
from hypothesis import given
from hypothesis import strategies as st

from xstage_plugin.attention.arrival_rows import DEFAULT_PARTS, UNWAITED, blocks_of, checked_parts, choose_parts
from xstage_plugin.errors import InvalidInputError


@given(st.integers(0, 5000), st.integers(0, 3000), st.integers(1, 300))
def test_the_blocks_of_rows_are_those_that_hold_one_of_them(first, count, block_rows):
    rows = range(first, first + count)
    assert set(blocks_of(rows, block_rows)) == {row // block_rows for row in rows}


@given(st.integers(1, 5000), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 200)))
def test_parts_are_whole_blocks_of_about_equal_number_and_make_up_all_rows(rows, block_rows, asked):
    parts = choose_parts(rows, block_rows, asked)
    assert parts.waits
    assert [row for part in parts.ranges for row in part] == list(range(rows))
    blocks = [blocks_of(part, block_rows) for part in parts.ranges]
    # No block is in two parts: each is waited for once.
    assert [block for some in blocks for block in some] == list(range(-(-rows // block_rows)))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    assert len(parts.ranges) == min(DEFAULT_PARTS if asked is None else asked, sum(map(len, blocks)))


@pytest.mark.parametrize(
    ("arguments", "ranges", "waits", "reason"),
    [
        ((0, 128, 2), (), True, "this rank has no rows"),
        ((300, None, 4), (range(300),), True, "one part: nothing announces rows before the exchange has ended"),
        ((300, None, UNWAITED), (range(300),), True, "one part: nothing announces rows before the exchange has ended"),
        ((300, 128, UNWAITED), (range(300),), False, "one part: the consumer waits for its rows itself"),
        ((300, 128, None), (range(300),), True, "1 part of 3 row blocks, by default"),
        ((300, 128, 2), (range(128), range(128, 300)), True, "2 parts of 3 row blocks, 2 asked for"),
        ((300, 128, 8), (range(128), range(128, 256), range(256, 300)), True, "3 parts of 3 row blocks, 8 asked for"),
    ],
)
def test_the_number_of_parts_has_a_reason(arguments, ranges, waits, reason):
    parts = choose_parts(*arguments)
    assert (parts.ranges, parts.waits, parts.reason) == (ranges, waits, reason)


@pytest.mark.parametrize("parts", [-1, 0.5, True, "two"])
def test_what_is_no_number_of_parts_is_refused(parts):
    with pytest.raises(InvalidInputError, match=r"parts is .*; expected None or a whole number of at least 0"):
        checked_parts(parts)
