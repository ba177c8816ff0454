"""``probe.cu`` compiled at run time: no nvcc and no build step. Needs no GPU."""

from __future__ import annotations

import functools
import importlib.resources

from xstage_plugin.burst_gap.nvrtc import OUTPUTS, compile_cuda
from xstage_plugin.burst_gap.platform_model import STORES
from xstage_plugin.errors import InvalidInputError


@functools.cache
def compile_probe(arch: str, store: str, defines: tuple[str, ...] = (), output: str = "cubin") -> bytes:
    """``probe.cu`` compiled by NVRTC for ``arch`` ("sm_90"), as ``output`` ("cubin" or "ptx"). Needs no GPU.

    ``defines`` are further options, such as "-DNAME=VALUE".

    Raises:
        InvalidInputError: ``store`` or ``output`` is unknown.
        GpuError: no NVRTC here, or it refuses; the message holds the first lines of its log.
    """
    if store not in STORES or output not in OUTPUTS:
        raise InvalidInputError(f"store {store!r}, output {output!r}; expected {' or '.join(STORES)}, {' or '.join(OUTPUTS)}")
    source = importlib.resources.files("xstage_plugin.burst_gap").joinpath("probe.cu").read_bytes()
    return compile_cuda(
        source, "probe.cu", (f"--gpu-architecture={arch}", f"-DSTORE_KIND={STORES.index(store)}", *defines), output
    )
