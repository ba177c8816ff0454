"""Attention, its output exchange and the output projection, end to end: flags against barriers and serial exchanges.

    torchrun --nproc-per-node=2 benchmarks/ab_projection.py --out benchmarks/results/ab_projection_NODE.json

Arms, all over the same q, k, v and weight (projection_worker.py); the projection is square, of the model's width:

- attention, projection: the stock kernel as one would call it alone; the product of this rank's rows alone;
- attention as launched, arriving as launched, arriving as launched, flags: the fused launches into local memory, of the stock
  kernel, of the one that announces without counters, and with them: the last two differ by what flags cost;
- serial nccl, serial copy: attention, all_to_all_single and a permute or strided copies through the span, then the product;
- fused, barrier and arriving, barrier: tiles go straight to their owners, a closing barrier, then the product; with the stock
  kernel and with the one that announces, without counters;
- flags: no closing barrier. Kernel waits: attention's kernel ends when all rows of its rank are there, then the product; by
  owner: all heads of a destination before the next destination, otherwise head by head. N parts: the product of each part of
  the rows behind a wait for that part.

Speedups are over "fused, barrier". Samples, clocks and pace as in ab_ulysses.py.
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
    measure_plan,
    names_of,
    plan_of,
    sample_case,
    workload_options,
)
from clocked import median_mhz, timed_us
from harness import Arm, Group
from projection_figures import (
    ARMS,
    ARRIVING,
    ATTENTION,
    COPY,
    FLAGGED,
    FUSED,
    NCCL,
    PROJECTION,
    STREAMED,
    case_rows,
    flag_cost,
    floor_of,
    projection_operations,
)
from script import run_cli, run_options
from session import Session
from ulysses_figures import floor_document, operations

NAME = "ab_projection"
BACKENDS = ("fa3-arrival", "fa4-arrival")
WORKER = (sys.executable, str(Path(__file__).with_name("projection_worker.py")))
FAULTS = {
    "finite": "out holds NaN or infinity",
    "equal": f"out differs from {NCCL.name}'s",
    "projected": "the projection is off by more than twice bfloat16's own error",
    "counted": "the counters do not show every tile once a call",
}


def make_plan(*workloads: Any, sample_ms: float = SAMPLE_MS) -> Plan:
    """As :func:`attention_bench.plan_of`, whose arguments before ``sample_ms`` it takes, with this script's arms."""
    return plan_of(*workloads, sample_ms, ARMS)


def run_case(session: Session, plan: Plan, case: Case, bf16_tflops: float, tick: harness.Tick) -> dict[str, Any]:
    """Check, time, check again; the document of one case."""
    work = case.workload
    found = sample_case(session, plan, case, ATTENTION, NCCL, FAULTS, tick)
    samples, failures = found.samples, found.failures
    floor = floor_of(work, plan.platform, bf16_tflops)
    baseline = [timed_us(sample) for sample in samples[FUSED.name]] if not failures[FUSED.name] else []
    return {
        "name": case.name,
        "backend": case.backend,
        "seq_len": work.seq_len,
        "heads_per_rank": work.heads_per_rank,
        "head_dim": work.head_dim,
        "calls_per_sample": found.calls,
        "trials": len(samples[ATTENTION.name]),
        "baseline": FUSED.name if baseline else None,
        "floor": floor_document(floor),
        "flag_cost": flag_cost(samples, failures),
        "aa_difference": harness.rounded(harness.aa_difference(baseline)) if baseline else None,
        "sm_mhz": round(median_mhz(samples[ATTENTION.name])),
        "failed": any(failures.values()),
        "arms": case_rows(case.arms, samples, failures, floor.floor_us),
        "gpus_under_attention": found.loads,
    }


def run(plan: Plan, group: Group, out: Path, command: str, timeout_s: float, worker: Sequence[str] = WORKER) -> dict[str, Any]:
    """Measure ``plan`` and write ``out`` after every case. What broke it off is under ``error`` in the document."""
    difference = "at attention's median clock; median over A B B A pairs of trials of the arms' means"
    bench = AttentionBench(NAME, ATTENTION, tuple(worker), {"difference": difference}, {}, run_case, summary)
    return measure_plan(bench, plan, group, out, command, timeout_s)


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speedup over the fused path with a barrier, for each backend, as timed and at one clock."""
    found = {}
    for backend in dict.fromkeys(case["backend"] for case in cases):
        for arm in (ARRIVING, *STREAMED):
            rows = [row for case in cases if case["backend"] == backend and (row := _row(case, arm.name))]
            found[f"{backend} {arm.name}"] = harness.spread([row["speedup"] for row in rows])
            found[f"{backend} {arm.name}, at one clock"] = harness.spread([row["speedup_at_clock"] for row in rows])
    return found


def _row(case: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((row for row in case["arms"] if row["name"] == name and "speedup_at_clock" in row), None)


def print_result(document: Mapping[str, Any]) -> None:
    """Times of every arm; then what flags cost the kernel, and what they change end to end."""
    times, gains, notes = [], [], []
    timed = (ATTENTION, PROJECTION, NCCL, COPY, FUSED, ARRIVING, *STREAMED)
    for case in document["cases"]:
        found = {arm.name: _row(case, arm.name) for arm in (*timed, FLAGGED)}
        cells = [case["name"], *(_cell(found[arm.name], "median_us", ".1f") for arm in timed)]
        times.append([*cells, _cell(case, "aa_difference", ".1%")])
        cells = [case["name"], _cell(case["flag_cost"], "cost_us", "+.2f"), _cell(case["flag_cost"], "share", "+.2%")]
        cells += [_cell(found[ARRIVING.name], "speedup_at_clock", ".3f")]
        for row in (found[arm.name] for arm in STREAMED):
            cells.append(f"{_cell(row, 'speedup_at_clock', '.3f')} {_cell(row, 'over_fused_us', '+.1f')}")
        cells.append(max(_cell(found[arm.name], "over_serial", ".3f") for arm in STREAMED))
        gains.append([*cells, f"{case['floor']['floor_us']:.1f} {case['floor']['bound']}", str(case["sm_mhz"])])
        notes += [f"{case['name']}, {row['name']}: {text}" for row in case["arms"] for text in row["failures"]]
    spreads = {key: harness.spread_text(value) for key, value in document["summary"].items() if value}
    notes += [f"{key}, speedup over {FUSED.name}: {text}" for key, text in spreads.items()]
    notes += [f"skipped {entry['case']}: {entry['reason']}" for entry in document["skipped"]]
    title = "Attention, output exchange and output projection: microseconds a call"
    harness.print_table(title, ("case", *map(_short, timed), "A/A"), times)
    columns = ("case", "cost us", "share", "arriving x", *(f"{_short(arm)} x us" for arm in STREAMED))
    title = f'At one clock: what flags cost the kernel, and speedup and difference over "{FUSED.name}"'
    harness.print_table(title, (*columns, "best/serial", "floor us", "MHz"), gains, notes)


def _short(arm: Arm) -> str:
    return arm.name.removeprefix("serial ").replace("flags, kernel waits, ", "").removeprefix("flags, ")


def _cell(row: Mapping[str, Any] | None, key: str, form: str) -> str:
    value = row.get(key) if row else None
    return "--" if value is None else format(value, form)


def print_plan(plan: Plan, timeout_s: float) -> None:
    """What a run would do, with estimates in place of measured times."""
    rows, device = [], plan.platform.device
    rate = device.attention_flops_per_us_and_sm() * device.num_sms
    for case in plan.cases:
        calls, trials = plan.pace(case)
        floor = floor_of(case.workload, plan.platform, device.bf16_tflops)
        product_us = projection_operations(case.workload) / device.bf16_tflops / 1e6
        cells = [case.name, str(len(case.arms)), str(calls), str(trials), f"{operations(case.workload) / rate:.1f}"]
        rows.append([*cells, f"{product_us:.1f}", f"{floor.link_us:.1f}", f"{case.bytes_of_a_gpu / 1e9:.1f}"])
    notes = [f"skipped {name}: {reason}" for name, reason in plan.skipped]
    notes += [
        f"about {plan.estimate_s / 60:.0f} minutes; a kernel that is not installed is left out, with the reason",
        f"attention estimated at {device.attention_efficiency:.1%} of {device.bf16_tflops:g} TFLOP/s, projection at all",
        f"each step is waited for {timeout_s:g} s at most",
    ]
    title = f"Plan: {len(plan.cases)} cases on {plan.ranks} ranks, at most {plan.trials} trials; platform {plan.platform.name}"
    columns = ("case", "arms", "calls", "trials", "attention us", "projection us", "link us", "GB")
    harness.print_table(title, columns, rows, notes)


# Input.


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--backends", default=",".join(BACKENDS), show_default=True, metavar="B,…", help="Kernels that announce.")
@workload_options
@run_options
def cli(backends: str, **options: Any) -> int:
    """A/B of attention with its output exchange and output projection: flags, barriers, serial exchanges."""
    return carry_out(NAME, names_of("--backends", backends, BACKENDS), make_plan, print_plan, run, print_result, **options)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    return run_cli(cli, NAME, args)


if __name__ == "__main__":
    sys.exit(main())
