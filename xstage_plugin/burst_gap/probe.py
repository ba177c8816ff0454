"""The probe kernel, run: bursts of stores from one GPU into the memory of another, timed and checked.

Mechanism only. ``probe.cu`` states what a burst, a period and issue are. A run is one launch on each source GPU, all of them
released at one moment by a latch in host memory; afterwards every word is checked where it was to arrive. No wait on the
host or on the GPU is unbounded. Nothing here needs torch; memory of others (torch's symmetric memory, say) can be given as
a :class:`Destination`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from xstage_plugin.burst_gap.gpu_info import GpuError, device_attribute, driver_api, driver_call, driver_status
from xstage_plugin.burst_gap.platform_model import STORES
from xstage_plugin.burst_gap.probe_compile import compile_probe
from xstage_plugin.burst_gap.probe_config import NUM_SAMPLES, ProbeConfig
from xstage_plugin.checks import positive_int
from xstage_plugin.errors import InvalidInputError

TARGETS = ("local", "remote")
MAX_DESTINATIONS = 8
MAX_REGIONS = 4096  # at one destination, of one launch
DEVICE_BOUND_NS = 2_000_000_000  # how long a producer waits for the others before it gives up
HOST_BOUND_S = 10.0  # above the device's own, so that the kernel's message comes first
FALLBACK_CLOCK_KHZ = 1_500_000  # where the driver names none; it only scales the requested gap of the first run

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Destination:
    """Memory that a source writes to.

    Attributes:
        ordinal: CUDA ordinal of the GPU that holds it; it tells local from remote.
        base: address, valid on the source and on ``verifier``; a multiple of 16.
        verifier: poisons it before a run and checks it afterwards; None leaves both undone.
        owned: made by ``verifier.allocate``; a source then enables peer access by itself.
    """

    ordinal: int
    base: int
    num_bytes: int
    verifier: ProbeDevice | None = None
    owned: bool = False

    def part(self, offset_bytes: int, num_bytes: int) -> Destination:
        """``num_bytes`` of it from ``offset_bytes`` on.

        Raises:
            InvalidInputError: outside of it, or not on a 16-byte boundary.
        """
        if offset_bytes < 0 or num_bytes < 1 or offset_bytes + num_bytes > self.num_bytes or offset_bytes % 16:
            raise InvalidInputError(
                f"part of {num_bytes} bytes at {offset_bytes}; expected a 16-byte boundary and an end within "
                f"{self.num_bytes} bytes: allocate more (ProbeConfig.region_bytes says how much)"
            )
        return Destination(self.ordinal, self.base + offset_bytes, num_bytes, self.verifier, self.owned)


@dataclass(frozen=True)
class Traffic:
    """One launch: producer p of ``source`` writes to ``destinations[p % n]``."""

    source: ProbeDevice
    destinations: tuple[Destination, ...]
    config: ProbeConfig

    @property
    def target(self) -> str:
        """``local`` if every destination lies on the source."""
        return TARGETS[any(destination.ordinal != self.source.ordinal for destination in self.destinations)]


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """What one launch measured.

    Attributes:
        issue_us, period_us: (producers, samples), float64; the same number for each producer, the last ones of the window
            (isolated: all but the first quarter). Converted with ``sm_clock_mhz``. A period ends with its burst's start.
        rates_gbps: (producers,), GB/s = 1e9 bytes a second; empty when isolated.
        aggregate_gbps: their sum, the drain rate if the path is saturated; None when isolated.
        aggregate_period_us: burst bytes of all producers over ``aggregate_gbps``; None when isolated.
        sm_clock_mhz: clock64 over %globaltimer in this run, median of the producers.
        mismatches: words that were not as written, or None if a destination has no verifier.
        num_bursts: of each producer, the unmeasured ones included.
        first_mismatch: where one word was wrong, what stood there and what was expected; for messages.
    """

    config: ProbeConfig
    target: str
    issue_us: FloatArray
    period_us: FloatArray
    rates_gbps: FloatArray
    aggregate_period_us: float | None
    aggregate_gbps: float | None
    sm_clock_mhz: float
    mismatches: int | None
    num_bursts: tuple[int, ...]
    first_mismatch: str = ""


# Mirrors of the structs in probe.cu.


class _Args(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64 * MAX_DESTINATIONS),
        *((name, ctypes.c_uint64) for name in ("state", "records", "samples", "latch")),
        *((name, ctypes.c_uint64) for name in ("window_start_ns", "window_ns", "cooldown_ns")),
        *((name, ctypes.c_uint64) for name in ("gap_ns", "clock_khz", "bound_ns")),
        *((name, ctypes.c_uint32) for name in ("burst_bytes", "num_slots", "num_destinations", "num_samples")),
        *((name, ctypes.c_uint32) for name in ("isolated", "num_bursts", "chunk_bytes", "rank")),
    )


_STATE = np.dtype([(n, "<u8") for n in ("num_arrived", "start_ns", "seen", "expected")] + [("at", "<u4"), ("producer", "<u4")])
_RECORD = np.dtype(
    [(n, "<u8") for n in ("first_ns", "last_ns", "first_clock", "last_clock")]
    + [(n, "<u4") for n in ("first_burst", "last_burst", "num_bursts", "num_samples")]
)
_SAMPLE = np.dtype([("issue_cycles", "<u4"), ("period_cycles", "<u4")])
_MISMATCH = np.dtype(
    [("num", "<u8")] + [(n, "<u4") for n in ("region", "slot", "word", "unused")] + [("got", "<u4", 4), ("expected", "<u4", 4)]
)
_STUCK_AT = {1: "the host's latch", 2: "the other producers"}


class ProbeDevice:
    """One GPU on which probes run: its primary context (shared with torch, which may have it too), stream and buffers.

    Close it, or use it in a ``with`` statement. Not for several threads at once.

    Raises:
        GpuError: no driver, no such GPU, or the driver refuses.
    """

    def __init__(self, ordinal: int = 0) -> None:
        driver_call("cuInit", 0)
        count = int(driver_call("cuDeviceGetCount"))
        if not 0 <= ordinal < count:
            raise GpuError(f"GPU {ordinal} does not exist; expected an ordinal below {count} (see CUDA_VISIBLE_DEVICES)")
        self.ordinal = ordinal
        self._undo: list[Callable[[], Any]] = []  # in order of making; run backwards by close
        self._functions: dict[tuple[str, str], Any] = {}
        self._allocations: dict[int, Any] = {}
        self._lost = ""  # why nothing more can be asked of this GPU
        self._device = driver_call("cuDeviceGet", ordinal)
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self.arch = f"sm_{major}{minor}"
        self.num_sms = self._attribute("MULTIPROCESSOR_COUNT")
        self.clock_khz = self._attribute("CLOCK_RATE") or FALLBACK_CLOCK_KHZ  # until a run has measured it
        self.context = driver_call("cuDevicePrimaryCtxRetain", self._device)
        self._undo.append(lambda: driver_status("cuDevicePrimaryCtxRelease", self._device))
        try:
            with self.current():
                self._make_buffers()
        except BaseException:
            self.close()
            raise

    def _attribute(self, name: str) -> int:
        return device_attribute(self._device, name)

    def _make_buffers(self) -> None:
        driver = driver_api()
        self.stream = driver_call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._undo.append(lambda: driver_status("cuStreamDestroy", self.stream))
        self._events = []
        for _ in range(2):
            event = driver_call("cuEventCreate", int(driver.CUevent_flags.CU_EVENT_DEFAULT))
            self._events.append(event)
            self._undo.append(functools.partial(driver_status, "cuEventDestroy", event))
        self._state = self._device_memory(_STATE.itemsize)
        self._records = self._device_memory(self.num_sms * _RECORD.itemsize)
        self._samples = self._device_memory(self.num_sms * NUM_SAMPLES * _SAMPLE.itemsize)
        self._mismatch = self._device_memory(_MISMATCH.itemsize)
        self._counts = self._device_memory(4 * MAX_REGIONS)
        self._latch = int(driver_call("cuMemHostAlloc", 64, 1 | 2))  # PORTABLE | DEVICEMAP: one address on every GPU
        self._undo.append(lambda: driver_status("cuMemFreeHost", self._latch))

    def _device_memory(self, num_bytes: int) -> int:
        pointer = driver_call("cuMemAlloc", num_bytes)
        self._undo.append(functools.partial(driver_status, "cuMemFree", pointer))
        return int(pointer)

    def __enter__(self) -> ProbeDevice:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back; a second call does nothing. After a launch that never ended, memory stays: freeing waits."""
        undo, self._undo = self._undo, []
        if self._lost or not undo:
            return
        with contextlib.suppress(GpuError), self.current():
            for pointer in self._allocations.values():
                driver_status("cuMemFree", pointer)
            for step in reversed(undo[1:]):
                step()
        self._allocations.clear()
        undo[0]()  # the context, when it is no longer current

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """This GPU's context is the calling thread's; the one before it comes back."""
        if self._lost:
            raise GpuError(self._lost)
        driver_call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            driver_status("cuCtxPopCurrent")

    def allocate(self, num_bytes: int) -> Destination:
        """Memory of this GPU, which also verifies it. Freed by :meth:`release` or :meth:`close`.

        Raises:
            GpuError: not enough memory.
        """
        positive_int("num_bytes", num_bytes)
        with self.current():
            pointer = driver_call("cuMemAlloc", num_bytes)
        self._allocations[int(pointer)] = pointer
        return Destination(self.ordinal, int(pointer), num_bytes, self, owned=True)

    def release(self, destination: Destination) -> None:
        """Free what :meth:`allocate` returned (not a part of it); a second call does nothing."""
        pointer = self._allocations.pop(destination.base, None)
        if pointer is not None and not self._lost:
            with self.current():
                driver_call("cuMemFree", pointer)

    @contextlib.contextmanager
    def scratch(self, num_bytes: int) -> Iterator[Destination]:
        """Memory of this GPU for the length of a ``with`` statement. Raises GpuError as :meth:`allocate`."""
        destination = self.allocate(num_bytes)
        try:
            yield destination
        finally:
            self.release(destination)

    def can_access(self, peer: ProbeDevice) -> bool:
        """Whether this GPU can store to the memory of ``peer``; which link carries it, gpu_info says."""
        return peer.ordinal == self.ordinal or bool(driver_call("cuDeviceCanAccessPeer", self._device, peer._device))

    def enable_peer_access(self, peer: ProbeDevice) -> None:
        """Let this GPU store to what ``peer`` allocates. Stays for the life of the process: torch may rely on it too.

        Raises:
            GpuError: the two GPUs cannot reach each other.
        """
        if peer.ordinal == self.ordinal:
            return
        if not self.can_access(peer):
            raise GpuError(
                f"GPU {self.ordinal} cannot reach the memory of GPU {peer.ordinal}; expected peer access: choose two "
                "GPUs that nvidia-smi topo -p2p w shows as OK"
            )
        with self.current():
            driver_call("cuCtxEnablePeerAccess", peer.context, 0, tolerate="CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED")

    def wait(self, what: str, bound_s: float = HOST_BOUND_S) -> None:
        """Wait until the stream has done all it was given.

        Raises:
            GpuError: it has not within ``bound_s`` (nothing more is then asked of this GPU), or it failed.
        """
        with self.current():
            driver_call("cuEventRecord", self._events[1], self.stream)
            deadline = time.monotonic() + bound_s
            while True:
                status, _ = driver_status("cuEventQuery", self._events[1])
                if status != "CUDA_ERROR_NOT_READY":
                    break
                if time.monotonic() > deadline:
                    self._lost = (
                        f"{what} on GPU {self.ordinal} did not end within {bound_s:g} s; it is given up: end this "
                        "process, see in nvidia-smi whether another one uses the GPU, and run again"
                    )
                    raise GpuError(self._lost)
                time.sleep(2e-5)
            if status != "CUDA_SUCCESS":
                self._lost = f"{what} on GPU {self.ordinal} failed: {status}; its context is unusable: end this process"
                raise GpuError(self._lost)

    def poison(self, destination: Destination) -> None:
        """Fill ``destination``, so that a word that never came is seen. Raises GpuError as :meth:`wait`."""
        arguments = ctypes.c_uint64(destination.base), ctypes.c_uint64(destination.num_bytes // 16)
        self._launch("xstage_poison", STORES[0], self.num_sms * 4, 256, 0, *arguments)
        self.wait("xstage_poison")

    def verify(
        self, destination: Destination, config: ProbeConfig, num_bursts: Sequence[int], first: int, step: int
    ) -> tuple[int, str]:
        """How many words of the producers first, first + step, ..., which wrote ``num_bursts`` bursts each, are wrong;
        and what the first one found was, for messages.

        Raises:
            GpuError: the check did not run.
        """
        host = np.asarray(num_bursts, dtype="<u4")
        with self.current():  # on the stream: a plain copy would not be ordered before the kernel
            driver_call("cuMemcpyHtoDAsync", self._counts, host.ctypes.data, host.nbytes, self.stream)
        self._clear(self._mismatch, _MISMATCH.itemsize)
        addresses = (ctypes.c_uint64(address) for address in (destination.base, self._counts, self._mismatch))
        numbers = (len(host), first, step, config.burst_bytes // 16, config.num_slots)
        arguments = (*addresses, *(ctypes.c_uint32(number) for number in numbers))
        self._launch("xstage_verify", config.store, self.num_sms * 4, 256, 0, *arguments)
        self.wait("xstage_verify")
        row = self._read(self._mismatch, _MISMATCH, 1)[0]
        if not row["num"]:
            return 0, ""
        got, expected = (" ".join(f"{value:08x}" for value in row[name]) for name in ("got", "expected"))
        where = f"GPU {destination.ordinal}, producer {first + int(row['region']) * step}"
        return int(row["num"]), f"{where}, slot {row['slot']}, word {row['word']}: got {got}, expected {expected}"

    def start(self, traffic: Traffic, latch: int) -> None:
        """Clear the buffers and issue the probe kernel; it begins when the word at ``latch`` is not 0."""
        config = traffic.config
        arguments = _Args(
            base=(ctypes.c_uint64 * MAX_DESTINATIONS)(*(destination.base for destination in traffic.destinations)),
            state=self._state, records=self._records, samples=self._samples, latch=latch,
            window_start_ns=_ns(config.warmup_us), window_ns=_ns(config.window_us), cooldown_ns=_ns(config.cooldown_us),
            gap_ns=_ns(config.gap_us), clock_khz=self.clock_khz, bound_ns=DEVICE_BOUND_NS + _ns(config.planned_us),
            burst_bytes=config.burst_bytes, num_slots=config.num_slots, num_destinations=len(traffic.destinations),
            num_samples=NUM_SAMPLES, isolated=config.isolated, num_bursts=config.num_bursts,
            chunk_bytes=config.bulk_chunk_bytes, rank=self.ordinal,
        )  # fmt: skip
        self._clear(self._state, _STATE.itemsize)
        self._clear(self._records, self.num_sms * _RECORD.itemsize)
        shared = self._shared_bytes(config)
        self._launch("xstage_burst_gap", config.store, config.num_producers, config.num_threads, shared, arguments)

    def outcome(self, config: ProbeConfig) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Records (producers,) and samples (producers, NUM_SAMPLES) of the launch that :meth:`wait` has seen end.

        Raises:
            GpuError: a producer gave up waiting.
        """
        with self.current():
            driver_call("cuStreamSynchronize", self.stream)  # idle by now; this brings the kernel's printf to stdout
        state = self._read(self._state, _STATE, 1)[0]
        if state["at"]:
            raise GpuError(
                f"xstage_burst_gap on GPU {self.ordinal}: producer {state['producer']} of {config.num_producers} gave up "
                f"waiting for {_STUCK_AT.get(int(state['at']), 'something')}: saw {state['seen']}, expected "
                f"{state['expected']}; unset CUDA_LAUNCH_BLOCKING, end other processes on this GPU, run again"
            )
        samples = self._read(self._samples, _SAMPLE, config.num_producers * NUM_SAMPLES)
        return self._read(self._records, _RECORD, config.num_producers), samples.reshape(config.num_producers, -1)

    def timed_ms(self, issue: Callable[[], Any], what: str) -> float:
        """Time in ms between two events around what ``issue`` puts on the stream."""
        with self.current():
            driver_call("cuEventRecord", self._events[0], self.stream)
            issue()
        self.wait(what)  # records the second event
        with self.current():
            return float(driver_call("cuEventElapsedTime", self._events[0], self._events[1]))

    def copy_gbps(self, target: int, origin: int, num_bytes: int, repeats: int = 20) -> float:
        """Median rate in GB/s of a copy between two addresses valid on this GPU, timed by events.

        Raises:
            GpuError: a driver call failed.
        """
        issue = functools.partial(driver_call, "cuMemcpyDtoDAsync", target, origin, num_bytes, self.stream)
        return self._median_gbps(issue, num_bytes, repeats)

    def _median_gbps(self, issue: Callable[[], Any], num_bytes: int, repeats: int) -> float:
        times_ms = [self.timed_ms(issue, "the copy") for _ in range(repeats + 2)][2:]  # the first two warm up
        return num_bytes / statistics.median(times_ms) / 1e6

    @property
    def largest_staged_bytes(self) -> int:
        """The largest burst that bulk stores can stage in shared memory."""
        return self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")

    def _shared_bytes(self, config: ProbeConfig) -> int:
        """Dynamic shared memory: the staged burst, and more than half of the SM's, so that one CTA has it for itself."""
        most = self.largest_staged_bytes
        if config.store == "bulk" and config.burst_bytes > most:
            raise InvalidInputError(
                f"burst_bytes is {config.burst_bytes}; expected at most {most}: bulk stores stage a burst in shared memory"
            )
        alone = min(most, self._attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // 2 + 1024)
        return max(alone, config.burst_bytes) if config.store == "bulk" else alone

    def function(self, name: str, store: str) -> Any:
        """The kernel ``name`` of the module for ``store``, loaded at its first use."""
        if (name, store) not in self._functions:
            driver = driver_api()
            cubin = compile_probe(self.arch, store)
            with self.current():
                module = driver_call("cuModuleLoadData", cubin)
                self._undo.append(lambda: driver_status("cuModuleUnload", module))
                for kernel in ("xstage_burst_gap", "xstage_poison", "xstage_verify"):
                    self._functions[kernel, store] = driver_call("cuModuleGetFunction", module, kernel.encode())
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                most = self.largest_staged_bytes
                driver_call("cuFuncSetAttribute", self._functions["xstage_burst_gap", store], attribute, most)
        return self._functions[name, store]

    def _launch(self, name: str, store: str, grid: int, block: int, shared_bytes: int, *arguments: Any) -> None:
        function = self.function(name, store)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        with self.current():
            parameters = ctypes.addressof(pointers)
            driver_call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared_bytes, self.stream, parameters, 0)

    def _clear(self, pointer: int, num_bytes: int) -> None:
        with self.current():
            driver_call("cuMemsetD8Async", pointer, 0, num_bytes, self.stream)

    def _read(self, pointer: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        host = np.zeros(count, dtype=dtype)
        with self.current():
            driver_call("cuMemcpyDtoH", host.ctypes.data, pointer, host.nbytes)
        return host


def run_concurrent(traffic: Sequence[Traffic]) -> list[ProbeResult]:
    """Run all launches at once and check what arrived; the results are in the order of ``traffic``.

    Sources must be different GPUs. Launches that name the same :class:`Destination` get parts of it, one after the other.

    Raises:
        InvalidInputError: a configuration does not fit its GPU or its destination.
        GpuError: a driver call failed, a wait ended at its bound, or the window held too few bursts.
    """
    pieces = _place(traffic)
    for item, parts in zip(traffic, pieces, strict=True):
        item.source._shared_bytes(item.config)
        item.source.function("xstage_burst_gap", item.config.store)  # now: loading a module may wait for running kernels
        for part in parts:
            if part.verifier is not None and part.owned:
                item.source.enable_peer_access(part.verifier)
            if part.verifier is not None:
                part.verifier.poison(part)
    if not traffic:
        return []
    latch = ctypes.c_uint32.from_address(traffic[0].source._latch)
    latch.value = 0
    started: list[Traffic] = []
    try:
        for item, parts in zip(traffic, pieces, strict=True):
            item.source.start(Traffic(item.source, parts, item.config), traffic[0].source._latch)
            started.append(item)
    finally:
        latch.value = 1  # also on an error: what was launched must be able to leave
        failures = [error for item in started if (error := _wait_error(item)) is not None]
    if failures:
        raise failures[0]
    outcomes = [item.source.outcome(item.config) for item in traffic]
    return [
        _result(item, records, samples, *_verify(item, parts, records))
        for item, parts, (records, samples) in zip(traffic, pieces, outcomes, strict=True)
    ]


def memcpy_peer_gbps(source: ProbeDevice, destination: ProbeDevice, num_bytes: int = 2**28, repeats: int = 20) -> float:
    """Median rate in GB/s of the copy engine from GPU to GPU (cuMemcpyPeerAsync), timed by events on the source.

    Raises:
        GpuError: the GPUs cannot reach each other, or a driver call failed.
    """
    positive_int("repeats", repeats)
    source.enable_peer_access(destination)
    with source.scratch(num_bytes) as origin, destination.scratch(num_bytes) as target:
        if source.ordinal == destination.ordinal:
            return source.copy_gbps(target.base, origin.base, num_bytes, repeats)
        call = ("cuMemcpyPeerAsync", target.base, destination.context, origin.base, source.context, num_bytes, source.stream)
        return source._median_gbps(functools.partial(driver_call, *call), num_bytes, repeats)


def local_copy_gbps(device: ProbeDevice, num_bytes: int = 2**28, repeats: int = 20) -> float:
    """Median rate in GB/s of a copy within one GPU; counts bytes copied, each of which is read and written once.

    Raises:
        GpuError: a driver call failed.
    """
    return memcpy_peer_gbps(device, device, num_bytes, repeats)


def _place(traffic: Sequence[Traffic]) -> list[tuple[Destination, ...]]:
    """The part of each destination that each launch writes to; checks all that needs no GPU."""
    ordinals = [item.source.ordinal for item in traffic]
    if len(set(ordinals)) != len(ordinals):
        raise InvalidInputError(f"the sources are GPUs {ordinals}; expected each once: launches of one GPU do not overlap")
    used: dict[int, int] = {}
    pieces = []
    for item in traffic:
        config, count = item.config, len(item.destinations)
        if not 1 <= count <= MAX_DESTINATIONS:
            raise InvalidInputError(f"GPU {item.source.ordinal} has {count} destinations; expected 1 to {MAX_DESTINATIONS}")
        if config.num_producers > item.source.num_sms:
            raise InvalidInputError(
                f"num_producers is {config.num_producers}; expected at most {item.source.num_sms}, the SMs of GPU "
                f"{item.source.ordinal}: each producer needs one for itself"
            )
        parts = []
        for destination in item.destinations:
            offset = used.get(destination.base, 0)
            used[destination.base] = offset + config.region_bytes(count)
            parts.append(destination.part(offset, config.region_bytes(count)))
        pieces.append(tuple(parts))
    return pieces


def _wait_error(item: Traffic) -> GpuError | None:
    try:
        item.source.wait("xstage_burst_gap", HOST_BOUND_S + item.config.planned_us / 1e6)
    except GpuError as error:
        return error
    return None


def _verify(item: Traffic, parts: Sequence[Destination], records: npt.NDArray[Any]) -> tuple[int | None, str]:
    bursts = [int(value) for value in records["num_bursts"]]
    total, first_text = 0, ""
    for index, part in enumerate(parts[: len(bursts)]):  # with fewer producers than destinations the rest stays empty
        if part.verifier is None:
            return None, ""
        found, text = part.verifier.verify(part, item.config, bursts[index :: len(parts)], index, len(parts))
        total, first_text = total + found, first_text or text
    return total, first_text


def _result(
    item: Traffic, records: npt.NDArray[Any], samples: npt.NDArray[Any], mismatches: int | None, first_mismatch: str
) -> ProbeResult:
    config = item.config
    counts = records["num_samples"].astype(np.int64)
    elapsed_ns = records["last_ns"].astype(np.float64) - records["first_ns"].astype(np.float64)
    if counts.min() < 2 or elapsed_ns.min() <= 0:
        raise GpuError(f"{config}: a producer began {counts.min()} measured bursts; expected at least 2: widen window_us")
    cycles = (records["last_clock"] - records["first_clock"]).astype(np.float64)
    sm_clock_mhz = float(np.median(cycles / elapsed_ns) * 1e3)
    item.source.clock_khz = round(sm_clock_mhz * 1e3)  # for the gaps of the next run
    # As many of each, the latest ones: sample n stands at n % NUM_SAMPLES, so that this roll brings the last one to the end.
    keep = int(min(counts.min(), NUM_SAMPLES))
    if config.isolated:
        keep -= max(1, keep // 4)
    kept = np.stack([np.roll(row, -int(count))[-keep:] for row, count in zip(samples, counts, strict=True)])
    in_window = (records["last_burst"] - records["first_burst"]).astype(np.float64)
    rates = np.zeros(0) if config.isolated else in_window * config.burst_bytes / elapsed_ns  # bytes a ns = GB/s
    aggregate = None if config.isolated else float(rates.sum())
    return ProbeResult(
        config=config,
        target=item.target,
        issue_us=kept["issue_cycles"] / sm_clock_mhz,
        period_us=kept["period_cycles"] / sm_clock_mhz,
        rates_gbps=rates,
        aggregate_period_us=None if aggregate is None else config.burst_total_bytes / aggregate / 1e3,
        aggregate_gbps=aggregate,
        sm_clock_mhz=sm_clock_mhz,
        mismatches=mismatches,
        first_mismatch=first_mismatch,
        num_bursts=tuple(int(value) for value in records["num_bursts"]),
    )


def _ns(time_us: float) -> int:
    return round(time_us * 1e3)
