"""Which shapes the MegaMoE kernels take, and what is said of the others."""

import pytest

from xstage_plugin.moe.kernel_limits import kernel_refusal


@pytest.mark.parametrize(
    "shape", [(4096, 512, 128, 8, 2), (2048, 768, 128, 8, 8), (7168, 3072, 384, 6, 8), (256, 128, 1, 1, 1)]
)
def test_a_shape_that_the_kernel_takes(shape):
    assert kernel_refusal(*shape) is None


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4096, 512, 129, 8, 2), "129 experts are no multiple of the 2 ranks"),
        ((4096, 512, 0, 8, 2), "0 experts; expected 1 or more"),
        ((4096, 512, 128, 8, 0), "0 ranks; expected 1 or more"),
        ((4224, 512, 128, 8, 2), "hidden 4224 is no multiple of 256"),
        ((4096, 500, 128, 8, 2), "intermediate 500 is no multiple of 128"),
        ((4096, 4224, 128, 8, 2), "intermediate 4224 is above 4096"),
        ((4096, 512, 128, 33, 2), "topk 33 is not from 1 to 32"),
        ((4096, 512, 4, 8, 2), "topk 8 is not from 1 to 4"),
        ((4096, 512, 128, 0, 2), "topk 0 is not from 1 to 32"),
    ],
)
def test_a_shape_that_it_does_not_take_is_told_why(shape, reason):
    assert reason in kernel_refusal(*shape)


def test_all_reasons_stand_in_one_line():
    assert kernel_refusal(100, 100, 3, 1, 2).count(";") == 2


def test_the_limit_of_intermediate_is_the_sm90_kernels():
    assert kernel_refusal(4096, 8192, 128, 8, 2, "sm_100") is None
