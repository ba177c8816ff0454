"""Where a number comes from."""

from __future__ import annotations

import contextlib
import enum
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from xstage_plugin import env


class Source(str, enum.Enum):
    """How a number came to be. An estimate is never shown without this mark."""

    MEASURED = "measured"
    PAPER = "paper"
    DATASHEET = "datasheet"
    ESTIMATED = "estimated"
    GIVEN = "given"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Origin:
    """Source of a number and one sentence on how it was had."""

    source: Source
    note: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.note}" if self.note else str(self.source)


def package_versions() -> dict[str, str]:
    """Versions of the packages that a measurement rests on, where they are installed."""
    found = {}
    for name in ("numpy", "scipy", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-ml-py", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def source_state() -> dict[str, str]:
    """Commit of the checkout that this package runs from and whether its tree is clean; empty where it is no checkout.

    A copy without history takes both from $XSTAGE_SOURCE_STATE ("COMMIT clean").
    """
    given = env.source_state()
    if given:
        commit, _, tree = given.partition(" ")
        return {"commit": commit, "tree": tree or "not known"}
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return {}
    answers = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            run = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return {}
        answers.append(run.stdout.strip())
    return {"commit": answers[0], "tree": "dirty" if answers[1] else "clean"}
