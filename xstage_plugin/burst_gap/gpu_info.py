"""What GPUs this machine has, and the one way in which this package calls the CUDA driver. No torch.

``probe_*`` never raises: what is missing (libcuda, a GPU, NVML) comes back as a reason or as None.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from xstage_plugin.errors import XStageError


class GpuError(XStageError):
    """A call of the CUDA driver, of NVRTC or of the probe kernel failed; the message says which, why and what to do next."""


def driver_api() -> Any:
    """The module ``cuda.bindings.driver``.

    Raises:
        GpuError: the package cuda-python is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise GpuError(f"cannot import cuda.bindings ({error}); install the extra: pip install 'xstage-plugin[gpu]'") from None
    return driver


def driver_status(name: str, *arguments: Any) -> tuple[str, Any]:
    """Call the driver function ``name``: the name of its CUresult, and its result (None, one value, or a tuple).

    Raises:
        GpuError: cuda-python, libcuda or this function is not there.
    """
    function = getattr(driver_api(), name, None)
    if function is None:
        raise GpuError(f"cuda.bindings has no {name}; expected cuda-python of 12.6 or later, below 14")
    try:
        status, *values = function(*arguments)
    except (
        RuntimeError,
        OSError,
    ) as error:  # no libcuda, or one without this function; the type depends on the bindings
        raise GpuError(f"{name}: the CUDA driver cannot be called ({_first_line(error)})") from None
    return status.name, (None if not values else values[0] if len(values) == 1 else tuple(values))


def driver_call(name: str, *arguments: Any, tolerate: str = "") -> Any:
    """The result of the driver function ``name``; ``tolerate`` names one CUresult that also counts as success.

    Raises:
        GpuError: any other result than success, with the call, the name and the text of the error.
    """
    status, value = driver_status(name, *arguments)
    if status in ("CUDA_SUCCESS", tolerate):
        return value
    driver = driver_api()
    _, text = driver.cuGetErrorString(getattr(driver.CUresult, status))
    raise GpuError(f"{name} failed: {status} ({text.decode() if text else 'no text'})")


@dataclass(frozen=True)
class GpuInfo:
    """One GPU that CUDA reports. The fields after ``pci_bus_id`` come from NVML and are None where it cannot say.

    Attributes:
        ordinal: CUDA's, after CUDA_VISIBLE_DEVICES.
        max_sm_clock_mhz: the maximum; ``sm_clock_mhz`` is that of now.
        nvlink_count: active links; ``nvlink_version`` is NVML's number of their generation, ``nvlink_mbps`` one link's speed.
        compute_pids: processes that use the GPU now, this one among them once it has a context.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    l2_bytes: int
    max_sm_clock_mhz: float
    pci_bus_id: str
    nvlink_count: int | None = None
    nvlink_version: int | None = None
    nvlink_mbps: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    compute_pids: tuple[int, ...] | None = None

    @property
    def arch(self) -> str:
        return "sm_{}{}".format(*self.compute_capability)


@dataclass(frozen=True)
class PeerAccess:
    """What one GPU may do in the memory of another. CUDA does not say by which link: that is NVML's ``nvlink_count``."""

    source: int
    destination: int
    possible: bool
    native_atomics: bool


@dataclass(frozen=True)
class MachineInfo:
    """The GPUs of this machine. ``reason`` says why there are none; ``nvml_reason`` why NVML's fields are None.

    ``cuda_version`` is the newest CUDA that the driver serves, as (13, 0); ``driver_version`` the driver's own, from NVML.
    """

    gpus: tuple[GpuInfo, ...] = ()
    peers: tuple[PeerAccess, ...] = ()
    cuda_version: tuple[int, int] | None = None
    driver_version: str | None = None
    reason: str | None = None
    nvml_reason: str | None = None

    def can_access(self, source: int, destination: int) -> bool:
        """Whether GPU ``source`` can write to memory of GPU ``destination``."""
        return any((peer.source, peer.destination, peer.possible) == (source, destination, True) for peer in self.peers)


def probe_machine() -> MachineInfo:
    """What this machine has. Makes no CUDA context. Never raises."""
    info = MachineInfo()
    try:
        driver_call("cuInit", 0)
        version = int(driver_call("cuDriverGetVersion"))
        info = replace(info, cuda_version=(version // 1000, version % 1000 // 10))
        gpus = list_gpus()
        peers = tuple(_peer(a.ordinal, b.ordinal) for a in gpus for b in gpus if a.ordinal != b.ordinal)
    except Exception as error:  # a report must not end a program, whatever a driver does
        return replace(info, reason=_first_line(error))
    if not gpus:
        return replace(info, reason="the CUDA driver reports no GPU (is CUDA_VISIBLE_DEVICES empty?)")
    gpus, driver_version, nvml_reason = _with_nvml(gpus)
    return replace(info, gpus=tuple(gpus), peers=peers, driver_version=driver_version, nvml_reason=nvml_reason)


def list_gpus() -> list[GpuInfo]:
    """The GPUs as CUDA describes them, without NVML's fields.

    Raises:
        GpuError: no driver, or it reports an error.
    """
    driver_call("cuInit", 0)
    return [_describe(ordinal) for ordinal in range(int(driver_call("cuDeviceGetCount")))]


def device_attribute(device: Any, name: str) -> int:
    """The attribute CU_DEVICE_ATTRIBUTE_``name`` of a CUdevice.

    Raises:
        GpuError: the driver refuses.
    """
    attribute = getattr(driver_api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(driver_call("cuDeviceGetAttribute", attribute, device))


def _describe(ordinal: int) -> GpuInfo:
    device = driver_call("cuDeviceGet", ordinal)
    return GpuInfo(
        ordinal=ordinal,
        name=_text(driver_call("cuDeviceGetName", 128, device)),
        compute_capability=(
            device_attribute(device, "COMPUTE_CAPABILITY_MAJOR"),
            device_attribute(device, "COMPUTE_CAPABILITY_MINOR"),
        ),
        num_sms=device_attribute(device, "MULTIPROCESSOR_COUNT"),
        memory_bytes=int(driver_call("cuDeviceTotalMem", device)),
        l2_bytes=device_attribute(device, "L2_CACHE_SIZE"),
        max_sm_clock_mhz=device_attribute(device, "CLOCK_RATE") / 1e3,
        pci_bus_id=_text(driver_call("cuDeviceGetPCIBusId", 32, device)),
    )


def _peer(source: int, destination: int) -> PeerAccess:
    attributes = driver_api().CUdevice_P2PAttribute
    devices = driver_call("cuDeviceGet", source), driver_call("cuDeviceGet", destination)
    status, atomics = driver_status(
        "cuDeviceGetP2PAttribute", attributes.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, *devices
    )
    return PeerAccess(
        source,
        destination,
        possible=bool(driver_call("cuDeviceCanAccessPeer", *devices)),
        native_atomics=status == "CUDA_SUCCESS" and bool(atomics),
    )


def _with_nvml(gpus: list[GpuInfo]) -> tuple[list[GpuInfo], str | None, str | None]:
    """The GPUs with NVML's fields, the driver's version, and why these are missing."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return gpus, None, "the package nvidia-ml-py is not installed: no clocks, temperatures and links"
    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVML raises many types, and a loader error where the library is missing
        return gpus, None, f"NVML does not start: {_first_line(error)}"
    try:
        version = _asked(pynvml.nvmlSystemGetDriverVersion)
        return [_nvml_fields(pynvml, gpu) for gpu in gpus], _text(version) if version else None, None
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _nvml_fields(pynvml: Any, gpu: GpuInfo) -> GpuInfo:
    # By bus id: NVML's index knows nothing of CUDA_VISIBLE_DEVICES.
    handle = _asked(pynvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id.encode())
    if handle is None:
        return gpu
    states = [_asked(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    active = [link for link, state in enumerate(states) if state]
    processes = _asked(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return replace(
        gpu,
        nvlink_count=None if all(state is None for state in states) else len(active),
        nvlink_version=_asked(pynvml.nvmlDeviceGetNvLinkVersion, handle, active[0]) if active else None,
        nvlink_mbps=next(_link_speeds(pynvml, handle, active[0]), None) if active else None,
        sm_clock_mhz=_asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=_asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        temperature_c=_asked(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        compute_pids=None if processes is None else tuple(int(process.pid) for process in processes),
    )


def _link_speeds(pynvml: Any, handle: Any, link: int) -> Iterator[int]:
    """The speed of ``link`` in MB/s, from each of the fields under which NVML's versions keep it."""
    for field in ("NVML_FI_DEV_NVLINK_GET_SPEED", "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", "NVML_FI_DEV_NVLINK_SPEED_MBPS_L0"):
        number = getattr(pynvml, field, None)
        scoped = (number, link) if field.endswith("GET_SPEED") else number
        for value in (_asked(pynvml.nvmlDeviceGetFieldValues, handle, [scoped]) or []) if number is not None else []:
            if value.nvmlReturn == 0 and value.value.uiVal > 0:
                yield int(value.value.uiVal)


def _asked(function: Any, *arguments: Any) -> Any:
    """NVML's answer, or None where it has none (not supported, not permitted, gone)."""
    try:
        return function(*arguments)
    except Exception:  # its error type is made at import; every failure means the same here
        return None


def _text(value: Any) -> str:
    return value.split(b"\0")[0].decode() if isinstance(value, bytes) else str(value)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
