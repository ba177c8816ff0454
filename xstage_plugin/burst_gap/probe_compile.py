"""``probe.cu`` compiled at run time by NVRTC: no nvcc and no build step. Needs no GPU."""

from __future__ import annotations

import functools
import importlib.resources
from typing import Any

from xstage_plugin.burst_gap.gpu_info import GpuError
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
    if store not in STORES or output not in ("cubin", "ptx"):
        raise InvalidInputError(f"store {store!r}, output {output!r}; expected {' or '.join(STORES)}, cubin or ptx")
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise GpuError(f"cannot import NVRTC ({error}); install the extra: pip install 'xstage-plugin[gpu]'") from None
    source = importlib.resources.files("xstage_plugin.burst_gap").joinpath("probe.cu").read_bytes()
    options = [f"--gpu-architecture={arch}", f"-DSTORE_KIND={STORES.index(store)}", "--std=c++17", *defines]

    def call(name: str, *arguments: Any) -> Any:
        try:
            status, *values = getattr(nvrtc, name)(*arguments)
        except (RuntimeError, OSError) as error:  # the bindings are there, the library is not
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise GpuError(f"{name}: no NVRTC library ({reason}); install nvidia-cuda-nvrtc") from None
        if status.name != "NVRTC_SUCCESS" and name != "nvrtcCompileProgram":
            raise GpuError(f"{name} failed for probe.cu: {status.name}")
        return status.name if name == "nvrtcCompileProgram" else values[0] if values else None

    def fetch(what: str) -> bytes:
        text = bytes(call(f"nvrtcGet{what}Size", program))
        call(f"nvrtcGet{what}", program, text)  # writes into it
        return text

    program = call("nvrtcCreateProgram", source, b"probe.cu", 0, [], [])
    try:
        status = call("nvrtcCompileProgram", program, len(options), [option.encode() for option in options])
        if status != "NVRTC_SUCCESS":
            lines = fetch("ProgramLog").rstrip(b"\0").decode(errors="replace").split("\n")
            log = "; ".join(" ".join(line.split()) for line in lines if line.strip())
            raise GpuError(f"NVRTC refuses probe.cu ({' '.join(options)}): {status}: {log[:400] or 'no log'}")
        return fetch("CUBIN" if output == "cubin" else "PTX")
    finally:
        call("nvrtcDestroyProgram", program)
