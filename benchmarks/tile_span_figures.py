"""What the spans of output tiles say: how long a store holds its buffer, when it is complete, and how much is under way.

Pure, no GPU. A span is [issued, shared memory free, complete] of one tile, nanoseconds of its GPU's timer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import numpy.typing as npt

from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import read_json

Spans = npt.NDArray[np.float64]  # [tiles, 3], microseconds from the first store on
SCHEMA = "xstage-tile-spans/1"


def from_first(nanoseconds: Sequence[Sequence[int]]) -> Spans:
    """Spans in microseconds from the first store of the kernel on."""
    ticks = np.asarray(nanoseconds, dtype=np.int64)
    return (ticks - ticks[:, 0].min()) / 1e3


def under_way_bytes(spans: Spans, tile_bytes: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Moments, microseconds, and how many bytes have been issued and are not complete from each of them on."""
    if not len(spans):
        return np.zeros(1), np.zeros(1)
    moments = np.concatenate([spans[:, 0], spans[:, 2]])
    steps = np.repeat([tile_bytes, -tile_bytes], len(spans))
    order = np.lexsort((steps, moments))  # what completes at a moment makes room first
    return moments[order], np.cumsum(steps[order])


def summary_of(spans: Spans, tile_bytes: float) -> dict[str, float]:
    """Quantiles of the time until shared memory is free and until the store is complete, and the most bytes under way."""
    found: dict[str, float] = {"tiles": len(spans)}
    for name, column in (("smem_free", 1), ("complete", 2)):
        took = spans[:, column] - spans[:, 0]
        for level, label in ((0.5, "median"), (0.9, "p90"), (1.0, "max")):
            found[f"{name}_{label}_us"] = harness.rounded(float(np.quantile(took, level)))
    found["peak_under_way_bytes"] = float(under_way_bytes(spans, tile_bytes)[1].max())
    return found


def draw(result: Path, out: Path) -> None:
    """Bytes under way over the kernel, one panel a case, to the owners' memory and to local memory instead.

    Raises:
        InvalidInputError: no result file of this kind, or ``out`` cannot be written.
    """
    from xstage_plugin.plots import COLOURS, save_figure  # matplotlib: workers start faster without it

    document = read_json(result, "a result of tile_spans.py")
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or not document["cases"]:
        raise InvalidInputError(f"{result}: not a result of tile_spans.py with cases; expected schema {SCHEMA!r}")

    def make() -> Any:
        from matplotlib.figure import Figure

        cases: Sequence[Mapping[str, Any]] = document["cases"]
        figure = Figure(figsize=(9, 2.4 * len(cases)), layout="constrained")
        for axes, case in zip(figure.subplots(len(cases), squeeze=False)[:, 0], cases, strict=True):
            for colour, (name, spans) in zip(COLOURS, case["spans_us"].items(), strict=False):
                moments, held = under_way_bytes(np.asarray(spans).reshape(-1, 3), case["tile_bytes"])
                axes.step(moments, held / 2**20, where="post", color=colour, linewidth=0.8, label=name)
            axes.axhline(case["capacity_bytes"] / 2**20, color="0.5", linewidth=0.8, linestyle="--", label="model's capacity")
            axes.set_title(case["name"], fontsize=9)
            axes.set_ylabel("MiB under way")
            axes.legend(fontsize=7)
        axes.set_xlabel("microseconds from the first store on")
        return figure

    save_figure(make, out)
