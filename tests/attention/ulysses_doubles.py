"""A span over shared memory of the host and an attention in plain torch: the data path without a GPU.

``FakeSpan`` maps the way the real one does: one range, equal distances, own buffer first, almost twice round.
"""

import ctypes
import fcntl
import itertools
import mmap
import os
import time

import torch
import torch.distributed as dist

from xstage_plugin.attention.span_errors import SpanClosedError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
MAP_FIXED = 0x10
LIMIT_S = 30
_numbers = itertools.count()


class FakeSpan:
    def __init__(self, shape, dtype, group=None, folder="/dev/shm"):
        group = group or dist.group.WORLD
        self.shape, self.dtype, self.group = tuple(shape), dtype, group
        self.device, self.closed, self.met = torch.device("cpu"), False, 0
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        names = [None] * self.ranks
        dist.all_gather_object(names, (os.getpid(), next(_numbers)), group=group)
        path = os.path.join(folder, "xstage-{}-{}".format(*names[0]))
        step = -(-torch.Size(shape).numel() * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        slots = 2 * self.ranks - 1
        with open(path, "a+b") as file:
            file.truncate(step * self.ranks)
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            start = _libc.mmap(None, step * slots, 0, private, -1, 0)
            for slot in range(slots):
                offset = (self.rank + slot) % self.ranks * step
                flags = mmap.MAP_SHARED | MAP_FIXED
                at = _libc.mmap(start + slot * step, step, mmap.PROT_READ | mmap.PROT_WRITE, flags, file.fileno(), offset)
                assert at == start + slot * step, ctypes.get_errno()
            dist.barrier(group)
        if self.rank == 0:
            os.unlink(path)
        flat = torch.frombuffer((ctypes.c_uint8 * (step * slots)).from_address(start), dtype=torch.uint8).view(dtype)
        strides = [torch.Size(shape[axis + 1 :]).numel() for axis in range(len(shape))]
        self._slots = flat.as_strided((slots, *shape), (step // dtype.itemsize, *strides))
        # A storage of its own, as that of the real span: a compiler may copy whole storages.
        own = torch.frombuffer((ctypes.c_uint8 * step).from_address(start), dtype=torch.uint8).view(dtype)
        self._own = own[: torch.Size(shape).numel()].view(shape)

    def local(self):
        return self._own

    def of(self, rank):
        return self._slots[(rank - self.rank) % self.ranks]

    def slots(self, start):
        assert 0 <= start <= self.ranks
        first = (start - self.rank) % self.ranks
        return self._slots[first : first + self.ranks]

    def barrier(self):
        if self.closed:
            raise SpanClosedError("the span was closed; make a new one")
        self.met += 1
        dist.barrier(self.group)

    def close(self):
        self.closed = True


class CountedExchange:
    """torch's exchange of handles: one counter for all groups of a process, and the count is in the keys.

    ``rendezvous`` gives what every rank brought instead of a handle.
    """

    def __init__(self):
        self.count = 0

    def rendezvous(self, tensor, name):
        group = torch._C._distributed_c10d._resolve_process_group(name)
        # Through C++, as torch's own.
        store = dist.PrefixStore("exchange", group.get_group_store())
        count, self.count = self.count, self.count + 1
        store.set(f"{count}/{group.rank()}", str(int(tensor)))
        return [int(store.get(f"{count}/{rank}")) for rank in range(group.size())]


class PlainAttention:
    """softmax(scale q k^T) v in float64, row block by row block; counts its calls."""

    name = "plain"

    def __init__(self, refuses=""):
        self.refuses, self.calls = refuses, 0

    def refusal(self, head_dim, dtype, device):
        return self.refuses

    def __call__(self, q, k, v, out, *, softmax_scale, causal):
        self.calls += 1
        assert q.shape == out.shape
        assert k.shape == v.shape
        assert k.shape[0] == q.shape[0]
        group = q.shape[2] // k.shape[2]
        rows, keys = q.shape[1], k.shape[1]
        for b, head in itertools.product(range(q.shape[0]), range(q.shape[2])):
            one_k, one_v = (x[b, :, head // group].double() for x in (k, v))
            for first in range(0, rows, 512):
                block = q[b, first : first + 512, head].double()
                scores = softmax_scale * block @ one_k.T
                if causal:
                    limit = torch.arange(first, first + len(block))[:, None] + keys - rows
                    scores.masked_fill_(torch.arange(keys)[None] > limit, float("-inf"))
                out[b, first : first + 512, head] = (scores.softmax(-1) @ one_v).to(out.dtype)


class AnnouncingAttention(PlainAttention):
    """The same, tile by tile, in the order in which kernels take them; every stored tile raises its counter.

    ``delay(b, head, block)``: seconds by which this rank is late with a tile, before it reads anything of it.
    ``awaits_rows``: it can wait for this rank's rows before it ends; ``awaited`` counts how often it did.
    """

    name = "announcing"

    def __init__(self, block_rows, delay=lambda b, head, block: 0.0, awaits_rows=False):
        super().__init__()
        self.rows, self.delay, self.announced, self.awaited = block_rows, delay, 0, 0
        self.awaits_rows, self.longest_keys = awaits_rows, None

    def block_rows(self, head_dim, dtype, causal):
        return self.rows

    def announce(self, q, k, v, out, arrivals, *, softmax_scale, causal, awaits=None, expected=0):
        self.announced += 1
        assert arrivals.dtype == torch.int32
        assert arrivals.shape == (out.shape[0], out.shape[2], out.shape[1])
        assert arrivals.stride(-1) == 1
        group, rows, keys = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
        for b, head, first in itertools.product(range(q.shape[0]), range(q.shape[2]), range(0, rows, self.rows)):
            time.sleep(self.delay(b, head, first // self.rows))
            tile = slice(first, min(first + self.rows, rows))
            # Bottom-right masks: the tile sees what its last row sees.
            seen = keys - rows + tile.stop if causal else keys
            one_k, one_v = (x[b : b + 1, :seen, head // group : head // group + 1] for x in (k, v))
            heads = slice(head, head + 1)
            PlainAttention.__call__(
                self,
                q[b : b + 1, tile, heads],
                one_k,
                one_v,
                out[b : b + 1, tile, heads],
                softmax_scale=softmax_scale,
                causal=causal,
            )
            with raising():
                arrivals[b, head, first] += 1
        if awaits is not None:
            assert self.awaits_rows
            assert awaits.shape[1] > 0
            self.awaited += 1
            until_here(awaits[:, :: self.rows], expected).zero_()


class raising:  # noqa: N801 - used as a statement
    """Counters are raised by one process at a time: torch has no atomic addition to shared memory."""

    def __enter__(self):
        self._file = os.open(__file__, os.O_RDONLY)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        os.close(self._file)


class HostTake:
    """Waits for row blocks in the host, which is the stream of a CPU; keeps what it was asked for."""

    def __init__(self):
        self.taken = []

    def __call__(self, board, blocks):
        self.taken.append(blocks)
        self.wait(board, blocks).zero_()

    def wait(self, board, blocks):
        """The counters of ``blocks``, once they are all here."""
        rows = slice(blocks.start * board.block_rows, blocks.stop * board.block_rows, board.block_rows)
        return until_here(board.counters[:, rows], board.expected)


def until_here(entries, expected):
    """``entries``, counters of row blocks, once all of them are ``expected``."""
    end = time.monotonic() + LIMIT_S
    while not bool((entries == expected).all()):
        assert int(entries.max()) <= expected, f"{entries} of {expected} tiles have arrived"
        assert time.monotonic() < end, f"{entries} of {expected} tiles have arrived"
        time.sleep(0.0002)
    return entries


def expected_attention(q, k, v, softmax_scale, causal):
    """The same for the whole model at once, by torch's own function: [B, S, H, d] of the inputs' type."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    # Not its fused kernel for the CPU: it is the slower one in float64.
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)
