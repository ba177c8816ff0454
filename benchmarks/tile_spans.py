"""When output tiles of fused attention are issued, read and complete: what the residual of ab_ulysses.py is made of.

    torchrun --nproc-per-node=2 benchmarks/tile_spans.py --out tile_spans.json --plot tile_spans.png

flash-attn-4 with our storing role (fa4-arrival) stamps every tile's store: issued, shared memory free again, complete at its
destination. Every case runs with the tiles going to their owners, and once more into local memory at the same distances. What
is under way is held against the platform model's capacity.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import harness
import tile_span_figures as figures
from attention_bench import DEFAULT_PLATFORM, bulk_platform
from harness import Arm, BenchError, Group, together
from script import check_run, numbers_of, ranks_of, ready_to_run, run_cli, run_options, shown_command
from session import Session, new_document

from xstage_plugin import env
from xstage_plugin.attention.workload import AttentionWorkload
from xstage_plugin.burst_gap.gpu_info import probe_machine
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.checks import positive_int
from xstage_plugin.errors import InvalidInputError

NAME, FAMILY = "tile_spans", "spans"
WORKER = (sys.executable, str(Path(__file__).with_name("tile_span_worker.py")))
ARM = Arm("fa4-arrival", FAMILY)
MOST_LENGTH, MOST_HEADS, MOST_HEAD_DIM = 2**18, 64, 128


@dataclass(frozen=True)
class Case:
    """One workload and the order of its tiles."""

    workload: AttentionWorkload

    @property
    def name(self) -> str:
        work = self.workload
        return f"M{work.seq_len} h{work.heads_per_rank} d{work.head_dim} {'head by head' if work.head_by_head else 'by owner'}"


def make_cases(ranks: int, lengths: Sequence[int], heads: Sequence[int], head_dim: int) -> tuple[Case, ...]:
    """Both orders of every length and head count.

    Raises:
        InvalidInputError: a length that the ranks cannot share equally.
    """
    for length in lengths:
        if length % ranks:
            raise InvalidInputError(f"--lengths holds {length}; expected multiples of the {ranks} ranks")
    return tuple(
        Case(AttentionWorkload(length, count, head_dim, ranks, head_by_head=order))
        for length in lengths
        for count in heads
        for order in (True, False)
    )


def case_document(
    case: Case, platform: PlatformModel, delivered: Mapping[str, Any], local: Mapping[str, Any]
) -> dict[str, Any]:
    """Figures and spans of one case, of rank 0."""
    work = case.workload
    # One clock for both kinds of tiles: the first store of the kernel.
    both = {
        kind: figures.from_first([*found["remote"], *found["own"]])
        for kind, found in (("to owners", delivered), ("local", local))
    }
    count = len(delivered["remote"])
    spans = {"remote tiles": both["to owners"][:count], "own tiles": both["to owners"][count:]}
    spans["the remote tiles stored locally"] = both["local"][:count]
    waves = work.remote_tiles_of_waves(platform.device.num_sms)
    return {
        "name": case.name,
        "seq_len": work.seq_len,
        "heads_per_rank": work.heads_per_rank,
        "head_dim": work.head_dim,
        "head_by_head": work.head_by_head,
        "tile_bytes": work.tile_bytes,
        "remote_tiles_of_waves": waves,
        "capacity_bytes": float(platform.capacity_bytes(max(waves))),
        "figures": {name: figures.summary_of(part, work.tile_bytes) for name, part in spans.items()},
        "spans_us": {name: [harness.rounded(float(x)) for x in part.ravel()] for name, part in spans.items()},
    }


def run(
    cases: Sequence[Case],
    platform: PlatformModel,
    group: Group,
    out: Path,
    command: str,
    timeout_s: float,
    worker: Sequence[str],
) -> dict[str, Any]:
    """Stamp every case and write ``out`` after each. What broke it off is under ``error`` in the document."""
    machine = together(group, probe_machine)[0]
    document = new_document(NAME, command, machine, {"platform": platform.name, "timeout_s": timeout_s})
    document["schema"] = figures.SCHEMA
    session = Session(group, {FAMILY: worker}, timeout_s)

    def save() -> None:
        if group.rank == 0:
            harness.write_result(out, document)

    try:
        with harness.progress(len(cases), shown=group.rank == 0) as tick:
            session.start()
            refusals = session.each(ARM, "refusal", head_dim=cases[0].workload.head_dim)
            for rank, reason in enumerate(refusals):
                if reason:
                    raise BenchError(f"rank {rank}: {reason}")
            for case in cases:
                work = case.workload
                shape = {"seq_len": work.seq_len, "heads": work.heads_per_rank, "head_dim": work.head_dim}
                answers = [
                    session.each(ARM, "spans", head_by_head=work.head_by_head, local=local, **shape)[0]
                    for local in (False, True)
                ]
                document["cases"].append(case_document(case, platform, *answers))
                together(group, save)
                tick(case.name)
        document["complete"] = True
        session.close()
        together(group, save)
    except BenchError as error:
        document |= {"failed": True, "error": str(error)}
        session.kill()
        save()  # the group may be broken: no collective any more
    finally:
        session.kill()
    return document


def print_result(document: Mapping[str, Any]) -> None:
    """Quantiles of every case."""
    rows = [
        [
            case["name"],
            name,
            f"{found['tiles']}",
            *(f"{found[f'{what}_{level}_us']:.2f}" for what in ("smem_free", "complete") for level in ("median", "p90", "max")),
            f"{found['peak_under_way_bytes'] / 2**20:.2f}",
            f"{case['capacity_bytes'] / 2**20:.2f}",
        ]
        for case in document["cases"]
        for name, found in case["figures"].items()
    ]
    columns = ("case", "stores of", "tiles", "free us", "p90", "max", "complete us", "p90", "max", "peak MiB", "capacity MiB")
    harness.print_table("Output tiles of rank 0: from the store's issue on", columns, rows)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--lengths", default="8192,32768", show_default=True, metavar="M,…", help="Whole sequences.")
@click.option("--heads", default="4", show_default=True, metavar="h,…", help="Query heads of each rank.")
@click.option("--head-dim", type=int, default=128, show_default=True)
@click.option("--platform", help=f"Platform of the capacity.  [default: $XSTAGE_PLATFORM or {DEFAULT_PLATFORM}]")
@run_options
def cli(
    lengths: str,
    heads: str,
    head_dim: int,
    platform: str | None,
    ranks: int | None,
    timeout_s: float,
    out: Path | None,
    plot: Path | None,
    dry_run: bool,
) -> int:
    """When output tiles of fused attention are issued, read and complete."""
    ranks = ranks_of(ranks)
    model = bulk_platform(platform)
    check_run(harness.LEAST_TRIALS, timeout_s, out, plot)
    if positive_int("--head-dim", head_dim, MOST_HEAD_DIM) % 8:
        raise InvalidInputError(f"--head-dim is {head_dim}; expected a multiple of 8")
    cases = make_cases(ranks, numbers_of("--lengths", lengths, MOST_LENGTH), numbers_of("--heads", heads, MOST_HEADS), head_dim)
    if not cases:
        raise InvalidInputError("nothing to measure: no length or head count is given")
    if dry_run:
        if env.torchrun_rank() == 0:
            rows = [[case.name, str(case.workload.output_tiles), _waves_text(case, model)] for case in cases]
            harness.print_table(
                f"Plan: {len(cases)} cases on {ranks} ranks", ("case", "tiles", "remote tiles, wave by wave"), rows
            )
        return 0
    out = ready_to_run(ranks, out)
    group = harness.GlooGroup(timeout_s)
    try:
        document = run(cases, model, group, out, shown_command(NAME, ranks), timeout_s, WORKER)
        if group.rank == 0:
            if document["cases"]:
                print_result(document)
            if document["error"]:
                print(f"{NAME}: {document['error']}", file=sys.stderr, flush=True)
            if plot and document["cases"]:
                figures.draw(out, plot)
    finally:
        group.close()
    return int(document["failed"])


def _waves_text(case: Case, platform: PlatformModel) -> str:
    waves = case.workload.remote_tiles_of_waves(platform.device.num_sms)
    return ", ".join(map(str, waves[:8])) + (f", … ({len(waves)} waves)" if len(waves) > 8 else "")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    return run_cli(cli, NAME, args)


if __name__ == "__main__":
    sys.exit(main())
