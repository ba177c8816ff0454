import pytest

from xstage_plugin.attention.backends import candidates
from xstage_plugin.errors import InvalidInputError


@pytest.mark.parametrize(("asked", "names"), [("auto", ["fa4", "fa3"]), ("fa3", ["fa3"]), ("fa4", ["fa4"])])
def test_a_name_stands_for_a_kernel_and_auto_for_all_of_them(asked, names):
    assert [kernel.name for kernel in candidates(asked)] == names


def test_an_object_is_a_kernel_of_the_callers_own():
    own = object()
    assert candidates(own) == (own,)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidInputError, match="unknown attention backend 'cudnn'; known: auto, fa3, fa4"):
        candidates("cudnn")
