from types import SimpleNamespace

import pytest

from xstage_plugin.attention.arriving_backend import arriving_backend, block_rows_of
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
    assert block_rows_of(object(), 128, None, False, 1024) is None
    always = arriving_backend(name, always=True)
    assert (always.longest_keys, always is kernel) == (None, False)
    assert callable(kernel.announce)


@pytest.mark.parametrize(("longest", "keys", "expected"), [(None, 10**6, 64), (8192, 8192, 64), (8192, 8193, None)])
def test_a_kernel_announces_no_keys_at_which_a_barrier_is_faster(longest, keys, expected):
    kernel = SimpleNamespace(name="x", announce=None, longest_keys=longest, block_rows=lambda head_dim, dtype, causal: 64)
    assert block_rows_of(kernel, 128, None, False, keys) == expected


def test_an_object_is_a_kernel_of_the_callers_own():
    class Own:
        name = "own"

        def refusal(self, head_dim, dtype, device):
            return ""

        def __call__(self, *tensors, softmax_scale, causal):
            return None

    own = Own()
    assert candidates(own) == (own,)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        InvalidInputError, match="unknown attention backend 'cudnn'; known: auto, fa3, fa3-arrival, fa4, fa4-arrival"
    ):
        candidates("cudnn")
