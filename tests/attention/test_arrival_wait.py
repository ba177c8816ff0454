"""The waiting kernel and its header compile for the GPUs that we name, and agree with Python. Needs no GPU."""

import ctypes
import shutil
import subprocess

import pytest
from burst_gap.test_probe_compiles import NVRTC_MISSING, needs_nvrtc

from xstage_plugin.attention.arrival_wait import MOST_THREADS, SOURCE, compile_wait, include_folder
from xstage_plugin.attention.arrivals import DeviceArrivals
from xstage_plugin.burst_gap.nvrtc import compile_cuda

ARCHS = ["sm_90", "sm_100"]
# A kernel of somebody's own: reads rows as they arrive, some of them through TMA.
OWN_KERNEL = b"""
#include "arrival.cuh"
extern "C" __global__ void first_elements(const __grid_constant__ xstage::Arrivals arrivals, const float* out, float* found,
                                          unsigned row_elements) {
    if (threadIdx.x == 0) xstage::wait_for_rows(arrivals, 0, blockIdx.x * 64, 64);
    __syncthreads();
    found[blockIdx.x * 64 + threadIdx.x] = out[(blockIdx.x * 64 + threadIdx.x) * row_elements];
    xstage::fence_tma_reads();
}
"""


def compiled(arch: str, output: str, folder) -> bytes:
    """By NVRTC, else by nvcc, else skipped."""
    if not NVRTC_MISSING:
        return compile_wait(arch, output)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip(f"{NVRTC_MISSING}, and nvcc is not on the PATH")
    target = folder / f"wait.{output}"
    command = [nvcc, f"-arch={arch}", "-std=c++17", f"-{output}", "-o", str(target), str(include_folder() / SOURCE)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return target.read_bytes()


@pytest.mark.parametrize("arch", ARCHS)
def test_the_wait_compiles_to_machine_code(arch, tmp_path):
    cubin = compiled(arch, "cubin", tmp_path)
    assert cubin.startswith(b"\x7fELF")
    assert b"xstage_take_blocks" in cubin


@pytest.mark.parametrize("arch", ARCHS)
def test_a_wait_acquires_at_system_scope_and_ends_in_a_message_and_a_trap(arch, tmp_path):
    text = compiled(arch, "ptx", tmp_path).decode()
    assert "ld.acquire.sys.s32" in text
    assert "%globaltimer" in text
    assert "trap;" in text
    assert "vprintf" in text


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_the_header_serves_kernels_of_somebodys_own(arch):
    options = (f"--gpu-architecture={arch}", f"--include-path={include_folder()}")
    text = compile_cuda(OWN_KERNEL, "own.cu", options, "ptx").decode()
    assert "ld.acquire.sys.s32" in text
    assert "fence.proxy.async.global" in text


def test_host_and_device_agree_on_the_layout_of_what_they_share():
    header, source = (include_folder().joinpath(name).read_text() for name in ("arrival.cuh", SOURCE))
    assert f"sizeof(Arrivals) == {ctypes.sizeof(DeviceArrivals)}" in header  # the kernel asserts it when it is compiled
    struct = header.split("struct Arrivals {")[1].split("};")[0]
    names = [line.split(";")[0].split()[-1] for line in struct.splitlines() if ";" in line]
    assert names == [name for name, _ in DeviceArrivals._fields_]
    assert f"__launch_bounds__({MOST_THREADS}, 1)" in source
