"""Compiles FlashAttention-4 kernels for tensors that do not exist, for test_fa4_arrival_compiles.py: a JSON line for each.

Neither a GPU nor a driver is needed: the environment names the target (see there), and the tensors are torch's fake ones.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import struct
import sys
import types
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.test_operators  # torch must find out that triton is missing before a stand-in is there
from torch._subclasses.fake_tensor import FakeTensorMode

# Upstream's launch on Blackwell asks the driver for the SMs of a GPU. Its kernel does not depend on them.
SMS = 148
# Of a cubin's .nv.info section: attributes of a kernel that hold a symbol and a value.
FRAME_SIZE, REGISTERS = 0x11, 0x2F
FORMAT_WITH_SIZE = 0x04


class _Anything(types.ModuleType):
    """A module in which everything is found: on import quack names parts of triton, which a CPU build of torch lacks."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Anything(name)

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function


def stand_in_for_triton():
    for name in ("triton", "triton.language", "triton.tools", "triton.tools.disasm"):
        module = _Anything(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module


class _Hardware:
    """In place of the figures that come from a driver."""

    def get_device_multiprocessor_count(self):
        return SMS


def attributes(cubin):
    """Of a cubin with one kernel: {attribute: value} for those above."""
    sections, entry_size, entries, names_at = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections + i * entry_size) for i in range(entries)]
    names = headers[names_at][4]
    found = {}
    for header in headers:
        name = cubin[names + header[0] :].split(b"\0", 1)[0]
        if name != b".nv.info":
            continue
        at, end = header[4], header[4] + header[5]
        while at < end:
            kind, attribute, size = struct.unpack_from("<BBH", cubin, at)
            if kind == FORMAT_WITH_SIZE and attribute in (FRAME_SIZE, REGISTERS):
                found[attribute] = struct.unpack_from("<II", cubin, at + 4)[1]
            at += 4 + (size if kind == FORMAT_WITH_SIZE else 0)
    return found


def tensors(head_dim, dtype, kv_heads, head_by_head, rows):
    """q, k, v, out and counters of 4 heads and 2 destinations, as the launches of a fused plan hand them to the kernel."""
    if head_by_head:
        q = torch.empty(2, rows, 4, head_dim, dtype=dtype, device="cuda").permute(2, 1, 0, 3)
        k = torch.empty(8192, 4, head_dim, dtype=dtype, device="cuda").transpose(0, 1).unsqueeze(2)
        arrivals = torch.empty(1, 2, rows, dtype=torch.int32, device="cuda").expand(4, -1, -1)
    else:
        q = torch.empty(2, rows, 4, head_dim, dtype=dtype, device="cuda")
        k = torch.empty(1, 8192, kv_heads, head_dim, dtype=dtype, device="cuda").expand(2, -1, -1, -1)
        arrivals = torch.empty(2, 1, rows, dtype=torch.int32, device="cuda").expand(-1, 4, -1)
    return q, k, k, torch.empty_strided(q.shape, q.stride(), dtype=dtype, device="cuda"), arrivals


def upstream_forward(q, k, v, out, causal):
    from flash_attn.cute import interface

    interface._flash_attn_fwd(q, k, v, out=out, softmax_scale=0.1, causal=causal, num_splits=1, pack_gqa=False)


def compiled(
    folder,
    *,
    head_dim,
    dtype="bfloat16",
    kv_heads=4,
    causal=False,
    head_by_head=False,
    rows=4096,
    counters=True,
    spans=False,
    awaits=False,
    stock=False,
):
    """Our kernel, or with ``stock`` upstream's for the same tensors: its PTX and what it takes of an SM."""
    from xstage_plugin.attention.kernels import fa4_launch

    before = set(folder.iterdir())
    with FakeTensorMode():
        *operands, arrivals = tensors(head_dim, getattr(torch, dtype), kv_heads, head_by_head, rows)
        shape = fa4_launch.spans_shape(operands[0], causal)
        times = torch.empty(shape, dtype=torch.int64, device="cuda") if spans else None
        if stock:
            upstream_forward(*operands, causal)
        else:
            own = torch.empty(2, rows, dtype=torch.int32, device="cuda") if awaits else None
            signals = (arrivals if counters else None, times, own, 8 if awaits else None)
            fa4_launch.build(*operands, *signals, 0.1, causal, SMS)
    made = {path.suffix: path for path in set(folder.iterdir()) - before}
    found, ptx = attributes(made[".cubin"].read_bytes()), made[".ptx"].read_text().rstrip("\0")
    for path in made.values():
        path.unlink()  # kernels of one class have one name
    return {"registers": found[REGISTERS], "stack_bytes": found[FRAME_SIZE], "ptx": ptx}


class _AskedError(Exception):
    """Ends a call of upstream's at the kernel that it asks for."""


def choices(*, head_dim, causal, rows):
    """What our kernel is made with and what upstream's own function makes its one with, by name."""
    from flash_attn.cute import interface

    from xstage_plugin.attention.kernels import fa4_launch

    asked = {}

    def ask(*args, **kwargs):
        asked.update(kwargs)
        raise _AskedError

    ours = fa4_launch.kernel_arguments(head_dim, causal, rows)
    name = f"FlashAttentionForwardSm{fa4_launch.generation()}0"
    with mock.patch.object(interface, name, ask), FakeTensorMode(), contextlib.suppress(_AskedError):
        upstream_forward(*tensors(head_dim, torch.bfloat16, 4, False, rows)[:4], causal)
    return {"ours": ours, "upstream": {key: asked.get(key) for key in ours}}


def main():
    if importlib.util.find_spec("triton") is None:
        stand_in_for_triton()
    import cutlass.utils

    cutlass.utils.HardwareInfo = _Hardware
    asked, folder = json.loads(sys.argv[1]), Path(os.environ["CUTE_DSL_DUMP_DIR"])
    for case in asked["choices"]:  # first: upstream does not ask for a kernel that it has compiled
        print(json.dumps(choices(**case)), flush=True)
    for case in asked["kernels"]:
        print(json.dumps(compiled(folder, **case)), flush=True)


if __name__ == "__main__":
    main()
