"""Data that ships in the package, and telling a bundled name from a file."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path


def bundled_folder(name: str) -> Path:
    """A folder of the installed package (``platforms``, ``models``)."""
    return Path(str(resources.files("xstage_plugin").joinpath(name)))


def looks_like_file(text: str) -> bool:
    """Whether ``text`` means a file rather than a name: it has a separator or a suffix of ours, or it exists."""
    return bool(text) and (os.sep in text or text.endswith((".toml", ".json", ".npy", ".csv", ".txt")) or _exists(text))


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long, or a NUL byte
        return False
