"""What this machine has for xstage: GPUs, peer access, NVLink, driver, Python packages, upstream libraries. Never raises."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from xstage_plugin.burst_gap.gpu_info import MachineInfo, probe_machine

# Distribution, the module that it brings, and what it is for here.
PACKAGES = (
    ("cuda-bindings", "cuda.bindings.driver", "calibrate: CUDA driver and NVRTC"),
    ("nvidia-cuda-nvrtc", "cuda.bindings.nvrtc", "calibrate: run-time compiler"),
    ("nvidia-ml-py", "pynvml", "calibrate: clocks, links, other processes"),
    ("torch", "torch", "one process a GPU, symmetric memory"),
    ("sgl-deep-gemm", "deep_gemm", "MegaMoE"),
    ("flash-attn-4", "flash_attn.cute", "FlashAttention-4"),
    ("fa3-fwd", "fa3_fwd", "FlashAttention-3"),
)
IMPORT_TIMEOUT_S = 60


@dataclass(frozen=True)
class PackageState:
    """One package: installed version (None: not installed), whether its module imports, and why it does not."""

    name: str
    purpose: str
    version: str | None
    works: bool
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """The machine, the packages, and the verdict on `xstage calibrate` in one sentence."""

    machine: MachineInfo
    packages: tuple[PackageState, ...]
    can_calibrate: bool
    verdict: str


def diagnose() -> Diagnosis:
    """Look at this machine. Imports of packages run in processes of their own, so that a broken one breaks nothing here."""
    from xstage_plugin.burst_gap.calibrate_file import check_request
    from xstage_plugin.errors import XStageError

    machine = probe_machine()
    try:
        ordinals = check_request(machine, None, "one-way")
        ready = len(ordinals) > 1
        verdict = (
            f"xstage calibrate can run on GPUs {', '.join(map(str, ordinals))}" if ready else "one GPU: local control only"
        )
    except XStageError as error:
        ready, verdict = False, str(error)
    return Diagnosis(machine, tuple(_package(*entry) for entry in PACKAGES), ready, verdict)


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain values for JSON."""
    return asdict(diagnosis)


def _package(name: str, module: str, purpose: str) -> PackageState:
    version = None
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version(name)
    if version is None:
        return PackageState(name, purpose, None, False, "not installed")
    try:
        run = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return PackageState(name, purpose, version, False, f"import {module}: {type(error).__name__}")
    lines = run.stderr.strip().splitlines()
    reason = "" if run.returncode == 0 else f"import {module}: {lines[-1] if lines else f'exit code {run.returncode}'}"
    return PackageState(name, purpose, version, run.returncode == 0, reason)
