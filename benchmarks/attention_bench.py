"""What the A/B scripts of attention share: cases and plans, their pace, the course of a case and of a run, the options.

Every case is a backend and the workload of one rank; attention alone is one of its arms, another one the bytes that all the
others are held against.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import harness
from clocked import Reading, Sample
from harness import Arm, BenchError, Group, together
from script import check_run, measure_and_report, numbers_of, ranks_of, words_of
from session import Session, measure_cases, new_document
from ulysses_figures import operations

from xstage_plugin import env
from xstage_plugin.attention.workload import AttentionWorkload
from xstage_plugin.burst_gap.catalog import load_platform
from xstage_plugin.burst_gap.gpu_info import probe_machine
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.checks import positive, positive_int, unknown_name
from xstage_plugin.errors import InvalidInputError

DEFAULT_PLATFORM = "h200-nvlink-pair-bulk"
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


def plan_of(
    platform: PlatformModel,
    ranks: int,
    backends: Sequence[str],
    lengths: Sequence[int],
    heads: Sequence[int],
    head_dim: int,
    trials: int,
    sample_ms: float,
    arms: tuple[Arm, ...],
) -> Plan:
    """``arms`` for every backend, length and head count that can be compared. Pure: the same on all ranks."""
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


@dataclass(frozen=True)
class Sampled:
    """What a case gave: calls of a sample, every arm's samples and failures, and each rank's GPU under attention."""

    calls: int
    samples: dict[str, list[Sample]]
    failures: dict[str, list[str]]
    loads: list[Any]


def sample_case(
    session: Session, plan: Plan, case: Case, alone: Arm, reference: Arm, faults: Mapping[str, str], tick: harness.Tick
) -> Sampled:
    """Prepare, check, time, check again.

    Args:
        alone: attention alone, which sets the pace.
        reference: its bytes are what every other arm's are held against, so its check comes first.
        faults: what it means where a worker's answer to a check is false, by name.
    """
    work = case.workload
    shape = {"seq_len": work.seq_len, "heads": work.heads_per_rank, "head_dim": work.head_dim}
    names = [arm.name for arm in case.arms]
    prepared = session.each(alone, "prepare", backend=case.backend, arms=names, seed=SEED, **shape)
    calls, trials = plan.pace(case, max(answer["call_us"] for answer in prepared))
    tick(case.name)
    failures: dict[str, list[str]] = {name: [] for name in names}

    def check(when: str) -> None:
        for arm in sorted(case.arms, key=lambda arm: arm != reference):
            for rank, answer in enumerate(session.each(arm, "check", name=arm.name, calls=calls)):
                failures[arm.name] += [f"{when} timing, rank {rank}: {text}" for key, text in faults.items() if not answer[key]]
            tick(case.name)

    def timed(arm: Arm) -> Sample:
        tick(case.name)
        return [Reading(us, mhz) for us, mhz in session.each(arm, "run", name=arm.name)]

    check("before")
    samples = harness.alternate(case.arms, trials, timed)
    check("after")
    return Sampled(calls, samples, failures, [answer["load"] for answer in prepared])


@dataclass(frozen=True)
class AttentionBench:
    """One of the scripts.

    Attributes:
        name: of the script.
        alone: its arm of attention alone.
        worker: command of the process on a GPU.
        settings: what its result file says beside what all of them say.
        wanted: for the worker's step ``missing``, beside the backends and the head dimension.
        run_case, summary: what it makes of a case, and of all cases.
    """

    name: str
    alone: Arm
    worker: tuple[str, ...]
    settings: Mapping[str, Any]
    wanted: Mapping[str, Any]
    run_case: Callable[[Session, Plan, Case, float, harness.Tick], dict[str, Any]]
    summary: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]


def measure_plan(bench: AttentionBench, plan: Plan, group: Group, out: Path, command: str, timeout_s: float) -> dict[str, Any]:
    """Measure ``plan`` and write ``out`` after every case. What broke it off is under ``error`` in the document."""
    machine = together(group, probe_machine)[0]
    settings = {
        "ranks": plan.ranks,
        "trials": plan.trials,
        "platform": plan.platform.name,
        "seed": SEED,
        "sample_us": 1e3 * plan.sample_ms,
        **bench.settings,
        "timeout_s": timeout_s,
    }
    document = new_document(bench.name, command, machine, settings)
    document["skipped"] = [{"case": name, "reason": reason} for name, reason in plan.skipped]
    session = Session(group, {bench.alone.family: bench.worker}, timeout_s)

    def begin() -> list[Case]:
        session.start()
        backends = list(dict.fromkeys(case.backend for case in plan.cases))
        wanted = {"backends": backends, "head_dim": plan.cases[0].workload.head_dim, **bench.wanted}
        cases, missing = runnable(plan, session.each(bench.alone, "missing", **wanted))
        document["skipped"] += [{"case": name, "reason": reason} for name, reason in missing]
        least = min(session.each(bench.alone, "matrix_tflops"))
        rates = {"bf16_tflops": least, "source": "measured: torch matmul; the best of 10, of the slowest rank"}
        document["meta"]["rates"] = rates | {"drain_gbps": plan.platform.drain_rate_gbps}
        return cases

    def measure(case: Case, tick: harness.Tick) -> dict[str, Any]:
        return bench.run_case(session, plan, case, document["meta"]["rates"]["bf16_tflops"], tick)

    measure_cases(session, document, out, plan.steps, begin, measure, bench.summary)
    return document


# Input.


def names_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Entries of ``text``, each a known one."""
    for name in words_of(text):
        if name not in known:
            raise unknown_name(f"entry of {option}", name, known)
    return list(dict.fromkeys(words_of(text)))


def workload_options(command: Callable[..., int]) -> Callable[..., int]:
    """The options of what is measured: lengths, heads, head dimension, trials, samples, platform."""
    lengths, samples = (
        "4096,8192,16384,32768,65536",
        "Least length of a sample. Above 100, what a GPU sustains at its power limit.",
    )
    platform = f"Platform of predictions and floors.  [default: $XSTAGE_PLATFORM or {DEFAULT_PLATFORM}]"
    trials = {"type": int, "default": harness.DEFAULT_TRIALS, "help": "Samples of each arm, fewer where long."}
    for option in (
        click.option("--platform", help=platform),
        click.option("--sample-ms", type=float, default=SAMPLE_MS, show_default=True, help=samples),
        click.option("--trials", show_default=True, **trials),
        click.option("--head-dim", type=int, default=128, show_default=True),
        click.option("--heads", default="4,12,20", show_default=True, metavar="h,…", help="Query heads of each rank."),
        click.option("--lengths", default=lengths, show_default=True, metavar="M,…", help="Whole sequences."),
    ):
        command = option(command)
    return command


def bulk_platform(name: str | None) -> PlatformModel:
    """The platform of this name, else the environment's, else the default one.

    Raises:
        InvalidInputError: unknown, or measured with other stores than attention's.
    """
    model = load_platform(name or os.environ.get(env.PLATFORM) or DEFAULT_PLATFORM)
    if model.store != "bulk":
        raise InvalidInputError(f"platform {model.name} was measured with {model.store} stores; attention stores in bulk")
    return model


def carry_out(
    name: str,
    backends: Sequence[str],
    make: Callable[..., Plan],
    show_plan: Callable[[Plan, float], None],
    run: Callable[[Plan, Group, Path, str, float], dict[str, Any]],
    show: Callable[[Mapping[str, Any]], None],
    *,
    lengths: str,
    heads: str,
    head_dim: int,
    trials: int,
    sample_ms: float,
    platform: str | None,
    ranks: int | None,
    timeout_s: float,
    out: Path | None,
    plot: Path | None,
    dry_run: bool,
) -> int:
    """Make the plan of the options, and show or measure it; the exit code.

    Raises:
        InvalidInputError: an option is wrong, or nothing is left to measure.
    """
    ranks = ranks_of(ranks)
    model = bulk_platform(platform)
    check_run(trials, timeout_s, out, plot)
    workloads = (
        numbers_of("--lengths", lengths, MOST_LENGTH),
        numbers_of("--heads", heads, MOST_HEADS),
        positive_int("--head-dim", head_dim, MOST_HEAD_DIM),
    )
    plan = make(model, ranks, backends, *workloads, trials, sample_ms=positive("--sample-ms", sample_ms))
    if not plan.cases:
        reason = "; ".join(f"{case}: {why}" for case, why in plan.skipped) or "no backend, length or head count is given"
        raise InvalidInputError(f"nothing to measure: {reason}")
    if dry_run:
        if env.torchrun_rank() == 0:
            show_plan(plan, timeout_s)
        return 0

    def measured(group: Group, out: Path, command: str) -> dict[str, Any]:
        return run(plan, group, out, command, timeout_s)

    return measure_and_report(name, ranks, timeout_s, out, plot, measured, show)
