"""CUDA C++ compiled at run time by NVRTC, and cubins loaded and launched: no nvcc, no build step, no torch."""

from __future__ import annotations

import ctypes
from typing import Any

from xstage_plugin.burst_gap.gpu_info import GpuError, driver_call

OUTPUTS = ("cubin", "ptx")


def compile_cuda(source: bytes, name: str, options: tuple[str, ...], output: str = "cubin") -> bytes:
    """``source`` as C++17, compiled with ``options`` (``--gpu-architecture=sm_90`` among them). Needs no GPU.

    Args:
        source: text of one file.
        name: of that file, for messages.
        options: of NVRTC.
        output: ``cubin`` or ``ptx``.

    Raises:
        GpuError: no NVRTC here, or it refuses; the message holds the first lines of its log.
    """
    options = (*options, "--std=c++17")
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise GpuError(f"cannot import NVRTC ({error}); install the extra: pip install 'xstage-plugin[gpu]'") from None

    def call(function: str, *arguments: Any) -> Any:
        try:
            status, *values = getattr(nvrtc, function)(*arguments)
        except (RuntimeError, OSError) as error:  # the bindings are there, the library is not
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise GpuError(f"{function}: no NVRTC library ({reason}); install nvidia-cuda-nvrtc") from None
        if status.name != "NVRTC_SUCCESS" and function != "nvrtcCompileProgram":
            raise GpuError(f"{function} failed for {name}: {status.name}")
        return status.name if function == "nvrtcCompileProgram" else values[0] if values else None

    def fetch(what: str) -> bytes:
        text = bytes(call(f"nvrtcGet{what}Size", program))
        call(f"nvrtcGet{what}", program, text)  # writes into it
        return text

    program = call("nvrtcCreateProgram", source, name.encode(), 0, [], [])
    try:
        status = call("nvrtcCompileProgram", program, len(options), [option.encode() for option in options])
        if status != "NVRTC_SUCCESS":
            lines = fetch("ProgramLog").rstrip(b"\0").decode(errors="replace").split("\n")
            log = "; ".join(" ".join(line.split()) for line in lines if line.strip())
            raise GpuError(f"NVRTC refuses {name} ({' '.join(options)}): {status}: {log[:400] or 'no log'}")
        return fetch("CUBIN" if output == "cubin" else "PTX")
    finally:
        call("nvrtcDestroyProgram", program)


class CudaModule:
    """A cubin, loaded into the context that is current; it stays loaded with that context.

    Raises:
        GpuError: the driver refuses it.
    """

    def __init__(self, cubin: bytes) -> None:
        self._module = driver_call("cuModuleLoadData", cubin)
        self._functions: dict[str, Any] = {}

    def launch(
        self, name: str, grid: int, block: int, stream: int, *arguments: ctypes._SimpleCData[Any] | ctypes.Structure
    ) -> None:
        """Put the kernel ``name`` on ``stream``; its arguments as ctypes values and structures.

        Raises:
            GpuError: no such kernel, or the driver refuses the launch.
        """
        if name not in self._functions:
            self._functions[name] = driver_call("cuModuleGetFunction", self._module, name.encode())
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        driver_call("cuLaunchKernel", self._functions[name], grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
