"""Results as JSON documents and as tables for people. Formats only; every number comes from the library."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from xstage_plugin.attention.advisor import AttentionDecision
from xstage_plugin.attention.workload import AttentionWorkload
from xstage_plugin.burst_gap.catalog import samples_path
from xstage_plugin.burst_gap.platform_file import platform_document
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.burst_gap.units import KIB, MIB
from xstage_plugin.moe.advisor import ScheduleDecision
from xstage_plugin.moe.shapes import ExpertShape
from xstage_plugin.moe.workload import MoeWorkload

if TYPE_CHECKING:  # the fit brings scipy, which nothing else needs
    from xstage_plugin.burst_gap.calibrate_file import Calibration
    from xstage_plugin.burst_gap.fit import FitReport
    from xstage_plugin.burst_gap.holdout import HoldoutError
    from xstage_plugin.doctor import Diagnosis

PIPED_WIDTH = 120


def print_json(document: Any) -> None:
    """One JSON document on stdout. NaN and infinity would be no JSON and raise ValueError."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def moe_document(decision: ScheduleDecision) -> dict[str, Any]:
    return asdict(decision) | {"times": asdict(decision.times) | {"origin": str(decision.times.origin)}}


def attention_document(decision: AttentionDecision) -> dict[str, Any]:
    return asdict(decision)


def model_document(platform: PlatformModel, producers: int, burst_bytes: float, gap_us: float) -> dict[str, Any]:
    """Equations 1 to 7 and 10 at one point, plain numbers."""
    test = platform.design_test(producers, burst_bytes, gap_us)
    return {
        "producers": producers,
        "burst_bytes_per_producer": burst_bytes,
        "burst_bytes": float(platform.burst_total_bytes(producers, burst_bytes)),
        "gap_us": gap_us,
        "issue_floor_us": float(platform.issue_floor_us(producers, burst_bytes)),
        "issue_us": float(platform.issue_us(producers, burst_bytes, gap_us)),
        "overhead_us": float(platform.overhead_us(producers, burst_bytes, gap_us)),
        "period_us": float(platform.period_us(producers, burst_bytes, gap_us)),
        "median_producer_period_us": float(platform.median_producer_period_us(producers, burst_bytes, gap_us)),
        "recovery_gap_us": float(platform.recovery_gap_us(producers, burst_bytes)),
        "peak_outstanding_bytes": float(platform.peak_outstanding_bytes(producers, burst_bytes)),
        "capacity_bytes": float(platform.capacity_bytes(producers)),
        "isolated_issue_us": float(platform.isolated_issue_us(producers, burst_bytes)),
        "rate_bound_holds": bool(test.rate_bound_holds),
        "capacity_bound_holds": bool(test.capacity_bound_holds),
        "notes": list(platform.outside(producers, burst_bytes)),
    }


def fit_document(result: FitReport, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "model": platform_document(result.model),
        "drain": asdict(result.drain),
        "capacity": [asdict(entry) for entry in result.capacity],
        "holdout": [asdict(entry) for entry in result.holdout],
        "notes": list(result.notes),
    }


def platform_summary(model: PlatformModel) -> dict[str, Any]:
    """One bundled platform in a line: its largest producer count stands for it."""
    producers = model.capacity.producers[-1]
    return {
        "name": model.name,
        "description": model.description,
        "store": model.store,
        "drain_rate_gbps": model.drain_rate_gbps,
        "drain_rate_source": model.drain_rate_origin.source.value,
        "producers": producers,
        "issue_floor_us_at_32_kib": float(model.issue_floor_us(producers, 32 * KIB)),
        "capacity_mib": float(model.capacity_bytes(producers)) / MIB,
        "knee_kib": model.knee_burst_bytes(producers) / KIB,
        "device": model.device.name,
        "provenance": dict(model.provenance),
    }


def shape_document(shape: ExpertShape) -> dict[str, Any]:
    document = asdict(shape)
    return {"model": document.pop("key"), **document}


def print_overview(
    platform: PlatformModel,
    moe: Sequence[tuple[str, ScheduleDecision]],
    attention: Sequence[tuple[int, AttentionDecision]],
    moe_setting: str,
    attention_setting: str,
) -> None:
    console = _console()
    console.print(f"Platform {platform.name}: {platform.description}. R = {platform.drain_rate_gbps:.0f} GB/s.", style="bold")
    table = _table(console, f"MegaMoE: {moe_setting}. Stalls are us per Linear-2 tile.", "model", "schedule", "lead")
    for name in ("wave", "interleaved", "gain"):
        table.add_column(name, justify="right")
    table.add_column("tile times")
    for key, decision in moe:
        table.add_row(
            key,
            decision.schedule,
            "-" if decision.lead_rows is None else str(decision.lead_rows),
            f"{decision.stall_wave_us:.2f}",
            f"{decision.stall_interleaved_us:.2f}",
            f"{decision.predicted_speedup:.2f}x",
            decision.times.origin.source.value,
        )
    console.print(table)
    console.print("gain: predicted tile time under wave over interleaved, whichever is picked. Why:")
    _print_reasons(console, [(key, decision.reason) for key, decision in moe])
    table = _table(console, f"Ulysses attention: {attention_setting}. Times are us per layer.", "tokens", "action")
    for name in ("residual", "issue", "without X-Stage", "exchange"):
        table.add_column(name, justify="right")
    for seq_len, verdict in attention:
        table.add_row(
            str(seq_len),
            verdict.action,
            f"{verdict.residual_us:.1f}",
            f"{verdict.issue_us:.1f}",
            f"{verdict.completion_coupled_residual_us:.1f}",
            f"{verdict.serial_exchange_us:.1f}",
        )
    console.print(table)
    console.print("exchange: the same bytes afterwards, at the drain rate. Why:")
    _print_reasons(console, [(str(seq_len), verdict.reason) for seq_len, verdict in attention])
    rows = [decision.notes for _, decision in moe] + [verdict.notes for _, verdict in attention]
    special = _distinct(note for notes in rows for note in notes if not _of_model_points(note))
    _print_notes(console, special)
    outside = sum(any(_of_model_points(note) for note in notes) for notes in rows)
    if outside:
        _print_notes(console, [f"{outside} of {len(rows)} rows lie outside the platform's measured points; --json says how"])


def _of_model_points(note: str) -> bool:
    """Whether a note is one of the long ones about extrapolation and aligned bursts, which repeat from row to row."""
    return "extrapolated" in note or note.startswith("an aligned burst exceeds")


def print_moe(platform: PlatformModel, workload: MoeWorkload, decision: ScheduleDecision) -> None:
    console = _console()
    lead = "" if decision.lead_rows is None else f", lead {decision.lead_rows} rows"
    console.print(f"{decision.schedule}{lead}: {decision.reason}.", style="bold")
    table = _table(
        console,
        f"{platform.name}, hidden {workload.hidden}, intermediate {workload.intermediate}, {workload.experts} experts over "
        f"{workload.ranks} ranks; us per Linear-2 tile",
        "",
    )
    table.add_column("wave", justify="right")
    table.add_column("interleaved", justify="right")
    for name, wave, interleaved in (
        ("gap (12)", decision.gap_wave_us, decision.gap_interleaved_us),
        ("backpressure (9, 13)", decision.overhead_wave_us, decision.overhead_interleaved_us),
        ("store span", decision.span_wave_us, decision.span_interleaved_us),
        ("tensor-core stall (15)", decision.stall_wave_us, decision.stall_interleaved_us),
    ):
        table.add_row(name, f"{wave:.2f}", f"{interleaved:.2f}")
    place = decision.locality
    table.add_row(
        "working set, MB",
        f"{place.working_set_wave_bytes / 1e6:.0f}",
        f"{place.working_set_interleaved_bytes / 1e6:.0f}",
    )
    console.print(table)
    _print_facts(
        console,
        {
            "interleaving suffices (14)": "yes" if decision.interleaving_suffices else "no",
            "lead knee (16)": f"{decision.lead_knee_rows} rows; the busiest rank has {decision.load.rows}",
            "aligned burst": f"{decision.producers} x {decision.burst_bytes / KIB:.1f} KiB drain in {decision.drain_us:.1f} us",
            "capacity bound (10)": "holds" if decision.capacity_bound_holds else "fails",
            "locality cost": f"{place.cost:.0%} (L2 cache {place.l2_bytes / 1e6:.0f} MB)",
            "predicted": f"{decision.predicted_speedup:.2f}x per tile",
        },
    )
    _print_sources(console, decision.sources, decision.notes)


def print_attention(platform: PlatformModel, workload: AttentionWorkload, decision: AttentionDecision) -> None:
    console = _console()
    console.print(f"{decision.action}: {decision.reason}.", style="bold")
    burst, peak = decision.burst_bytes / MIB, decision.peak_outstanding_bytes / MIB
    _print_facts(
        console,
        {
            "platform": f"{platform.name}, {workload.ranks} ranks, {workload.seq_len} tokens, {workload.heads_per_rank} heads",
            "aligned burst": f"{decision.producers} x {workload.tile_bytes / KIB:g} KiB = {burst:.2f} MiB",
            "peak outstanding (6)": f"{peak:.2f} MiB",
            "gap of a Q-loop": f"{decision.qloop_gap_us:.1f} us; needed (5): {decision.recovery_gap_us:.1f} us",
            "rate bound (10)": "holds" if decision.rate_bound_holds else "fails",
            "capacity bound (10)": "holds" if decision.capacity_bound_holds else "fails",
            "minimum length (20)": f"{decision.min_seq_len} tokens",
            "residual (19)": f"{decision.residual_us:.1f} us, and {decision.issue_us:.1f} us of issue",
            "without X-Stage (17)": f"{decision.completion_coupled_residual_us:.1f} us",
            "exchange alone": f"{decision.serial_exchange_us:.1f} us at the drain rate",
        },
    )
    _print_sources(console, decision.sources, decision.notes)


def print_model(platform: PlatformModel, document: dict[str, Any]) -> None:
    console = _console()
    burst, total = document["burst_bytes_per_producer"], document["burst_bytes"]
    console.print(
        f"{platform.name}: {document['producers']} producers x {burst / KIB:g} KiB = {total / MIB:.2f} MiB, "
        f"gap {document['gap_us']:g} us"
    )
    _print_facts(
        console,
        {
            "issue floor": f"{document['issue_floor_us']:.3f} us",
            "issue (3)": f"{document['issue_us']:.3f} us",
            "backpressure (4)": f"{document['overhead_us']:.3f} us",
            "period (1, 2)": f"{document['period_us']:.3f} us",
            "median producer's period": f"{document['median_producer_period_us']:.3f} us",
            "recovery gap (5)": f"{document['recovery_gap_us']:.3f} us",
            "peak outstanding (6)": f"{document['peak_outstanding_bytes'] / MIB:.2f} MiB",
            "capacity": f"{document['capacity_bytes'] / MIB:.2f} MiB",
            "isolated issue (7)": f"{document['isolated_issue_us']:.3f} us",
            "rate bound (10)": "holds" if document["rate_bound_holds"] else "fails",
            "capacity bound (10)": "holds" if document["capacity_bound_holds"] else "fails",
        },
    )
    _print_notes(console, document["notes"])


def print_fit(result: FitReport, out: Path) -> None:
    console = _console()
    drain = result.drain
    console.print(
        f"Drain rate {drain.gbps:.1f} GB/s from {', '.join(str(count) for count in drain.used_producers)} producers "
        f"(residual {drain.residual_median:.1%} median, {drain.residual_p90:.1%} p90)."
    )
    for entry in result.capacity:
        console.print(
            f"Capacity at {entry.num_producers} producers {entry.capacity_bytes / MIB:.2f} MiB "
            f"({entry.points} bursts past the knee, spread {entry.spread:.1%})."
        )
    print_holdout(console, result.holdout)
    _print_notes(console, result.notes)
    console.print(f"wrote {out} and the samples beside it, {samples_path(out).name}")


def print_calibration(result: Calibration) -> None:
    """The fit, and what it is to be read against: plain copies, the link's raw rate, other topologies, fairness."""
    print_fit(result.report, result.out)
    console = _console()
    rate, copies = result.report.drain.gbps, result.document["copies"]
    for name, label in (("memcpy_peer", "a peer copy"), ("link_raw_gbps", "the raw link rate")):
        if copies.get(name):
            console.print(f"Drain rate is {rate / copies[name]:.1%} of {label}, {copies[name]:.1f} GB/s.")
    table = _table(console, "Saturated, each source: rate, and shares of the producers (1 = equal service)", "topology")
    for name in ("GB/s", "share min", "p10", "median", "p90", "max"):
        table.add_column(name, justify="right")
    for row in result.document["topologies"]:
        shares = [f"{row[f'share_{name}']:.2f}" for name in ("min", "p10", "median", "p90", "max")]
        table.add_row(row["topology"], f"{row['aggregate_gbps']:.1f}", *shares)
    console.print(table)
    fair = result.document["topologies"][0]
    slow, fast = 1 / fair["share_min"] - 1, 1 - 1 / fair["share_max"]
    console.print(
        f"A model of equal shares misses the slowest producer's period by {slow:.0%} and the fastest one's by {fast:.0%}; "
        "the aggregate law above does not assume them."
    )


def calibration_document(result: Calibration) -> dict[str, Any]:
    extra = {name: result.document[name] for name in ("meta", "copies", "topologies")}
    return fit_document(result.report, result.out) | extra


def print_diagnosis(diagnosis: Diagnosis) -> None:
    console, machine = _console(), diagnosis.machine
    if machine.cuda_version:
        version = ".".join(map(str, machine.cuda_version))
        console.print(f"driver {machine.driver_version or '(version not known)'}, serves CUDA {version}")
    if machine.gpus:
        table = _table(console, "", "GPU", "name", "arch", "SMs", "NVLinks", "reaches", "SM clock", "temperature", "in use by")
        for gpu in machine.gpus:
            reached = [str(peer.destination) for peer in machine.peers if peer.source == gpu.ordinal and peer.possible]
            links = "not known" if gpu.nvlink_count is None else str(gpu.nvlink_count)
            if gpu.nvlink_count and gpu.nvlink_mbps:
                links += f" x {gpu.nvlink_mbps / 1e3:.1f} GB/s"
            table.add_row(
                str(gpu.ordinal),
                gpu.name,
                gpu.arch,
                str(gpu.num_sms),
                links,
                ", ".join(reached) or "none",
                "not known" if gpu.sm_clock_mhz is None else f"{gpu.sm_clock_mhz} MHz",
                "not known" if gpu.temperature_c is None else f"{gpu.temperature_c} C",
                "not known" if gpu.compute_pids is None else ", ".join(map(str, gpu.compute_pids)) or "nobody",
            )
        console.print(table)
    if machine.nvml_reason:
        _print_notes(console, [machine.nvml_reason])
    table = _table(console, "Packages", "package", "version", "works", "for")
    table.add_column("why not", overflow="fold", ratio=1)
    for package in diagnosis.packages:
        works = "yes" if package.works else "no"
        table.add_row(package.name, package.version or "-", works, package.purpose, package.reason)
    console.print(table)
    console.print(f"\n{diagnosis.verdict}")


def print_overlay_status(document: dict[str, Any]) -> None:
    console = _console()
    table = _table(console, "Targets", "target", "arch", "installed")
    table.add_column("state", overflow="fold", ratio=1)
    for target in document["targets"]:
        table.add_row(target["target"], ", ".join(target["arch"]), target["installed_version"] or "-", target["verdict"])
    console.print(table)
    console.print(f"overlays are kept in {document['cache'] or 'no folder: there is no home directory'}")
    console.print(f"\n{document['verdict']}", style="bold")


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr with the time left; silent where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what[:60])


def print_holdout(console: Console, rows: Sequence[HoldoutError]) -> None:
    """The table of held-out errors."""
    law = rows[-1].period_law
    table = _table(console, f"Held-out gap sweep: |predicted / measured - 1| ({law} period)", "producers", "burst KiB", "gaps")
    for name in ("period median", "p90", "worst at gap us", "recovered median", "issue median", "p90 ", "own issue"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            "all" if row.num_producers is None else str(row.num_producers),
            "all" if row.burst_kib is None else f"{row.burst_kib:g}",
            str(row.points),
            f"{row.period_median:.1%}",
            f"{row.period_p90:.1%}",
            f"{row.worst_gap_us:g}",
            "--" if row.recovered_period_median is None else f"{row.recovered_period_median:.1%}",
            f"{row.issue_median:.1%}",
            f"{row.issue_p90:.1%}",
            f"{row.own_issue_median:.1%}",
        )
    console.print(table)


def print_platforms(models: Sequence[PlatformModel]) -> None:
    console = _console()
    table = _table(console, "Bundled platforms; floor and capacity at the largest measured producer count", "name", "store")
    for name in ("GB/s", "producers", "us at 32 KiB", "MiB", "knee KiB"):
        table.add_column(name, justify="right")
    table.add_column("source")
    for model in models:
        row = platform_summary(model)
        table.add_row(
            row["name"],
            row["store"],
            f"{row['drain_rate_gbps']:.0f}",
            str(row["producers"]),
            f"{row['issue_floor_us_at_32_kib']:.2f}",
            f"{row['capacity_mib']:.2f}",
            f"{row['knee_kib']:.1f}",
            row["drain_rate_source"],
        )
    console.print(table)
    _print_reasons(console, [(model.name, model.description) for model in models])


def print_shapes(shapes: Sequence[ExpertShape]) -> None:
    console = _console()
    table = _table(console, "Bundled expert shapes", "model", "name")
    for name in ("hidden", "intermediate", "experts", "topk"):
        table.add_column(name, justify="right")
    for shape in shapes:
        table.add_row(shape.key, shape.name, str(shape.hidden), str(shape.intermediate), str(shape.experts), str(shape.topk))
    console.print(table)
    console.print("Sources:")
    _print_reasons(console, [(shape.key, shape.source) for shape in shapes])


class _PlainConsole(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1; a reader that has seen enough is no fault


def _console() -> Console:
    """A console on stdout; a pipe gets a fixed width, so that its tables do not depend on where it runs."""
    return _PlainConsole(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False)


def _table(console: Console, title: str, *columns: str) -> Table:
    """An empty table; its title is printed at once, since rich would fold it to the table's width."""
    if title:
        console.print(f"\n{title}")
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _print_reasons(console: Console, reasons: Sequence[tuple[str, str]]) -> None:
    for name, reason in reasons:
        console.print(f"  {name}: {reason}")


def _print_facts(console: Console, facts: dict[str, str]) -> None:
    table = _table(console, "", "", "")
    table.show_header = False
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)


def _print_sources(console: Console, sources: dict[str, str], notes: Sequence[str]) -> None:
    for name, source in sources.items():
        console.print(f"  {name.replace('_', ' ')}: {source}", style="dim")
    _print_notes(console, notes)


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"note: {note}", style="yellow")


def _distinct(values: Any) -> list[str]:
    return list(dict.fromkeys(values))
