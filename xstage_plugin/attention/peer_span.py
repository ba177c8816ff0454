"""Every rank's buffer of one shape as one strided tensor, so that a kernel that takes strides reaches all ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import socket
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from xstage_plugin.attention.agreement import agree, group_or_world
from xstage_plugin.attention.span_errors import SpanClosedError, SpanRefusedError
from xstage_plugin.attention.span_facts import SpanFacts, require_mappable
from xstage_plugin.attention.span_map import SpanMap
from xstage_plugin.attention.span_meeting import Meeting
from xstage_plugin.burst_gap.gpu_info import GpuError
from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

# A peer may be compiling its kernels; past this the barrier kernel says who is missing, and stops the process.
BARRIER_TIMEOUT_MS = 600_000
MULTICAST_HINT = "where NVLink multicast is off, set TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
# Strong: a span that nobody closed stays mapped, and listed, until the process ends.
_open: list[PeerSpan] = []
# The sets of ranks that this process has made spans over.
_met: set[tuple[int, ...]] = set()


@dataclass(frozen=True)
class LedgerEntry:
    """What one open span holds in this process: its own buffer, and address range mapped over everybody's."""

    shape: tuple[int, ...]
    dtype: str
    ranks: int
    nbytes: int
    mapped_bytes: int


def ledger() -> tuple[LedgerEntry, ...]:
    """Every span of this process that is not closed."""
    return tuple(LedgerEntry(span.shape, str(span.dtype), span.ranks, span.nbytes, span.mapped_bytes) for span in _open)


def refuse_capture(what: str) -> None:
    """Nothing that talks to other ranks from the host may happen inside a capture.

    Raised by each rank for itself: a collective to agree on it would break the capture.

    Raises:
        SpanRefusedError: the current stream is being captured into a CUDA graph.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise SpanRefusedError(f"{what} inside a CUDA-graph capture; warm up first: call it once before the capture")


class PeerSpan:
    """A buffer of ``shape_per_rank`` on every rank of a group, all of them mapped here at equal distances.

    Collective: every rank of the group makes it, and closes it after its last use. The memory, the exchange of handles and
    the barrier are torch's symmetric memory; the span maps the same memory a second time, its own first and then the others in
    turn, almost twice round, so that the P ranks from any rank on are one plain tensor. The buffers start out undefined.

    One stream at a time may use a span: its barrier has one channel. Spans over different groups do not disturb each other;
    torch's own symmetric memory may be put out of step by one over a part of the ranks (see :mod:`.span_meeting`).

    Args:
        shape_per_rank: elements of one rank's buffer, equal on all ranks.
        dtype: element type.
        group: ranks that take part, one host, one GPU each; default: all. Need not be the world.
        device: GPU of this rank; default: the current one.

    Attributes:
        shape, dtype, device, group: as given.
        rank, ranks: this process in the group, and the group's size.
        nbytes: bytes of this rank's buffer as allocated (rounded up, with torch's signal words).
        mapped_bytes: bytes of the address range; no memory of its own.
        closed: ``close`` was called.

    Raises:
        InvalidInputError: torch.distributed is not initialised, the group lacks this rank, a bad shape or dtype.
        SpanRefusedError: on every rank alike, if any pair cannot map each other's memory or the ranks disagree.
    """

    def __init__(
        self,
        shape_per_rank: tuple[int, ...],
        dtype: torch.dtype,
        group: Any = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        import torch
        import torch.distributed as dist

        self._map: SpanMap | None = None
        self._meeting: Meeting | None = None
        self.closed = False
        self.group = group_or_world(group)
        refuse_capture("a span is made")
        self.shape, self.dtype = shape_per_rank, dtype
        self.device = torch.device(device or "cuda")
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        require_mappable(agree(self.group, self._facts, SpanRefusedError))
        self.shape = tuple(shape_per_rank)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        try:
            # By itself: a rank without memory for it must not keep its peers waiting where they meet.
            arrivals = agree(self.group, self._allocate, SpanRefusedError)
            if any(out_of_step for _, out_of_step in arrivals):
                self._meeting = Meeting(self.group, arrivals[0][0])
            agree(self.group, self._map_peers, SpanRefusedError)
        except BaseException:
            # Ranks that got their mapping give it back when another one did not.
            self.close()
            raise
        _open.append(self)
        _close_at_exit()

    def _facts(self) -> SpanFacts:
        import torch

        _check_shape(self.shape)
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidInputError(f"dtype is {shown(self.dtype)}; expected a torch dtype")
        gpu, unreachable = "", frozenset[str]()
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise InvalidInputError("no CUDA device is visible; a span needs one GPU a rank")
            gpu, unreachable = _gpu_and_unreachable(self.device)
        return SpanFacts(tuple(self.shape), str(self.dtype), self.device.type, _host(), gpu, unreachable)

    def _allocate(self) -> tuple[str, bool]:
        """Take this rank's buffer.

        Returns a name that nobody else has, for the ranks to meet under, and whether torch's own way of meeting may be out of
        step: this process has made spans over other ranks too.
        """
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        try:
            # Memory made under inference_mode could not be written outside of it.
            with torch.cuda.device(self.device), torch.inference_mode(False):
                self._own = symmetric.empty(self.shape, dtype=self.dtype, device=self.device)
            # torch clears the signal words on the default stream and may not wait: that must not undo a peer's first signal.
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise InvalidInputError(f"cannot take symmetric memory for a span: {str(error).splitlines()[0]}") from None
        _met.add(tuple(dist.get_process_group_ranks(self.group)))
        return f"xstage-span-{uuid4().hex}", len(_met) > 1

    def _map_peers(self) -> None:
        import torch
        import torch.distributed._symmetric_memory as symmetric

        try:
            with torch.cuda.device(self.device), torch.inference_mode(False):
                meet = self._meeting.rendezvous if self._meeting else functools.partial(symmetric.rendezvous, group=self.group)
                self._handle = meet(self._own)
                pointers = self._handle.buffer_ptrs
                # Own memory first: torch takes a range to be on the GPU that its first byte is on.
                turn = [pointers[(self.rank + slot) % self.ranks] for slot in range(2 * self.ranks - 1)]
                self._map = SpanMap(turn, self.device.index)
                self._slots = self._tensor_over(self._map)
            # The handle's tables went up on the default stream, and the first barrier may be on another one.
            torch.cuda.synchronize(self.device)
        except (RuntimeError, GpuError) as error:
            raise InvalidInputError(f"cannot map the peers' memory: {str(error).splitlines()[0]}; {MULTICAST_HINT}") from None

    def _tensor_over(self, mapping: SpanMap) -> torch.Tensor:
        """[2 P - 1, *shape] over the range; slot i is rank (own + i) mod P."""
        import torch

        # No interface string names bfloat16, so the tensor starts out as bytes.
        flat: torch.Tensor = torch.as_tensor(_Bytes(mapping))
        if flat.device != self.device or flat.data_ptr() != mapping.address:
            raise InvalidInputError(f"torch takes the span to be on {flat.device}; expected {self.device}")
        strides = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        slots = 2 * self.ranks - 1
        return flat.view(self.dtype).as_strided((slots, *self.shape), (mapping.slot_bytes // self.dtype.itemsize, *strides))

    @property
    def nbytes(self) -> int:
        return self._map.slot_bytes if self._map else 0

    @property
    def mapped_bytes(self) -> int:
        return self._map.mapped_bytes if self._map else 0

    def local(self) -> torch.Tensor:
        """This rank's buffer, [*shape_per_rank]; the same tensor every time. Do not use it after ``close``.

        It has a storage of its own, torch's: a compiler that copies a tensor's whole storage must not touch the peers'.
        """
        self._require_open()
        return self._own

    def of(self, rank: int) -> torch.Tensor:
        """The buffer of ``rank`` of the group, [*shape_per_rank].

        Raises:
            InvalidInputError: no such rank.
        """
        self._require_open()
        if not 0 <= rank < self.ranks:
            raise InvalidInputError(f"rank is {shown(rank)}; expected 0 to {self.ranks - 1}, a rank of the span's group")
        return self._slots[(rank - self.rank) % self.ranks]

    def slots(self, start: int) -> torch.Tensor:
        """All ranks' buffers as one tensor, [P, *shape_per_rank]: entry k is that of rank (start + k) mod P.

        Raises:
            InvalidInputError: ``start`` is not from 0 to P.
        """
        self._require_open()
        if not 0 <= start <= self.ranks:
            raise InvalidInputError(f"start is {shown(start)}; expected a rank from 0 to {self.ranks}")
        first = (start - self.rank) % self.ranks
        return self._slots[first : first + self.ranks]

    def barrier(self) -> None:
        """Wait on the current stream until every rank's stream is here; what each stored before is visible afterwards.

        Release and acquire at system scope. Legal inside a CUDA-graph capture. The host does not wait.
        """
        self._require_open()
        self._handle.barrier(channel=0, timeout_ms=BARRIER_TIMEOUT_MS)

    def close(self) -> None:
        """Wait for this GPU and unmap. Tensors of the span must not be used afterwards. Doing it twice is the same as once."""
        if self.closed:
            return
        self.closed = True
        if self in _open:
            _open.remove(self)
        self._slots = self._handle = self._own = None  # torch frees this rank's buffer once its peers let go of it
        if self._map is not None:
            import torch

            torch.cuda.synchronize(self.device)
            self._map.close()
            self._map = None
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    def __enter__(self) -> PeerSpan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self.closed:
            raise SpanClosedError(f"the span over {self.ranks} ranks was closed; make a new one")


class _Bytes:
    """A mapped range as an array of bytes, for torch.as_tensor."""

    def __init__(self, mapping: SpanMap) -> None:
        self.__cuda_array_interface__ = {
            "shape": (mapping.mapped_bytes,),
            "typestr": "|u1",
            "data": (mapping.address, False),
            "version": 3,
        }


def _check_shape(shape: object) -> None:
    sizes = shape if isinstance(shape, (tuple, list)) else ()
    if not sizes or not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise InvalidInputError(f"shape_per_rank is {shown(shape)}; expected a tuple of whole numbers")


def _gpu_and_unreachable(device: torch.device) -> tuple[str, frozenset[str]]:
    """UUID of ``device``, and of every visible GPU whose memory it cannot map."""
    import torch

    own = torch.cuda.current_device() if device.index is None else device.index
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    far = (i for i in range(len(uuids)) if i != own and not torch.cuda.can_device_access_peer(own, i))
    return uuids[own], frozenset(uuids[peer] for peer in far)


def _host() -> str:
    """Equal for processes of one running host, also from within containers that have names of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


@functools.cache
def _close_at_exit() -> None:
    atexit.register(_close_what_is_idle)


def _close_what_is_idle() -> None:
    """The driver unmaps the rest when the process ends: waiting for a busy GPU may be waiting for a peer that died."""
    import torch

    for span in list(_open):
        # The GPU's context may be gone already, and its mappings with it.
        with contextlib.suppress(RuntimeError, GpuError):
            if torch.cuda.current_stream(span.device).query():
                span.close()
