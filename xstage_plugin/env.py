"""Every environment variable that this package reads."""

from __future__ import annotations

import os

PLATFORM = "XSTAGE_PLATFORM"
DEBUG = "XSTAGE_DEBUG"
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


def debug() -> bool:
    """Whether a fault of ours shows its traceback."""
    return os.environ.get(DEBUG, "") not in ("", "0")
