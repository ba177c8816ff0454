"""DeepGEMM's MegaMoE: the stock kernel against the overlay's, as expert wave and interleaved, with and without shared pulls.

    torchrun --nproc-per-node=2 benchmarks/ab_moe.py --out benchmarks/results/ab_moe_NODE.json --plot ab_moe.png

The run-time compiler reads its include root once, so each rank keeps one worker process per family (moe_worker.py), and one
family runs at a time. ``auto`` is what the product would choose on --platform; it is timed as the arm with its lead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import harness
import numpy as np
from harness import Arm, BenchError, Group, together
from script import check_run, measure_and_report, numbers_of, ranks_of, run_cli, run_options, words_of
from session import Session, measure_cases, new_document

from xstage_plugin import env
from xstage_plugin.burst_gap.catalog import load_platform
from xstage_plugin.burst_gap.gpu_info import probe_machine
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.checks import positive_int, shown
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe.advisor import ScheduleDecision, advise_moe
from xstage_plugin.moe.kernel_limits import kernel_refusal
from xstage_plugin.moe.routing import MOST_EXPERTS, Routing, balanced_routing, skewed_routing
from xstage_plugin.moe.schedule_choice import (
    AUTO,
    LARGEST_LEAD,
    SHARED_PULLS,
    STOCK_PULLS,
    ScheduleChoice,
    choose_schedule,
)
from xstage_plugin.moe.shapes import ExpertShape, bundled_shapes, load_shape
from xstage_plugin.moe.workload import MoeWorkload

NAME = "ab_moe"
DEFAULT_PLATFORM = "h200-nvlink-pair"
SMALL_SHAPES = ("2048,512,64,8", "2048,768,128,8", "4096,512,128,8", "4096,768,128,8", "4096,1024,128,8")
SWEEP = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of the lead's knee
# The untouched library in a process of its own, and in a second one: two processes may differ by themselves.
STOCK, CONTROL = Arm("stock", "stock"), Arm("stock again", "control")
WAVE, WAVE_SHARED = Arm("wave", "xstage", 0, STOCK_PULLS), Arm("wave, shared", "xstage", 0, SHARED_PULLS)
WORKER = (sys.executable, str(Path(__file__).with_name("moe_worker.py")))
SEED, MOST_TOKENS = 1, 2**20
# Every token stays on its rank: no byte crosses the link, which bounds what any order of the same tiles can gain.
LOCAL = "local"
ROUTINGS = {"balanced": ("balanced",), "skewed": ("skewed",), LOCAL: (LOCAL,), "both": ("balanced", "skewed")}


@dataclass(frozen=True)
class Case:
    """One cell of the table. ``choice`` is what the product's ``auto`` runs: it knows the shape and not the routing."""

    shape: ExpertShape
    tokens: int
    routing: Routing
    decision: ScheduleDecision
    choice: ScheduleChoice
    arms: tuple[Arm, ...]

    def shares_of(self, rank: int, ranks: int) -> list[float]:
        """Shares of the experts for the tokens of one rank: the routing's, or under ``local`` those of its own experts."""
        shares = np.array(self.routing.shares)
        if self.routing.label == LOCAL:
            local = np.zeros_like(shares).reshape(ranks, -1)
            local[rank] = shares.reshape(ranks, -1)[rank]
            shares = local.reshape(-1) / local.sum()
        return [float(share) for share in shares]

    @property
    def name(self) -> str:
        shape = self.shape
        size = f"{shape.hidden}x{shape.intermediate} E{shape.experts} K{shape.topk} T{self.tokens}"
        return f"{f'{shape.name} ' if shape.bundled else ''}{size} {self.routing.label.split()[0]}"

    @property
    def auto_arm(self) -> str:
        return next(arm.name for arm in self.arms if (arm.lead, arm.pulls) == (self.choice.lead_rows, self.choice.pulls))

    @property
    def order_arm(self) -> str:
        """What auto runs, with Dispatch as it was."""
        return next(arm.name for arm in self.arms if (arm.lead, arm.pulls) == (self.choice.lead_rows, STOCK_PULLS))


@dataclass(frozen=True)
class Plan:
    """What to run, and what not, with the reason."""

    platform: PlatformModel
    ranks: int
    trials: int
    cases: tuple[Case, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def steps(self) -> int:
        return sum(1 + len(case.arms) * (2 + self.trials) for case in self.cases)

    @property
    def families(self) -> tuple[str, ...]:
        """One worker process a rank for each."""
        return tuple(dict.fromkeys(arm.family for case in self.cases for arm in case.arms))


def make_plan(
    platform: PlatformModel,
    ranks: int,
    shapes: Sequence[ExpertShape],
    tokens: Sequence[int],
    routings: Sequence[str],
    leads: Sequence[str],
    trials: int,
    control: bool = False,
) -> Plan:
    """Every shape, token count and routing that the kernel takes, with its arms. Pure: the same on all ranks."""
    cases, skipped = [], []
    for shape in shapes:
        if reason := kernel_refusal(shape.hidden, shape.intermediate, shape.experts, shape.topk, ranks):
            skipped.append((shape.name, reason))
            continue
        for count in tokens:
            balanced = _workload(shape, ranks, count, balanced_routing(shape.experts))
            choice = choose_schedule(balanced, AUTO, AUTO, platform)
            for name in routings:
                routing = skewed_routing(shape.experts, shape.topk) if name == "skewed" else balanced_routing(shape.experts)
                if name == LOCAL:
                    if shape.topk > shape.experts // ranks:
                        skipped.append((shape.name, f"topk {shape.topk} is above the experts of one rank: not local"))
                        continue
                    routing = replace(routing, label=LOCAL)
                decision = advise_moe(platform, _workload(shape, ranks, count, routing))
                cases.append(Case(shape, count, routing, decision, choice, _arms(decision, choice, leads, control)))
    return Plan(platform, ranks, trials, tuple(cases), tuple(skipped))


def _arms(decision: ScheduleDecision, choice: ScheduleChoice, leads: Sequence[str], control: bool) -> tuple[Arm, ...]:
    wanted = {choice.lead_rows}
    for lead in leads:
        if lead == "sweep":
            # A lead beyond the last row is the expert wave without waves: one of those is enough.
            wanted |= {min(max(1, round(part * decision.lead_knee_rows)), max(1, decision.load.rows)) for part in SWEEP}
        elif lead != AUTO:
            wanted.add(int(lead))
    shared = [Arm(f"lead {rows}, shared", "xstage", rows, SHARED_PULLS) for rows in sorted(wanted - {0})]
    order = [Arm(f"lead {rows}", "xstage", rows, STOCK_PULLS) for rows in (choice.lead_rows,) if rows]
    return (STOCK, *([CONTROL] if control else []), WAVE, WAVE_SHARED, *order, *shared)


def _workload(shape: ExpertShape, ranks: int, tokens: int, routing: Routing) -> MoeWorkload:
    return MoeWorkload(shape.hidden, shape.intermediate, shape.experts, shape.topk, ranks, tokens, routing)


def expected_pairs(case: Case, ranks: int) -> np.ndarray:
    """Routed tokens (ranks, experts): how many of each rank's go to each expert, as the routing's shares say."""
    shares = np.array([case.shares_of(rank, ranks) for rank in range(ranks)])
    return np.asarray(shares * case.tokens * case.shape.topk * case.routing.used)


def expected_tokens(case: Case, ranks: int) -> np.ndarray:
    """Tokens (ranks, ranks) of each rank that go to each rank at all, if experts were drawn with repetition."""
    shares = np.array([case.shares_of(rank, ranks) for rank in range(ranks)]).reshape(ranks, ranks, -1).sum(axis=2)
    return np.asarray(case.tokens * (1 - (1 - np.minimum(shares, 1)) ** (case.shape.topk * case.routing.used)))


def physical_floor(
    case: Case, pairs: np.ndarray, tokens: np.ndarray, platform: PlatformModel, rates: Mapping[str, Any]
) -> dict[str, Any]:
    """What no schedule beats: link, matrix and memory time of the rank with the most of each, microseconds.

    Link bytes of a GPU are all that leave it: Combine stores of its experts (bfloat16 rows) and its answers to Dispatch
    pulls (FP8 rows with a float scale per 128), each token once for a rank, however many of its experts want it. Memory
    bytes: the weights of its experts in use once, and the Combine reduction (topk rows in, one out). Rates: as measured
    beside the arms, and the platform's measured drain rate.

    Args:
        pairs: routed tokens (ranks, experts). tokens: those of each rank that go to each rank at all (ranks, ranks).
    """
    ranks, experts = pairs.shape
    hidden, intermediate = case.shape.hidden, case.shape.intermediate
    by_rank = pairs.reshape(ranks, ranks, experts // ranks).sum(axis=2)  # [of rank][at rank]
    kept = np.diag(by_rank)
    pulled = tokens.sum(axis=1) - np.diag(tokens)
    link = (by_rank.sum(axis=0) - kept) * 2 * hidden + pulled * (hidden + 4 * hidden / 128)
    operations = by_rank.sum(axis=0) * 6 * hidden * intermediate
    active = (pairs.sum(axis=0).reshape(ranks, -1) > 0).sum(axis=1)
    memory = active * 3 * hidden * intermediate + (by_rank.sum(axis=1) + case.tokens) * 2 * hidden
    parts: dict[str, Any] = {
        "link_bytes": float(link.max()),
        "matrix_operations": float(operations.max()),
        "memory_bytes": float(memory.max()),
        "link_us": float(platform.drain_us(link.max())),
        "matrix_us": float(operations.max() / rates["fp8_tflops"] / 1e6),
        "memory_us": float(memory.max() / rates["copy_gbps"] / 1e3) if rates["copy_gbps"] else None,
    }
    bounds = {name: parts[f"{name}_us"] for name in ("link", "matrix", "memory") if parts[f"{name}_us"] is not None}
    bound = max(bounds, key=lambda name: bounds[name])
    return {key: value if value is None else harness.rounded(value) for key, value in parts.items()} | {
        "floor_us": harness.rounded(bounds[bound]),
        "bound": bound,
    }


def datasheet_rates(platform: PlatformModel) -> dict[str, Any]:
    return {"fp8_tflops": platform.device.fp8_tflops, "copy_gbps": None, "source": "datasheet"}


class MoeSession(Session):
    """The workers of both families: the untouched library and the overlay's."""

    def start(self) -> dict[str, Any]:
        found = super().start()
        if any(answer["in_place"] for answer in found.values()):
            raise BenchError("the installed deep_gemm carries our change itself; the stock arm needs an untouched package")
        return found

    def rates(self) -> dict[str, Any]:
        """Matrix and copy rates, of the slowest rank each."""
        answers = self.each(STOCK, "rates")
        names = ("copy_gbps", "bf16_tflops", "fp8_tflops")
        least: dict[str, Any] = {
            name: min((answer[name] for answer in answers if answer[name]), default=None) for name in names
        }
        if least["fp8_tflops"] is None:
            return least | {"fp8_tflops": 2 * least["bf16_tflops"], "source": "measured; FP8 taken as twice bfloat16"}
        return least | {"source": "measured: torch copy_, torch matmul, torch._scaled_mm; the best of 10"}


def run_case(session: MoeSession, plan: Plan, case: Case, rates: Mapping[str, Any], tick: harness.Tick) -> dict[str, Any]:
    """Check, time, check again; the document of one case."""
    shape = {name: getattr(case.shape, name) for name in ("hidden", "intermediate", "experts", "topk")}
    families = list({arm.family: arm for arm in case.arms}.values())
    shares = [case.shares_of(rank, plan.ranks) for rank in range(plan.ranks)]
    counts = session.all_families(families, "prepare", shape=shape, tokens=case.tokens, shares=shares, seed=SEED)
    tick(case.name)
    if any(count != counts[0] for count in counts):
        raise BenchError(f"{case.name}: the families drew different tokens; expected the same from one seed")
    pairs, tokens = (np.array([answer[name] for answer in counts[0]], dtype=float) for name in ("pairs", "tokens"))
    floor = physical_floor(case, pairs, tokens, plan.platform, rates)
    failures: dict[str, list[str]] = {arm.name: [] for arm in case.arms}
    reference: list[str] = []

    def check(when: str) -> None:
        for arm in case.arms:
            answers = session.each(arm, "check", lead=arm.lead, pulls=arm.pulls)
            digests = [answer["digest"] for answer in answers]
            reference[:] = reference or digests
            for rank, answer in enumerate(answers):
                if not answer["finite"]:
                    failures[arm.name].append(f"{when} timing, rank {rank}: y holds NaN or infinity")
                if answer["digest"] != reference[rank]:
                    failures[arm.name].append(f"{when} timing, rank {rank}: y differs from stock's")
            tick(case.name)

    check("before")
    samples = harness.alternate(case.arms, plan.trials, lambda arm: _timed(session, arm, case, tick))
    check("after")
    return _case_document(case, floor, samples, failures)


def _timed(session: MoeSession, arm: Arm, case: Case, tick: harness.Tick) -> float:
    tick(case.name)
    return float(max(session.each(arm, "run", lead=arm.lead, pulls=arm.pulls)))


def _case_document(
    case: Case, floor: Mapping[str, Any], samples: Mapping[str, list[float]], failures: Mapping[str, list[str]]
) -> dict[str, Any]:
    # Without a sound stock arm there is nothing to compare with.
    baseline = [] if failures[STOCK.name] else samples[STOCK.name]
    rows = [harness.arm_row(arm, samples[arm.name], baseline, floor["floor_us"], failures[arm.name]) for arm in case.arms]
    ours = {row["name"]: row for row in rows if row["family"] == "xstage" and "median_us" in row}
    best = min(ours, key=lambda name: float(ours[name]["median_us"]), default=None)
    auto = ours.get(case.auto_arm)
    regret = None if best is None or auto is None else harness.rounded(auto["median_us"] / ours[best]["median_us"] - 1)
    decision = case.decision
    return {
        "name": case.name,
        "hidden": case.shape.hidden,
        "intermediate": case.shape.intermediate,
        "experts": case.shape.experts,
        "topk": case.shape.topk,
        "tokens_per_rank": case.tokens,
        "routing": case.routing.label,
        "baseline": STOCK.name,
        "auto": {"word": case.choice.word, **asdict(case.choice), "schedule": case.choice.schedule},
        "advice_for_this_routing": {
            "schedule": decision.schedule,
            "lead": decision.lead_rows or 0,
            "lead_knee": decision.lead_knee_rows,
            "predicted_speedup": harness.rounded(decision.predicted_speedup),
            "reason": decision.reason,
            "sources": decision.sources,
        },
        "floor": dict(floor),
        "aa_difference": harness.rounded(harness.aa_difference(baseline)) if baseline else None,
        "auto_arm": case.auto_arm,
        "order_arm": case.order_arm,
        "best_arm": best,
        "auto_regret": regret,
        "failed": any(failures.values()),
        "arms": rows,
    }


def run(
    plan: Plan, group: Group, out: Path, command: str, timeout_s: float, commands: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """Measure ``plan`` and write ``out`` after every case. What broke it off is under ``error`` in the document."""
    machine = together(group, probe_machine)[0]
    settings = {
        "ranks": plan.ranks,
        "trials": plan.trials,
        "platform": plan.platform.name,
        "seed": SEED,
        "timeout_s": timeout_s,
    }
    document = new_document("ab_moe", command, machine, settings)
    document["skipped"] = [{"shape": name, "reason": reason} for name, reason in plan.skipped]
    session = MoeSession(group, commands or dict.fromkeys(plan.families, WORKER), timeout_s)
    rates: dict[str, Any] = {}

    def begin() -> Sequence[Case]:
        document["meta"]["libraries"] = session.start()
        rates.update(session.rates())
        document["meta"]["rates"] = rates | {"drain_gbps": plan.platform.drain_rate_gbps}
        return plan.cases

    def measure(case: Case, tick: harness.Tick) -> dict[str, Any]:
        return run_case(session, plan, case, rates, tick)

    measure_cases(session, document, out, plan.steps, begin, measure, summary)
    return document


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speedup over stock of some arms, of what auto runs, and of the best, over the cases in which it passed its checks."""
    names: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "stock again": lambda case: CONTROL.name,
        "wave": lambda case: WAVE.name,
        "order": lambda case: case["order_arm"],
        "auto": lambda case: case["auto_arm"],
        "best": lambda case: case["best_arm"],
    }
    return {
        key: harness.spread([row["speedup"] for case in cases if (row := _row(case, pick(case)))])
        for key, pick in names.items()
    }


def _row(case: Mapping[str, Any], name: str | None) -> dict[str, Any] | None:
    return next((row for row in case["arms"] if row["name"] == name and "speedup" in row), None)


def print_result(document: Mapping[str, Any]) -> None:
    rows, notes = [], []
    for case in document["cases"]:
        stock = _row(case, STOCK.name)
        middle = [_row(case, name) for name in (CONTROL.name, WAVE.name, case["order_arm"], WAVE_SHARED.name)]
        auto, best = _row(case, case["auto_arm"]), _row(case, case["best_arm"])
        cells = [case["name"], f"{stock['median_us'] / 1e3:.3f}" if stock else "--"]
        cells += [f"{row['speedup']:.3f}" if row else "--" for row in (*middle, auto, best)]
        cells += [case["auto_arm"], case["best_arm"] or "--"]
        cells += [f"{value:.1%}" if value is not None else "--" for value in (case["auto_regret"], case["aa_difference"])]
        cells += [f"{stock['drift']:+.1%}" if stock else "--", auto["verdict"] if auto else "FAILED"]
        cells += [
            f"{case['floor']['floor_us'] / 1e3:.3f} {case['floor']['bound']}",
            f"{auto['floor_ratio']:.2f}" if auto else "--",
        ]
        rows.append(cells)
        notes += [f"{case['name']}, {row['name']}: {text}" for row in case["arms"] for text in row["failures"]]
    notes += [f"{key}: {harness.spread_text(value)}" for key, value in document["summary"].items() if value]
    notes += [f"skipped {entry['shape']}: {entry['reason']}" for entry in document["skipped"]]
    columns = ("case", "stock ms", "again x", "wave x", "order x", "pulls x", "auto x", "best x", "auto runs", "best is")
    columns += ("regret", "A/A", "drift", "auto is")
    notes += [
        "again: stock in a second process; order: auto's order with Dispatch as it was; pulls: the wave with shared pulls"
    ]
    harness.print_table("MegaMoE: speedup over the stock kernel", (*columns, "floor ms", "auto/floor"), rows, notes)


def print_plan(plan: Plan, timeout_s: float) -> None:
    rates = datasheet_rates(plan.platform)
    rows, reasons = [], {}
    for case in plan.cases:
        counts = expected_pairs(case, plan.ranks), expected_tokens(case, plan.ranks)
        floor = physical_floor(case, *counts, plan.platform, rates)
        leads = ",".join(str(arm.lead) for arm in case.arms if arm.lead and arm.pulls == SHARED_PULLS)
        cells = [case.name, str(len(case.arms)), case.choice.schedule, str(case.choice.lead_rows or "--"), leads or "--"]
        cells += [f"{floor['link_bytes'] / 1e6:.0f}", f"{floor['link_us'] / 1e3:.3f}", f"{floor['matrix_us'] / 1e3:.3f}"]
        rows.append([*cells, f"{floor['memory_bytes'] / 1e6:.0f}", f"{case.decision.predicted_speedup:.3f}"])
        reasons[case.name.rsplit(" ", 1)[0]] = f"auto runs {case.choice.schedule}: {case.choice.reason}"
    notes = [f"{name}: {reason}" for name, reason in reasons.items()]
    notes += [f"skipped {name}: {reason}" for name, reason in plan.skipped]
    calls = sum(len(case.arms) for case in plan.cases) * plan.trials
    notes += [
        f"link rate {plan.platform.drain_rate_gbps:.0f} GB/s ({plan.platform.drain_rate_origin.source}); matrix rate "
        f"{rates['fp8_tflops']:g} TFLOP/s ({rates['source']}); a real run measures matrix and memory rates",
        f"each step is waited for {timeout_s:g} s at most",
    ]
    columns = ("case", "arms", "auto", "lead", "leads tried", "link MB", "link ms", "matrix ms", "memory MB", "predicted x")
    title = f"Plan: {len(plan.cases)} cases on {plan.ranks} ranks, {plan.trials} trials, {calls} timed calls"
    harness.print_table(f"{title}; platform {plan.platform.name}", columns, rows, notes)


# Input.


def parse_shapes(models: str | None, shapes: Sequence[str]) -> list[ExpertShape]:
    """The shapes of both options; with neither, every bundled model and the small shapes."""
    found = [shape for name in words_of(models or "") for shape in (bundled_shapes() if name == "all" else (load_shape(name),))]
    if models is None and not shapes:
        found, shapes = list(bundled_shapes()), SMALL_SHAPES
    for text in shapes:
        numbers = [int(part) if part.strip().isdecimal() and len(part) <= 12 else 0 for part in text.split(",")]
        if len(numbers) != 4 or 0 in numbers:
            raise InvalidInputError(f"--shapes is {shown(text)}; expected H,I,E,K: hidden, intermediate, experts, topk")
        hidden, intermediate, experts, topk = numbers
        name = f"{hidden}x{intermediate} E{experts} K{topk}"
        found.append(
            ExpertShape(name, name, hidden, intermediate, positive_int("experts", experts, MOST_EXPERTS), topk, "given")
        )
    return found


def parse_leads(text: str) -> list[str]:
    leads = words_of(text)
    for lead in leads:
        if lead not in (AUTO, "sweep") and not (lead.isdecimal() and len(lead) <= 5 and int(lead) <= LARGEST_LEAD):
            raise InvalidInputError(f"--leads holds {shown(lead)}; expected auto, sweep, or rows from 0 to {LARGEST_LEAD}")
    return leads


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--models", metavar="M,…", help="Bundled names (see `xstage models`), TOML files, or all.")
@click.option("--shapes", multiple=True, metavar="H,I,E,K", help="A shape of your own; may be given again.")
@click.option("--tokens", default="8192", show_default=True, metavar="T,…", help="Tokens that each rank brings.")
@click.option("--routing", type=click.Choice(list(ROUTINGS)), default="both", show_default=True)
@click.option("--leads", default="auto,sweep", show_default=True, metavar="L,…", help="auto, sweep, or rows.")
@click.option("--control/--no-control", default=True, show_default=True, help="Also time stock in a second process.")
@click.option("--trials", type=int, default=harness.DEFAULT_TRIALS, show_default=True, help="Timed calls of each arm.")
@click.option("--platform", help=f"Platform that auto decides by.  [default: $XSTAGE_PLATFORM or {DEFAULT_PLATFORM}]")
@run_options
def cli(
    models: str | None,
    shapes: tuple[str, ...],
    tokens: str,
    routing: str,
    leads: str,
    control: bool,
    trials: int,
    platform: str | None,
    ranks: int | None,
    timeout_s: float,
    out: Path | None,
    plot: Path | None,
    dry_run: bool,
) -> int:
    """A/B of DeepGEMM's MegaMoE: stock against the overlay's schedules and pulls, under torchrun on one host."""
    ranks = ranks_of(ranks)
    model = load_platform(platform or os.environ.get(env.PLATFORM) or DEFAULT_PLATFORM)
    if model.store != "st.v4":
        raise InvalidInputError(f"platform {model.name} was measured with {model.store} stores; MegaMoE scatters with st.v4")
    if model.device.arch != "sm_90":
        raise InvalidInputError(
            f"platform {model.name} is of {model.device.arch}; this script runs the SM90 kernel: give another"
        )
    check_run(trials, timeout_s, out, plot)
    routings = ROUTINGS[routing]
    counts = numbers_of("--tokens", tokens, MOST_TOKENS)
    wanted = list(dict.fromkeys(parse_shapes(models, shapes)))
    plan = make_plan(model, ranks, wanted, counts, routings, parse_leads(leads), trials, control)
    if not plan.cases:
        reason = "; ".join(f"{name}: {why}" for name, why in plan.skipped) or "no shape or no token count is given"
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
