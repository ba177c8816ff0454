import pytest

from xstage_plugin.attention.arriving_backend import block_rows_of
from xstage_plugin.attention.backends import candidates
from xstage_plugin.errors import InvalidInputError


@pytest.mark.parametrize(("asked", "names"), [("auto", ["fa4", "fa3"]), ("fa3", ["fa3"]), ("fa4", ["fa4"])])
def test_a_name_stands_for_a_kernel_and_auto_for_all_of_them(asked, names):
    assert [kernel.name for kernel in candidates(asked)] == names


@pytest.mark.parametrize("name", ["fa3-arrival", "fa4-arrival"])
def test_kernels_that_announce_are_asked_for_by_name_and_are_one_object_each(name):
    (kernel,) = candidates(name)
    assert kernel.name == name
    assert candidates(name) == (kernel,)
    assert block_rows_of(object(), 128, None, False) is None
    assert callable(kernel.announce)


def test_an_object_is_a_kernel_of_the_callers_own():
    own = object()
    assert candidates(own) == (own,)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        InvalidInputError, match="unknown attention backend 'cudnn'; known: auto, fa3, fa3-arrival, fa4, fa4-arrival"
    ):
        candidates("cudnn")
