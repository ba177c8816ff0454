"""The overlay over the wheel 0.1.3 compiles for the GPUs it is for, with no more spills than stock.

By default for the two hardest shapes of each kernel, with XSTAGE_TEST_ALL_SHAPES=1 for every bundled shape (5 minutes).
"""

import pytest
from upstream import overlay_compile
from upstream.overlay_compile import Kernel, chosen, compiled_both

from xstage_plugin.upstream.check import compare, mismatches
from xstage_plugin.upstream.pins import load_pin

VERSION = "0.1.3"
PIN = load_pin(f"sgl-deep-gemm-{VERSION}")
# The configuration that the host code of 0.1.3 picks on two H200s at 8192 tokens a rank, read off its own generated source.
SM90_RANKS, SM90_SMS, TOKENS = 2, 132, 8448
SM100_RANKS, SM100_SMS = 8, 148


@pytest.fixture(scope="session")
def nvcc():
    return overlay_compile.find_nvcc()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return overlay_compile.unpack_wheel(VERSION, tmp_path_factory.mktemp("wheel"))


def pool_tokens(ranks, topk, experts_per_rank):
    tokens = ranks * TOKENS * min(topk, experts_per_rank) + experts_per_rank * 191
    return -(-tokens // 384) * 384


def sm90_kernel(shape):
    local = shape.experts // SM90_RANKS
    pool = pool_tokens(SM90_RANKS, shape.topk, local)
    values = (TOKENS, shape.hidden, shape.intermediate, shape.experts, shape.topk, local, 128, 256, 128, pool, pool // 8 * 128)
    tail = "cute::numeric_limits<float>::infinity(), true, 112, true, true, false, false"
    return Kernel("sm90_fp8_mega_moe", (*values, 3, 64, 64, 512, SM90_SMS, SM90_RANKS, tail))


def sm100_kernel(shape):
    local = shape.experts // SM100_RANKS
    pool = pool_tokens(SM100_RANKS, shape.topk, local)
    values = (TOKENS, shape.hidden, shape.intermediate, shape.experts, shape.topk, local, 192, 128, 128, 32, 256, 128)
    tail = "cute::numeric_limits<float>::infinity(), true"
    arguments = (*values, pool, pool // 192 * 256, 6, 128, 128, 256, SM100_SMS, SM100_RANKS, tail)
    return Kernel("sm100_fp8_fp4_mega_moe", arguments)


KERNELS = {"sm_90a": sm90_kernel, "sm_100a": sm100_kernel}
CASES = overlay_compile.cases({"sm_90a": 256, "sm_100a": 128})


def test_the_wheel_is_the_pinned_one(wheel):
    assert mismatches(compare(PIN, wheel.stock)) == ()


@pytest.mark.parametrize("arch", KERNELS)
def test_the_shapes_that_a_kernel_takes_are_covered(arch):
    covered = {shape.key for target, shape in CASES if target == arch}
    assert covered == {"dsv4-flash", "dsv4-pro", "qwen3.5", "glm-5.2", "mimo-v2.5", "hy3"}


@pytest.mark.parametrize(("arch", "shape"), chosen(CASES), ids=lambda value: getattr(value, "key", value))
def test_the_patched_kernel_compiles_without_new_spills(nvcc, wheel, arch, shape, tmp_path, record_property):
    stock, ours = compiled_both(nvcc, wheel, arch, KERNELS[arch](shape), tmp_path)
    record_property("stock and ours", f"{stock}; {ours}")
    assert ours.registers <= stock.registers
    assert ours.spilled_bytes <= stock.spilled_bytes


def test_our_headers_hold_no_line_of_upstreams(wheel):
    assert overlay_compile.shared_lines(PIN, wheel.stock) == []


def test_our_headers_use_only_names_that_the_pin_lists(wheel):
    assert overlay_compile.names_beyond_the_pin(PIN, wheel.stock) == set()


def test_every_upstream_header_that_is_compiled_with_ours_is_pinned(wheel):
    assert overlay_compile.headers_beyond_the_pin(PIN, wheel.stock) == set()
