"""The command line of an A/B script: torchrun's ranks, the files it writes, its one-line complaints and its exit codes.

Exit code: 0 measured (however slow), 1 a wrong result or a measurement that broke off, 2 wrong input.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import harness
from harness import BenchError, Group

from xstage_plugin import env
from xstage_plugin.burst_gap.gpu_info import probe_machine
from xstage_plugin.checks import positive, positive_int, shown
from xstage_plugin.errors import InvalidInputError, XStageError

MOST_TRIALS = 100_000


def ranks_of(given: int | None) -> int:
    """Ranks of the plan: --ranks, else torchrun's, else 2."""
    started = env.torchrun_ranks()
    return positive_int("--ranks", given if given is not None else started if started > 1 else 2)


def check_run(trials: int, timeout_s: float, out: Path | None, plot: Path | None) -> None:
    """Refuse numbers and files that would fail only after the measurement.

    Raises:
        InvalidInputError: too few trials, no time to wait, or a file that cannot be written.
    """
    positive_int("--trials", trials, MOST_TRIALS)
    for path, suffix in ((out, ".json"), (plot, ".png")):
        if path is not None:
            harness.check_writable(path, suffix)
    if trials < harness.LEAST_TRIALS:
        raise InvalidInputError(f"--trials is {trials}; expected at least {harness.LEAST_TRIALS}")
    positive("--timeout-s", timeout_s)


def run_options(command: Callable[..., int]) -> Callable[..., int]:
    """The options that every script ends with: --ranks, --timeout-s, --out, --plot and --dry-run."""
    path, wait_s = click.Path(path_type=Path), harness.DEFAULT_TIMEOUT_S
    for option in (
        click.option("--dry-run", is_flag=True, help="Print the plan. Needs neither torch nor a GPU."),
        click.option("--plot", type=path, metavar="FILE.png", help="Draw the result file too."),
        click.option("--out", type=path, metavar="FILE.json", help="Result file."),
        click.option("--timeout-s", type=float, default=wait_s, show_default=True, help="Longest wait for a step."),
        click.option("--ranks", type=int, help="Of the plan, with --dry-run.  [default: torchrun's, or 2]"),
    ):
        command = option(command)
    return command


def measure_and_report(
    name: str,
    ranks: int,
    timeout_s: float,
    out: Path | None,
    plot: Path | None,
    run: Callable[[Group, Path, str], dict[str, Any]],
    show: Callable[[Mapping[str, Any]], None],
) -> int:
    """``run`` on the ranks that torchrun started, then the table, the fault and the picture of it; the exit code.

    Raises:
        InvalidInputError: other processes than the plan's ranks, or no file for the result.
    """
    out = ready_to_run(ranks, out)
    group = harness.GlooGroup(timeout_s)
    try:
        document = run(group, out, shown_command(name, ranks))
        if group.rank == 0:
            if document["cases"]:
                show(document)
            if document["error"]:
                _complain(name, document["error"])
            if plot and any(document["summary"].values()):
                harness.plot_speedups(out, plot)
    finally:
        group.close()
    return int(document["failed"])


def ready_to_run(ranks: int, out: Path | None) -> Path:
    """The result file, if torchrun started the plan's ranks.

    Raises:
        InvalidInputError: other processes than these, no file, or fewer GPUs here than ranks: said before anything is written.
    """
    started = env.torchrun_ranks()
    if started < 2 or ranks != started:
        wanted = f"torchrun --nproc-per-node={ranks}"
        were = "1 process was" if started == 1 else f"{started} processes were"
        raise InvalidInputError(f"{were} started for {ranks} ranks; start with {wanted}, or give --dry-run")
    if out is None:
        raise InvalidInputError("--out is missing; expected a file for the result, or --dry-run")
    machine = probe_machine()
    local_ranks = env.torchrun_local_ranks()
    if local_ranks > len(machine.gpus):
        found = machine.reason or f"{len(machine.gpus)} are visible"
        raise InvalidInputError(f"the ranks need {local_ranks} GPUs on this machine: {found}; or give --dry-run")
    return out


def shown_command(name: str, ranks: int) -> str:
    """What was typed, without the folders of this machine."""
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return shlex.join(["torchrun", f"--nproc-per-node={ranks}", f"benchmarks/{name}.py", *words])


def words_of(text: str) -> list[str]:
    """The entries of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers_of(option: str, text: str, at_most: int) -> list[int]:
    """Whole numbers from 1 to ``at_most``, each once.

    Raises:
        InvalidInputError: anything else.
    """
    for part in words_of(text):
        # The length first: int() refuses texts of thousands of digits in words of its own.
        if not part.isdecimal() or len(part) > len(str(at_most)) or not 1 <= int(part) <= at_most:
            raise InvalidInputError(f"{option} holds {shown(part)}; expected whole numbers from 1 to {at_most}")
    return list(dict.fromkeys(int(part) for part in words_of(text)))


def _complain(name: str, message: str) -> None:
    """One line on stderr; rank 0 says it for all."""
    if env.torchrun_rank() == 0:
        print(f"{name}: {message}", file=sys.stderr, flush=True)


def run_cli(cli: click.Command, name: str, args: Sequence[str] | None) -> int:
    """Run the command line; its exit code."""
    try:
        return int(cli.main(args=args, prog_name=f"{name}.py", standalone_mode=False) or 0)
    except click.ClickException as error:
        _complain(name, error.format_message())
        return 2
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BenchError as error:
        _complain(name, str(error))
        return 1
    except XStageError as error:
        _complain(name, str(error))
        return 2
