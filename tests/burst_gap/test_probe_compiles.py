"""The probe kernel compiles for the GPUs that we name, and stores in the way that its name says. Needs no GPU."""

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from xstage_plugin.burst_gap import probe
from xstage_plugin.burst_gap.gpu_info import GpuError, probe_machine
from xstage_plugin.burst_gap.platform_model import STORES
from xstage_plugin.burst_gap.probe import MAX_DESTINATIONS, Destination
from xstage_plugin.burst_gap.probe_compile import compile_probe
from xstage_plugin.burst_gap.probe_config import MAX_THREADS, ProbeConfig
from xstage_plugin.errors import InvalidInputError

SOURCE = Path(probe.__file__).with_name("probe.cu")
CASES = [(arch, store) for arch in ("sm_90", "sm_100") for store in STORES]
INSTRUCTION = {"st.v4": "st.global.v4.u32 [", "bulk": "cp.async.bulk.global.shared::cta.bulk_group ["}


def nvrtc_missing() -> str:
    """Why NVRTC cannot be used here, or nothing."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-python is not installed"
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # the loader's error type depends on the version of the bindings
        return f"no NVRTC library: {str(error).splitlines()[0]}"
    return ""


NVRTC_MISSING = nvrtc_missing()
needs_nvrtc = pytest.mark.skipif(bool(NVRTC_MISSING), reason=NVRTC_MISSING or "NVRTC is here")


def compiled(arch: str, store: str, output: str, folder: Path) -> bytes:
    """By NVRTC, else by nvcc, else skipped."""
    if not NVRTC_MISSING:
        return compile_probe(arch, store, output=output)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip(f"{NVRTC_MISSING}, and nvcc is not on the PATH")
    target = folder / f"probe.{output}"
    options = [f"-arch={arch}", f"-DSTORE_KIND={STORES.index(store)}", "-std=c++17", f"-{output}", "-o", str(target)]
    subprocess.run([nvcc, *options, str(SOURCE)], check=True, capture_output=True, timeout=300)
    return target.read_bytes()


def kernel_text(ptx: bytes) -> str:
    """The PTX of the probe kernel alone."""
    return ptx.decode().split(".entry xstage_burst_gap(")[1].split(".entry ")[0]


@pytest.mark.parametrize(("arch", "store"), CASES)
def test_the_probe_compiles_to_machine_code(arch: str, store: str, tmp_path: Path) -> None:
    cubin = compiled(arch, store, "cubin", tmp_path)
    assert cubin.startswith(b"\x7fELF")
    for kernel in (b"xstage_burst_gap", b"xstage_poison", b"xstage_verify"):
        assert kernel in cubin


@pytest.mark.parametrize(("arch", "store"), CASES)
def test_a_burst_is_made_of_the_stores_that_its_name_says(arch: str, store: str, tmp_path: Path) -> None:
    text = kernel_text(compiled(arch, store, "ptx", tmp_path))
    assert INSTRUCTION[store] in text
    other = next(name for name in STORES if name != store)
    assert INSTRUCTION[other] not in text


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_four_stores_follow_each_other_without_a_test_between_them(arch: str, tmp_path: Path) -> None:
    blocks = re.split(r"\bbra\b|^\$", kernel_text(compiled(arch, "st.v4", "ptx", tmp_path)), flags=re.MULTILINE)
    assert max(block.count(INSTRUCTION["st.v4"]) for block in blocks) == 4


@needs_nvrtc
def test_a_source_error_is_one_line_with_the_log_in_it() -> None:
    with pytest.raises(GpuError, match=r"NVRTC refuses probe\.cu .*STORE_KIND.*error: ") as caught:
        compile_probe("sm_90", "bulk", ("-DSTORE_KIND=(",))
    assert "\n" not in str(caught.value)


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know_is_named() -> None:
    with pytest.raises(GpuError, match=r"sm_12 .*gpu-architecture"):
        compile_probe("sm_12", "bulk")


def test_host_and_device_agree_on_the_layout_of_what_they_share() -> None:
    source = SOURCE.read_text()
    sizes = dict(re.findall(r"sizeof\((\w+)\) == (\d+)", source))  # the kernel asserts them when it is compiled
    mirrors = {"State": probe._STATE, "ProducerRecord": probe._RECORD, "Sample": probe._SAMPLE, "Mismatch": probe._MISMATCH}
    assert {name: str(dtype.itemsize) for name, dtype in mirrors.items()} | {"Args": str(ctypes.sizeof(probe._Args))} == sizes
    assert f"kNumMaxDestinations = {MAX_DESTINATIONS};" in source
    assert f"kNumMaxThreads = {MAX_THREADS};" in source


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"burst_bytes": 1000}, "burst_bytes is 1000; expected a multiple of 512"),
        ({"num_producers": 0}, "num_producers is 0"),
        ({"num_threads": 100}, "num_threads is 100; expected whole warps"),
        ({"store": "st.v8"}, "expected one of st.v4, bulk"),
        ({"gap_us": -1.0}, "gap_us is -1"),
        ({"bulk_chunk_bytes": 24}, "bulk_chunk_bytes is 24"),
        ({"isolated": True, "num_bursts": 1000}, "num_bursts is 1000"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(wrong: dict[str, object], message: str) -> None:
    values = {"num_producers": 4, "burst_bytes": 4096, **wrong}
    with pytest.raises(InvalidInputError, match=message):
        ProbeConfig(**values)  # type: ignore[arg-type]


def test_parts_of_a_destination_stay_inside_it() -> None:
    config = ProbeConfig(num_producers=5, burst_bytes=1024, num_slots=3)
    assert config.region_bytes(num_destinations=2) == 3 * 3 * 1024
    whole = Destination(ordinal=1, base=4096, num_bytes=config.region_bytes())
    assert whole.part(1024, 512) == Destination(ordinal=1, base=5120, num_bytes=512)
    with pytest.raises(InvalidInputError, match="allocate more"):
        whole.part(1024, config.region_bytes())


def test_a_machine_without_a_gpu_says_why() -> None:
    machine = probe_machine()
    assert bool(machine.gpus) != bool(machine.reason)
