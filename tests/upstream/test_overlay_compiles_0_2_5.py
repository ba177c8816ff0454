"""The overlay over the wheel 0.2.5 compiles for the GPUs it is for, with no more registers and spills than stock.

Known, since the host library of the wheel printed it for these shapes (DG_PRINT_CONFIGS): tile sizes, stages, thread counts,
ring, lag and early combine of SM90. Assumed: the flags that it picks at the launch and does not print (plain SwiGLU, no
shared experts, no dependent launch, the register budget that the kernel takes by default), and the ring of SM100, which
stands here as the kernel's own formula gives it.

By default for the two hardest shapes of each kernel, with XSTAGE_TEST_ALL_SHAPES=1 for every bundled shape (5 minutes).
"""

import pytest
from upstream import overlay_compile
from upstream.overlay_compile import Kernel, chosen, compiled_both

from xstage_plugin.moe.shapes import load_shape
from xstage_plugin.upstream.check import compare, mismatches
from xstage_plugin.upstream.pins import load_pin

VERSION = "0.2.5"
PIN = load_pin(f"sgl-deep-gemm-{VERSION}")
SM90_RANKS, SM90_SMS, TOKENS = 2, 132, 8192
SM100_RANKS, SM100_SMS, SM100_ROW_TOKENS = 8, 148, 240
INFINITY = "cute::numeric_limits<float>::infinity()"
# Stages and early combine, which follow from what is left of the shared memory and from the ratio of hidden to topk.
SM90_STAGES = {"dsv4-pro": 3}
SM90_NO_EARLY_COMBINE = {"qwen3.5"}
SM100_STAGES = {"dsv4-pro": 5, "glm-5.2": 5}


@pytest.fixture(scope="session")
def nvcc():
    return overlay_compile.find_nvcc()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return overlay_compile.unpack_wheel(VERSION, tmp_path_factory.mktemp("wheel"))


def ceil_div(a, b):
    return -(-a // b)


def sm90_kernel(shape, tokens=TOKENS):
    local = shape.experts // SM90_RANKS
    pool = ceil_div(SM90_RANKS * tokens * min(shape.topk, local) + local * 127, 128) * 128
    # Units of 1024 tokens, 0.45 of those that a balanced rank has; the code holds the units that follow in one go, 4.
    lag = max(8, min(64, int(0.45 * ceil_div(tokens * shape.topk, local * 1024) * local + 0.5)))
    # Buffers of fewer than 1024 tokens have neither ring nor lag: the kernel walks waves of experts.
    ring, lag_code = (min(pool, lag * 1024 + 4608), 4000 + lag) if tokens >= 1024 else (pool, 0)
    values = (tokens, shape.hidden, shape.intermediate, shape.experts, shape.topk, local, 128, 256, 128, pool, ring, ring)
    threads = (SM90_STAGES.get(shape.key, 4), 64, 64, 256)
    epilogue = ("true", 0, "true", "true", "false", "true")
    early_combine = 0 if shape.key in SM90_NO_EARLY_COMBINE else 1
    rest = (2, "true", lag_code, 4, "false", "false", 4, "false", early_combine, 16, "false")
    return Kernel("sm90_fp8_mega_moe", (*values, *threads, SM90_SMS, SM90_RANKS, INFINITY, *epilogue, *rest))


def sm100_kernel(shape, shared_experts=0):
    local = shape.experts // SM100_RANKS
    prelude = (
        f"constexpr int kPool = layout::get_num_max_pool_tokens({SM100_RANKS}, {TOKENS}, {shape.topk}, {local});\n"
        f"constexpr int kRows = sched::get_num_max_live_pool_blocks(kPool / {SM100_ROW_TOKENS}, {SM100_SMS}, {shape.hidden}, "
        f"{shape.intermediate});\n"
        f"constexpr int kRing = math::constexpr_align(kRows * {SM100_ROW_TOKENS}, layout::kLCMCandidateBlockM);\n"
    )
    values = (TOKENS, shape.hidden, shape.intermediate, shape.experts, shared_experts, shape.topk, SM100_ROW_TOKENS, 128, 128)
    tiles = (24, 8, 256, 128, "MmaKind::MXFP8FP4", "kRing", f"kRing / {SM100_ROW_TOKENS} * 256")
    threads = (SM100_STAGES.get(shape.key, 6), shape.hidden, 128, 128, 256)
    flags = (INFINITY, "1.0f", "false", "true", *["false"] * 5, "cutlass::detail::float_e2m1_unpacksmem_t")
    return Kernel("sm100_fp8_fp4_mega_moe", (*values, *tiles, *threads, SM100_SMS, SM100_RANKS, *flags), prelude)


KERNELS = {"sm_90a": sm90_kernel, "sm_100a": sm100_kernel}
CASES = overlay_compile.cases({"sm_90a": 256, "sm_100a": 128})


def test_the_wheel_is_the_pinned_one(wheel):
    assert mismatches(compare(PIN, wheel.stock)) == ()


@pytest.mark.parametrize("arch", KERNELS)
def test_the_shapes_that_a_kernel_takes_are_covered(arch):
    covered = {shape.key for target, shape in CASES if target == arch}
    assert covered == {"dsv4-flash", "dsv4-pro", "qwen3.5", "glm-5.2", "mimo-v2.5", "hy3"}


def assert_no_dearer(stock, ours):
    assert ours.registers <= stock.registers
    assert ours.spilled_bytes <= stock.spilled_bytes


@pytest.mark.parametrize(("arch", "shape"), chosen(CASES), ids=lambda value: getattr(value, "key", value))
def test_the_patched_kernel_compiles_without_new_spills(nvcc, wheel, arch, shape, tmp_path, record_property):
    stock, ours = compiled_both(nvcc, wheel, arch, KERNELS[arch](shape), tmp_path)
    record_property("stock and ours", f"{stock}; {ours}")
    assert_no_dearer(stock, ours)


def test_a_kernel_that_keeps_upstreams_order_compiles_to_the_same_registers(nvcc, wheel, tmp_path):
    """Waves of experts on SM90: our scheduler is in the kernel and has nothing to choose."""
    stock, ours = compiled_both(nvcc, wheel, "sm_90a", sm90_kernel(load_shape("hy3"), tokens=512), tmp_path)
    assert ours == stock


def test_our_headers_hold_no_line_of_upstreams(wheel):
    assert overlay_compile.shared_lines(PIN, wheel.stock) == []


def test_our_headers_use_only_names_that_the_pin_lists(wheel):
    assert overlay_compile.names_beyond_the_pin(PIN, wheel.stock) == set()


def test_every_upstream_header_that_is_compiled_with_ours_is_pinned(wheel):
    assert overlay_compile.headers_beyond_the_pin(PIN, wheel.stock) == set()
