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

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import harness
from clocked import Reading, Sample, median_mhz, timed_us
from harness import Arm, BenchError, Group, together
from script import check_run, measure_and_report, numbers_of, ranks_of, run_cli, run_options, words_of
from session import Session, measure_cases, new_document
from ulysses_figures import (
    ATTENTION,
    BY_OWNER,
    COPY,
    FAMILY,
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

from xstage_plugin import env
from xstage_plugin.attention.workload import AttentionWorkload
from xstage_plugin.burst_gap.catalog import load_platform
from xstage_plugin.burst_gap.gpu_info import probe_machine
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.checks import positive, positive_int, unknown_name
from xstage_plugin.errors import InvalidInputError

NAME = "ab_ulysses"
DEFAULT_PLATFORM = "h200-nvlink-pair-bulk"
BACKENDS, OTHERS = ("fa3", "fa4"), {"flashinfer": FLASHINFER}
WORKER = (sys.executable, str(Path(__file__).with_name("ulysses_worker.py")))
SEED, MOST_LENGTH, MOST_HEADS, MOST_HEAD_DIM = 1, 2**20, 256, 256
SAMPLE_MS, MOST_CALLS = 3.0, 64  # short enough for a steady clock, long enough for the events' half microsecond
CASE_BUDGET_US, LEAST_LONG_TRIALS = 6e6, 6  # device time of one case, and its trials where that is not enough
MOST_CASE_BYTES = 100e9
# Of q's size on a GPU, beside one a rank for attention's local output: inputs, both orders, span, scratches, NCCL's, checks.
TENSORS_OF_A_CASE = 16
STEP_S, CASE_S = 0.012, 4.0  # for the estimate: a step's meeting and answer; mapping, compiling and capturing a case


@dataclass(frozen=True)
class Case:
    """One cell of the table: a backend and the workload of one rank."""

    backend: str
    workload: AttentionWorkload
    arms: tuple[Arm, ...]

    @property
    def name(self) -> str:
        work = self.workload
        return f"{self.backend} M{work.seq_len} h{work.heads_per_rank} d{work.head_dim}"

    @property
    def bytes_of_a_gpu(self) -> float:
        work = self.workload
        tensors = TENSORS_OF_A_CASE + work.ranks
        return tensors * work.seq_len * work.heads_per_rank * work.head_dim * work.output_bytes


@dataclass(frozen=True)
class Plan:
    """What to run, and what not, with the reason."""

    platform: PlatformModel
    ranks: int
    trials: int
    cases: tuple[Case, ...]
    skipped: tuple[tuple[str, str], ...]
    sample_ms: float = SAMPLE_MS

    @property
    def steps(self) -> int:
        """Of the progress bar: preparing, and every arm checked twice and timed."""
        return sum(1 + len(case.arms) * (2 + self.pace(case)[1]) for case in self.cases)

    @property
    def estimate_s(self) -> float:
        """How long the run will take, roughly."""
        seconds = 0.0
        for case in self.cases:
            calls, trials = self.pace(case)
            sample_s = calls * estimated_us(case, self.platform) / 1e6
            seconds += CASE_S + len(case.arms) * (trials + 2) * (sample_s + STEP_S)
        return seconds

    def pace(self, case: Case, call_us: float | None = None) -> tuple[int, int]:
        """Calls a sample and trials of ``case``, from the time of a call (estimated, if not given)."""
        call_us = estimated_us(case, self.platform) if call_us is None else call_us
        return pace(call_us, len(case.arms), self.trials, self.sample_ms)


def pace(call_us: float, arms: int, trials: int, sample_ms: float = SAMPLE_MS) -> tuple[int, int]:
    """Calls a sample and trials: samples of ``sample_ms``, and as many of the trials as the case's time allows, an even number.

    Trials come in A B B A pairs. A case too long for its share of the run keeps six of them.
    """
    calls = min(MOST_CALLS, math.ceil(1e3 * sample_ms / call_us))
    affordable = max(LEAST_LONG_TRIALS, int(CASE_BUDGET_US / (arms * calls * call_us)) // 2 * 2)
    return calls, min(trials + trials % 2, affordable)


def estimated_us(case: Case, platform: PlatformModel) -> float:
    """Attention alone, from operations at the platform's attention efficiency."""
    device = platform.device
    return operations(case.workload) / (device.attention_flops_per_us_and_sm() * device.num_sms)


def refusal(case: Case) -> str | None:
    """Why ``case`` cannot be compared fairly or at all, or None."""
    work = case.workload
    rules = (
        (work.seq_len % work.ranks == 0, f"{work.seq_len} tokens are no multiple of the {work.ranks} ranks"),
        (work.head_dim % 8 == 0, f"head dimension {work.head_dim} is no multiple of 8"),
        (
            case.bytes_of_a_gpu <= MOST_CASE_BYTES,
            f"its tensors of {case.bytes_of_a_gpu / 1e9:.0f} GB are above {MOST_CASE_BYTES / 1e9:.0f} GB",
        ),
    )
    return "; ".join(reason for sound, reason in rules if not sound) or None


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
    cases, skipped = [], []
    for backend in backends:
        for count in heads:
            for length in lengths:
                case = Case(backend, AttentionWorkload(length, count, head_dim, ranks), arms)
                if reason := refusal(case):
                    skipped.append((case.name, reason))
                else:
                    cases.append(case)
    return Plan(platform, ranks, trials, tuple(cases), tuple(skipped), sample_ms)


def runnable(plan: Plan, answers: Sequence[Mapping[str, str]]) -> tuple[list[Case], list[tuple[str, str]]]:
    """The cases whose backend, and their arms whose library, is there on every rank; what is not, with the first reason.

    ``answers``: for each rank, by name, why a backend or another library cannot be used; empty where it can.

    Raises:
        BenchError: no backend is left.
    """
    missing: dict[str, str] = {}
    for rank, answer in enumerate(answers):
        for name, reason in answer.items():
            if reason:
                missing.setdefault(name, f"rank {rank}: {reason}")
    cases = [
        Case(case.backend, case.workload, tuple(arm for arm in case.arms if arm.name not in missing))
        for case in plan.cases
        if case.backend not in missing
    ]
    if not cases:
        raise BenchError("; ".join(f"{name} cannot be used, {reason}" for name, reason in missing.items()))
    return cases, list(missing.items())


def run_case(session: Session, plan: Plan, case: Case, bf16_tflops: float, tick: harness.Tick) -> dict[str, Any]:
    """Check, time, check again; the document of one case."""
    work = case.workload
    shape = {"seq_len": work.seq_len, "heads": work.heads_per_rank, "head_dim": work.head_dim}
    names = [arm.name for arm in case.arms]
    prepared = session.each(ATTENTION, "prepare", backend=case.backend, arms=names, seed=SEED, **shape)
    calls, trials = plan.pace(case, max(answer["call_us"] for answer in prepared))
    tick(case.name)
    failures: dict[str, list[str]] = {name: [] for name in names}

    def check(when: str) -> None:
        # The reference comes first: every other arm's bytes are held against what it left.
        for arm in sorted(case.arms, key=lambda arm: arm != NCCL):
            answers = session.each(arm, "check", name=arm.name, calls=calls)
            for rank, answer in enumerate(answers):
                if not answer["finite"]:
                    failures[arm.name].append(f"{when} timing, rank {rank}: out holds NaN or infinity")
                if not answer["equal"]:
                    failures[arm.name].append(f"{when} timing, rank {rank}: out differs from {NCCL.name}'s")
            tick(case.name)

    def timed(arm: Arm) -> Sample:
        tick(case.name)
        return [Reading(us, mhz) for us, mhz in session.each(arm, "run", name=arm.name)]

    check("before")
    samples = harness.alternate(case.arms, trials, timed)
    check("after")
    document = _case_document(plan, case, calls, bf16_tflops, samples, failures)
    return document | {"gpus_under_attention": [answer["load"] for answer in prepared]}


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
    machine = together(group, probe_machine)[0]
    settings = {
        "ranks": plan.ranks,
        "trials": plan.trials,
        "platform": plan.platform.name,
        "seed": SEED,
        "sample_us": 1e3 * plan.sample_ms,
        "residual": "at attention's median clock; median over A B B A pairs of trials of an arm's mean less attention's",
        "timeout_s": timeout_s,
    }
    document = new_document(NAME, command, machine, settings)
    document["skipped"] = [{"case": name, "reason": reason} for name, reason in plan.skipped]
    session = Session(group, {FAMILY: worker}, timeout_s)

    def begin() -> list[Case]:
        session.start()
        first, others = plan.cases[0], [arm.name for arm in plan.cases[0].arms if arm in OTHERS.values()]
        backends = list(dict.fromkeys(case.backend for case in plan.cases))
        wanted = {"backends": backends, "others": others, "head_dim": first.workload.head_dim}
        cases, missing = runnable(plan, session.each(ATTENTION, "missing", **wanted))
        document["skipped"] += [{"case": name, "reason": reason} for name, reason in missing]
        least = min(session.each(ATTENTION, "matrix_tflops"))
        rates = {"bf16_tflops": least, "source": "measured: torch matmul; the best of 10, of the slowest rank"}
        document["meta"]["rates"] = rates | {"drain_gbps": plan.platform.drain_rate_gbps}
        return cases

    def measure(case: Case, tick: harness.Tick) -> dict[str, Any]:
        return run_case(session, plan, case, document["meta"]["rates"]["bf16_tflops"], tick)

    measure_cases(session, document, out, plan.steps, begin, measure, summary)
    return document


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


def names_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Entries of ``text``, each a known one."""
    for name in words_of(text):
        if name not in known:
            raise unknown_name(f"entry of {option}", name, known)
    return list(dict.fromkeys(words_of(text)))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--backends", default="fa3,fa4", show_default=True, metavar="B,…", help="fa3, fa4, or both.")
@click.option("--lengths", default="4096,8192,16384,32768,65536", show_default=True, metavar="M,…", help="Whole sequences.")
@click.option("--heads", default="4,12,20", show_default=True, metavar="h,…", help="Query heads of each rank.")
@click.option("--head-dim", type=int, default=128, show_default=True)
@click.option("--others", default="", metavar="O,…", help="Other libraries' exchanges as further arms: flashinfer.")
@click.option(
    "--trials", type=int, default=harness.DEFAULT_TRIALS, show_default=True, help="Samples of each arm, fewer where long."
)
@click.option(
    "--sample-ms",
    type=float,
    default=SAMPLE_MS,
    show_default=True,
    help="Least length of a sample. Above 100, what a GPU sustains at its power limit.",
)
@click.option("--platform", help=f"Platform of the predictions.  [default: $XSTAGE_PLATFORM or {DEFAULT_PLATFORM}]")
@run_options
def cli(
    backends: str,
    lengths: str,
    heads: str,
    head_dim: int,
    others: str,
    trials: int,
    sample_ms: float,
    platform: str | None,
    ranks: int | None,
    timeout_s: float,
    out: Path | None,
    plot: Path | None,
    dry_run: bool,
) -> int:
    """A/B of Ulysses attention: output stored to its owner by the kernel, against an exchange afterwards."""
    ranks = ranks_of(ranks)
    model = load_platform(platform or os.environ.get(env.PLATFORM) or DEFAULT_PLATFORM)
    if model.store != "bulk":
        raise InvalidInputError(f"platform {model.name} was measured with {model.store} stores; attention stores in bulk")
    check_run(trials, timeout_s, out, plot)
    plan = make_plan(
        model,
        ranks,
        names_of("--backends", backends, BACKENDS),
        numbers_of("--lengths", lengths, MOST_LENGTH),
        numbers_of("--heads", heads, MOST_HEADS),
        positive_int("--head-dim", head_dim, MOST_HEAD_DIM),
        trials,
        names_of("--others", others, list(OTHERS)),
        positive("--sample-ms", sample_ms),
    )
    if not plan.cases:
        reason = "; ".join(f"{name}: {why}" for name, why in plan.skipped) or "no backend, length or head count is given"
        raise InvalidInputError(f"nothing to measure: {reason}")
    if dry_run:
        if env.torchrun_rank() == 0:
            print_plan(plan, timeout_s)
        return 0

    def measured(group: Group, out: Path, command: str) -> dict[str, Any]:
        return run(plan, group, out, command, timeout_s)

    return measure_and_report(NAME, ranks, timeout_s, out, plot, measured, print_result)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    return run_cli(cli, NAME, args)


if __name__ == "__main__":
    sys.exit(main())
