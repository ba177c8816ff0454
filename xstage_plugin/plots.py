"""Pictures of a platform model and of the advice. Samples come from the platform's samples file and from nowhere else."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from xstage_plugin.attention.advisor import AttentionDecision
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.burst_gap.samples import BurstGapSamples, GapSample
from xstage_plugin.burst_gap.units import KIB, MIB
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import write_atomically
from xstage_plugin.moe.advisor import ScheduleDecision

FORMATS = ("png", "svg", "pdf")
# Okabe and Ito's palette: told apart by readers with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MOST_CURVES = 4
COUPLED = "gap + V/R: if the sender had to wait"


def save_figure(make: Callable[[], Figure], out: Path) -> None:
    """Draw and write to ``out``, whole or not at all; the suffix says the format.

    Raises:
        InvalidInputError: another suffix than png, svg, pdf, or ``out`` cannot be written.
    """
    suffix = out.suffix.lstrip(".").lower()
    if suffix not in FORMATS:
        raise InvalidInputError(f"{out}: a picture ends in .{', .'.join(FORMATS)}; give such a name")
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name with letters that the font lacks is drawn as boxes
        make().savefig(data, format=suffix, dpi=150)
    write_atomically(out, data.getvalue())


def platform_figure(model: PlatformModel, samples: BurstGapSamples | None) -> Figure:
    """The four panels of the paper's Figure 3: issue over gap, period over gap, isolated knee, drain line."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    held_out = samples.gap_sweep if samples else ()
    _draw_gap_panels(axes[0, 0], axes[0, 1], model, held_out)
    _draw_isolated(axes[1, 0], model, samples)
    _draw_drain(axes[1, 1], model, samples)
    origin = "points: samples, lines: model" if samples else "lines: model; this platform comes without samples"
    figure.suptitle(
        f"{model.name} ({model.store}): R = {model.drain_rate_gbps:.0f} GB/s, {model.drain_rate_origin.source}; {origin}"
    )
    return figure


def advice_figure(
    platform: PlatformModel,
    moe: Sequence[tuple[str, ScheduleDecision]],
    attention: Sequence[tuple[int, AttentionDecision]],
    setting: str,
) -> Figure:
    """Stall per Linear-2 tile under both schedules, and attention's residual over the sequence length."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    position = np.arange(len(moe))
    left.bar(position - 0.2, [d.stall_wave_us for _, d in moe], 0.4, label="expert wave", color=COLOURS[1])
    left.bar(position + 0.2, [d.stall_interleaved_us for _, d in moe], 0.4, label="interleaved", color=COLOURS[0])
    for index, (_, decision) in enumerate(moe):
        height = max(decision.stall_wave_us, decision.stall_interleaved_us)
        left.annotate(
            f"{decision.stall_wave_us:.1f} → {decision.stall_interleaved_us:.1f}\npick {decision.schedule}",
            (index, height),
            ha="center",
            va="bottom",
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
        )
    left.set_xticks(position, [name for name, _ in moe], rotation=30, ha="right")
    left.margins(y=0.45)
    left.set_ylim(bottom=0)
    left.set_ylabel("predicted tensor-core stall, us per Linear-2 tile")
    left.set_title(f"MegaMoE, {setting}: wave → interleaved")
    left.legend(loc="upper right", ncols=2)
    lengths = [m for m, _ in attention]
    coupled = [d.completion_coupled_residual_us for _, d in attention]
    fused = [d.residual_us + d.issue_us for _, d in attention]
    right.plot(lengths, coupled, "o--", color=COLOURS[1], label="without X-Stage (17)")
    right.plot(lengths, [d.serial_exchange_us for _, d in attention], "s:", color=COLOURS[2], label="exchange alone, V/R")
    right.plot(lengths, fused, "o-", color=COLOURS[0], label="fused: residual + issue")
    right.set_xscale("log", base=2)
    right.set_xticks(lengths, [f"{m // 1024}K" for m in lengths])
    right.set_xlabel("sequence length, tokens")
    right.set_ylabel("us per layer over attention alone")
    right.set_title("Ulysses attention")
    right.legend()
    figure.suptitle(
        f"{_plain(platform.name)}: predicted from R = {platform.drain_rate_gbps:.0f} GB/s ({platform.drain_rate_origin.source})"
    )
    return figure


def _plain(text: str) -> str:
    """``text`` without the dollar signs that would start a formula."""
    return text.replace("$", r"\$")


def _draw_gap_panels(issue: Axes, period: Axes, model: PlatformModel, sweep: Sequence[GapSample]) -> None:
    curves = sorted({(s.num_producers, s.burst_kib) for s in sweep})
    if curves:
        most = max(count for count, _ in curves)
        curves = [curve for curve in curves if curve[0] == most][:MOST_CURVES]
    else:
        curves = [(model.capacity.producers[-1], size) for size in (8.0, 16.0, 32.0)]
    widest = max(float(model.recovery_gap_us(count, size * KIB)) for count, size in curves)
    gaps = np.linspace(0, max(1.0, 1.8 * widest), 400)
    by_aggregate = bool(sweep) and all(s.aggregate_period_us is not None for s in sweep)
    law = model.period_us if by_aggregate or not sweep else model.median_producer_period_us
    for (count, size), colour in zip(curves, COLOURS, strict=False):
        rows = sorted((s for s in sweep if (s.num_producers, s.burst_kib) == (count, size)), key=lambda s: s.gap_us)
        rows = [s for s in rows if s.gap_us <= gaps[-1]]
        x = [s.gap_us for s in rows]
        measured = [
            s.period_us_median if s.aggregate_period_us is None or not by_aggregate else s.aggregate_period_us for s in rows
        ]
        own = law(count, size * KIB, gaps) - gaps
        label = f"{count} x {size:g} KiB"
        issue.plot(gaps, np.maximum(own, model.issue_floor_us(count, size * KIB)), color=colour, label=label)
        issue.plot(x, [s.issue_us_median for s in rows], "o", color=colour, markersize=5)
        issue.plot(x, [s.local_issue_us_median for s in rows], "x", color=colour, markersize=5, zorder=3)
        period.plot(gaps, law(count, size * KIB, gaps), color=colour, label=label)
        period.plot(x, measured, "o", color=colour, markersize=5)
        coupled = gaps + model.drain_us(model.burst_total_bytes(count, size * KIB))
        period.plot(gaps, coupled, ":", color=colour, linewidth=1, label=COUPLED if colour == COLOURS[0] else None)
    issue.set_title("(a) issue time recovers with the gap" + (" (x: local control)" if sweep else ""))
    issue.set_ylabel("sender-visible issue time, us")
    kind = "whole burst" if law == model.period_us else "median producer"
    period.set_title(f"(b) period of the {kind}")
    period.set_ylabel("period, us")
    for axes in (issue, period):
        axes.set_xlabel("gap without stores, us")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)


def _draw_isolated(axes: Axes, model: PlatformModel, samples: BurstGapSamples | None) -> None:
    rows = samples.isolated if samples else ()
    counts = sorted({s.num_producers for s in rows}) or list(model.capacity.producers)
    for count, colour in zip(counts[-MOST_CURVES:], COLOURS, strict=False):
        mine = [s for s in rows if s.num_producers == count]
        knee = model.knee_burst_bytes(count)
        largest = max([s.burst_kib * KIB for s in mine], default=2 * min(knee, 64 * MIB))
        sizes = np.linspace(largest / 200, largest, 200)
        total = sizes * count / MIB
        axes.plot(total, model.isolated_issue_us(count, sizes), color=colour, label=f"{count} producers")
        axes.plot(
            [s.burst_total_bytes / MIB for s in mine],
            [s.issue_us_median for s in mine],
            "o",
            color=colour,
            markersize=5,
        )
        local = [s.local_issue_us_median for s in mine]
        axes.plot([s.burst_total_bytes / MIB for s in mine], local, "x", color=colour, markersize=5, zorder=3)
        if knee < largest:
            axes.axvline(knee * count / MIB, color=colour, linestyle=":", linewidth=1)
    axes.set_title("(c) one burst on an empty path; dotted: the capacity knee" + (" (x: local)" if rows else ""))
    axes.set_xlabel("burst of all producers, MiB")
    axes.set_ylabel("sender-visible issue time, us")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=8)


def _draw_drain(axes: Axes, model: PlatformModel, samples: BurstGapSamples | None) -> None:
    rows = samples.zero_gap if samples else ()
    largest = max([s.burst_total_bytes for s in rows], default=8.0 * MIB)
    total = np.linspace(0, largest, 50)
    axes.plot(total / MIB, model.drain_us(total), color="black", label=f"V/R at {model.drain_rate_gbps:.0f} GB/s")
    contains = " (with a launch share)" if samples and samples.launch_in_period else ""
    for count, colour in zip(sorted({s.num_producers for s in rows}), COLOURS, strict=False):
        mine = [s for s in rows if s.num_producers == count]
        x = [s.burst_total_bytes / MIB for s in mine]
        periods = [s.aggregate_period_us for s in mine]
        axes.plot(x, periods, "o", color=colour, markersize=7, fillstyle="none", label=f"{count} producers")
    axes.set_title("(d) zero gap: the drain rate all producers share")
    axes.set_xlabel("burst of all producers, MiB")
    axes.set_ylabel(f"aggregate period{contains}, us")
    axes.legend(fontsize=8)
