import pytest

from xstage_plugin.attention.span_meeting import FromZero


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["CUDASymmetricMemory/7/0", "CUDASymmetricMemory/7/1"], ["CUDASymmetricMemory/0/0", "CUDASymmetricMemory/0/1"]),
        (["X/12/3", "X/13/3", "X/12/4"], ["X/0/3", "X/1/3", "X/0/4"]),
        (["X/5/0", "X/6", "X/6/last_member"], ["X/0/0", "X/1", "X/1/last_member"]),
        (["rank", "a/b/3", "X/5a/0"], ["rank", "a/b/3", "X/5a/0"]),
        (["X/0/0", "X/1/0"], ["X/0/0", "X/1/0"]),
    ],
    ids=["first is 0", "distances stay", "barriers", "not numbered", "nothing before"],
)
def test_numbers_count_from_the_first_key_that_comes_along(keys, expected):
    assert list(map(FromZero(), keys)) == expected


def test_two_meetings_count_each_by_itself():
    one, other = FromZero(), FromZero()
    assert (one("X/3/0"), other("X/9/0")) == ("X/0/0", "X/0/0")
