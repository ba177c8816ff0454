"""Every environment variable that this package reads."""

from __future__ import annotations

import os

PLATFORM = "XSTAGE_PLATFORM"
DEFAULT_PLATFORM = "paper-148sm"


def default_platform() -> str:
    """Name or file of the platform used where none is given: $XSTAGE_PLATFORM, else the paper's."""
    return os.environ.get(PLATFORM) or DEFAULT_PLATFORM
