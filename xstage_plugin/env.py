"""Every environment variable that this package reads."""

from __future__ import annotations

import os
from pathlib import Path

PLATFORM = "XSTAGE_PLATFORM"
DEBUG = "XSTAGE_DEBUG"
MOE_SCHEDULE = "XSTAGE_MOE_SCHEDULE"
MOE_LEAD = "XSTAGE_MOE_LEAD"
MOE_PULLS = "XSTAGE_MOE_PULLS"
ALLOW_UNRUN = "XSTAGE_ALLOW_UNRUN"
CACHE_HOME = "XDG_CACHE_HOME"
SOURCE_STATE = "XSTAGE_SOURCE_STATE"
DEFAULT_PLATFORM = "paper-148sm"


def default_platform() -> str:
    """Name or file of the platform used where none is given: $XSTAGE_PLATFORM, else the paper's."""
    return os.environ.get(PLATFORM) or DEFAULT_PLATFORM


def source_state() -> str:
    """Commit and state of the tree ("COMMIT clean") that results record where the package runs from a bare copy."""
    return os.environ.get(SOURCE_STATE, "")


def torchrun_ranks() -> int:
    """Processes that torchrun started, 1 without it."""
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdigit() else 1


def torchrun_rank() -> int:
    """This process's rank under torchrun, 0 without it."""
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0


def torchrun_local_rank() -> int:
    """This process's rank on its host under torchrun, 0 without it."""
    value = os.environ.get("LOCAL_RANK", "0")
    return int(value) if value.isdigit() else 0


def torchrun_local_ranks() -> int:
    """Processes that torchrun started on this host, 1 without it."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(value) if value.isdigit() else 1


def debug() -> bool:
    """Whether a fault of ours shows its traceback."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def moe_schedule() -> str | None:
    """Schedule of MegaMoE for programs that call deep_gemm themselves; None where nothing is set."""
    return os.environ.get(MOE_SCHEDULE) or None


def moe_lead() -> str:
    """Lead in rows for :func:`moe_schedule`, or ``auto``."""
    return os.environ.get(MOE_LEAD) or "auto"


def moe_pulls() -> str | None:
    """How Dispatch pulls, for the same programs; None where nothing is set."""
    return os.environ.get(MOE_PULLS) or None


def allow_unrun() -> bool:
    """Whether a target that nobody ever ran may be activated."""
    return os.environ.get(ALLOW_UNRUN, "") not in ("", "0")


def cache_home() -> Path | None:
    """$XDG_CACHE_HOME where it is an absolute path (the XDG rule), else ~/.cache; None where there is no home either."""
    given = os.environ.get(CACHE_HOME, "")
    if os.path.isabs(given):
        return Path(given)
    home = os.path.expanduser("~")
    return Path(home) / ".cache" if os.path.isabs(home) else None
