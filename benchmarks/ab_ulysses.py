"""Ulysses attention: the output delivered by the kernel's own stores against attention and an exchange afterwards.

    torchrun --nproc-per-node=2 benchmarks/ab_ulysses.py --out benchmarks/results/ab_ulysses_NODE.json --plot ab_ulysses.png

Arms, all over the same q, k and v (ulysses_worker.py):

- attention: the kernel alone, as one would call it without other ranks;
- attention as launched: the fused kernel's launches, storing at the same distances into local memory;
- fused sender: tiles go straight to their owners, timed until this rank's kernel ends (the paper's sender-visible time);
- fused: with the closing barrier, so that every peer's rows have arrived (what a layer sees); head by head, and within a
  head the rank serves itself last;
- fused own first: the same, serving itself first;
- fused by owner: all heads of one destination before the next destination;
- serial nccl, serial copy, flashinfer: attention, then all_to_all_single and a permute, a strided copy through the span and
  a barrier, or UlyssesCommunicator.gather_heads (with --others flashinfer).

Speedups are over the fastest serial arm of the case. A sample is a CUDA graph of as many calls as last 3 ms (--sample-ms),
divided by their number. Every sample comes with the SM clock at which it ran: residuals, hiding ratios and "at one clock"
are at the median clock of attention alone, because long kernels run at the power limit, where the clock moves by a few
percent.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import harness
from attention_bench import (
    SAMPLE_MS,
    AttentionBench,
    Case,
    Plan,
    carry_out,
    estimated_us,
    measure_plan,
    names_of,
    plan_of,
    sample_case,
    workload_options,
)
from clocked import Sample, median_mhz, timed_us
from harness import Group
from script import run_cli, run_options
from session import Session
from ulysses_figures import (
    ATTENTION,
    BY_OWNER,
    COPY,
    FLASHINFER,
    FUSED,
    FUSED_ARMS,
    LAUNCHED,
    NCCL,
    OWN_FIRST,
    SENDER,
    auto_arm,
    case_rows,
    floor_document,
    operations,
    physical_floor,
    prediction,
)

from xstage_plugin.burst_gap.platform_model import PlatformModel

NAME = "ab_ulysses"
BACKENDS, OTHERS = ("fa3", "fa4"), {"flashinfer": FLASHINFER}
WORKER = (sys.executable, str(Path(__file__).with_name("ulysses_worker.py")))
FAULTS = {"finite": "out holds NaN or infinity", "equal": f"out differs from {NCCL.name}'s"}


def make_plan(
    platform: PlatformModel,
    ranks: int,
    backends: Sequence[str],
    lengths: Sequence[int],
    heads: Sequence[int],
    head_dim: int,
    trials: int,
    others: Sequence[str] = (),
    sample_ms: float = SAMPLE_MS,
) -> Plan:
    """Every backend, length and head count that can be compared. Pure: the same on all ranks."""
    arms = (ATTENTION, LAUNCHED, SENDER, FUSED, OWN_FIRST, BY_OWNER, NCCL, COPY, *(OTHERS[name] for name in others))
    return plan_of(platform, ranks, backends, lengths, heads, head_dim, trials, sample_ms, arms)


def run_case(session: Session, plan: Plan, case: Case, bf16_tflops: float, tick: harness.Tick) -> dict[str, Any]:
    """Check, time, check again; the document of one case."""
    found = sample_case(session, plan, case, ATTENTION, NCCL, FAULTS, tick)
    document = _case_document(plan, case, found.calls, bf16_tflops, found.samples, found.failures)
    return document | {"gpus_under_attention": found.loads}


def _case_document(
    plan: Plan,
    case: Case,
    calls: int,
    bf16_tflops: float,
    samples: Mapping[str, list[Sample]],
    failures: Mapping[str, list[str]],
) -> dict[str, Any]:
    work = case.workload
    floor = physical_floor(work, plan.platform, bf16_tflops)
    rows, best = case_rows(case.arms, samples, failures, floor.floor_us)
    alone = next((row["at_clock_us"] for row in rows if row["name"] == ATTENTION.name and "at_clock_us" in row), None)
    return {
        "name": case.name,
        "backend": case.backend,
        "seq_len": work.seq_len,
        "heads_per_rank": work.heads_per_rank,
        "head_dim": work.head_dim,
        "calls_per_sample": calls,
        "trials": len(samples[ATTENTION.name]),
        "baseline": best,
        "auto_arm": auto_arm(plan.platform, work),
        "floor": floor_document(floor),
        "attention_tflops": harness.rounded(operations(work) / alone / 1e6) if alone else None,
        "prediction": prediction(plan.platform, work, alone) if alone else None,
        "aa_difference": harness.rounded(harness.aa_difference([timed_us(sample) for sample in samples[best]]))
        if best
        else None,
        "sm_mhz": round(median_mhz(samples[ATTENTION.name])),
        "failed": any(failures.values()),
        "arms": rows,
    }


def run(plan: Plan, group: Group, out: Path, command: str, timeout_s: float, worker: Sequence[str] = WORKER) -> dict[str, Any]:
    """Measure ``plan`` and write ``out`` after every case. What broke it off is under ``error`` in the document."""
    residual = "at attention's median clock; median over A B B A pairs of trials of an arm's mean less attention's"
    others = [arm.name for arm in plan.cases[0].arms if arm in OTHERS.values()]
    bench = AttentionBench(NAME, ATTENTION, tuple(worker), {"residual": residual}, {"others": others}, run_case, summary)
    return measure_plan(bench, plan, group, out, command, timeout_s)


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speedup over the best serial arm, for each backend, over the cases in which both passed their checks."""
    found = {}
    for backend in dict.fromkeys(case["backend"] for case in cases):
        for arm in FUSED_ARMS:
            rows = [row for case in cases if case["backend"] == backend and (row := _row(case, arm.name))]
            found[f"{backend} {arm.name}"] = harness.spread([row["speedup"] for row in rows])
            level = [row["speedup_at_clock"] for row in rows if "speedup_at_clock" in row]
            found[f"{backend} {arm.name}, at one clock"] = harness.spread(level)
    return found


def _row(case: Mapping[str, Any], name: str | None) -> dict[str, Any] | None:
    return next((row for row in case["arms"] if row["name"] == name and "speedup" in row), None)


def print_result(document: Mapping[str, Any]) -> None:
    """Times of every arm, then what fusing costs over attention and how much of the exchange it hides."""
    others = [arm for arm in OTHERS.values() if any(_row(case, arm.name) for case in document["cases"])]
    timed = (ATTENTION, LAUNCHED, *FUSED_ARMS, NCCL, COPY, *others)
    times, costs, notes = [], [], []
    for case in document["cases"]:
        found = {arm.name: _row(case, arm.name) for arm in timed}
        sender, fused = found[SENDER.name], found[FUSED.name]
        cells = [case["name"], *(_cell(row, "median_us", ".1f") for row in found.values())]
        cells += [case["baseline"] or "--", _cell(fused, "speedup", ".3f"), _cell(case, "aa_difference", ".1%")]
        times.append([*cells, fused["verdict"] if fused else "FAILED", _cell(fused, "speedup_at_clock", ".3f")])
        cells = [case["name"], *(_cell(row, "residual_us", "+.1f") for row in (found[LAUNCHED.name], sender, fused))]
        cells += [_cell(case["prediction"], "residual_us", "+.1f")]
        cells += [_cell(row, key, ".2f") for row in (sender, fused) for key in ("hiding_nccl", "hiding_copy")]
        cells += [_cell(case, "attention_tflops", ".0f"), f"{case['floor']['floor_us']:.1f} {case['floor']['bound']}"]
        costs.append([*cells, _cell(found[ATTENTION.name], "floor_ratio", ".2f"), str(case["sm_mhz"])])
        notes += [f"{case['name']}, {row['name']}: {text}" for row in case["arms"] for text in row["failures"]]
    spreads = {key: harness.spread_text(value) for key, value in document["summary"].items() if value}
    notes += [f"{key}, speedup over the best serial arm: {text}" for key, text in spreads.items()]
    notes += [f"skipped {entry['case']}: {entry['reason']}" for entry in document["skipped"]]
    short = (arm.name.removeprefix("attention as ").removeprefix("fused ").removeprefix("serial ") for arm in timed)
    columns = ("case", *short, "best serial", "fused x", "A/A", "fused is", "at one clock x")
    harness.print_table("Ulysses attention with its output exchange: microseconds a call", columns, times)
    columns = ("case", "launched +us", "sender +us", "fused +us", "predicted +us")
    columns += ("sender/nccl", "sender/copy", "fused/nccl", "fused/copy", "TFLOP/s", "floor us", "attention/floor", "MHz")
    title = "At one clock over attention alone (+us), and the hidden part of what NCCL or the copy costs over it (equation 21)"
    harness.print_table(title, columns, costs, notes)


def _cell(row: Mapping[str, Any] | None, key: str, form: str) -> str:
    value = row.get(key) if row else None
    return "--" if value is None else format(value, form)


def print_plan(plan: Plan, timeout_s: float) -> None:
    """What a run would do, with estimates in place of measured times."""
    rows = []
    for case in plan.cases:
        call_us = estimated_us(case, plan.platform)
        floor = physical_floor(case.workload, plan.platform, plan.platform.device.bf16_tflops)
        expected = prediction(plan.platform, case.workload, call_us)
        calls, trials = plan.pace(case)
        cells = [case.name, str(len(case.arms)), str(calls), str(trials), f"{call_us:.1f}", f"{expected['residual_us']:+.1f}"]
        cells += [f"{expected['serial_exchange_us']:.1f}", auto_arm(plan.platform, case.workload)]
        rows.append([*cells, f"{floor.link_us:.1f}", f"{floor.matrix_us:.1f}", f"{case.bytes_of_a_gpu / 1e9:.1f}"])
    device = plan.platform.device
    notes = [f"skipped {name}: {reason}" for name, reason in plan.skipped]
    notes += [
        f"about {plan.estimate_s / 60:.0f} minutes; a backend or library that is not installed is left out, with the reason",
        f"attention estimated at {device.attention_efficiency:.1%} of {device.bf16_tflops:g} TFLOP/s; a real run measures it",
        f"each step is waited for {timeout_s:g} s at most",
    ]
    columns = (
        "case",
        "arms",
        "calls",
        "trials",
        "attention us",
        "pred +us",
        "exchange us",
        "auto runs",
        "link us",
        "matrix us",
        "GB",
    )
    title = f"Plan: {len(plan.cases)} cases on {plan.ranks} ranks, at most {plan.trials} trials; platform {plan.platform.name}"
    harness.print_table(title, columns, rows, notes)


# Input.


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--backends", default="fa3,fa4", show_default=True, metavar="B,…", help="fa3, fa4, or both.")
@click.option("--others", default="", metavar="O,…", help="Other libraries' exchanges as further arms: flashinfer.")
@workload_options
@run_options
def cli(backends: str, others: str, **options: Any) -> int:
    """A/B of Ulysses attention: output stored to its owner by the kernel, against an exchange afterwards."""
    further = names_of("--others", others, list(OTHERS))

    def plan(*workloads: Any, sample_ms: float) -> Plan:
        return make_plan(*workloads, further, sample_ms)

    return carry_out(NAME, names_of("--backends", backends, BACKENDS), plan, print_plan, run, print_result, **options)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    return run_cli(cli, NAME, args)


if __name__ == "__main__":
    sys.exit(main())
