"""What the A/B scripts share: arms and their order, statistics, ranks, worker processes, result files, tables and pictures.

Counting: a sample is one timed call of one arm, microseconds, the maximum over ranks of CUDA event times. Arms alternate
A B B A within one run. A speedup is a ratio of medians; the A/A difference is what the same kernel shows against itself.
No torch here; a script runs what it measures in worker processes, because two builds of one library exclude each other.

    python benchmarks/harness.py RESULT.json PICTURE.png    draws a result file again
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from xstage_plugin import __version__, env
from xstage_plugin.burst_gap.gpu_info import MachineInfo
from xstage_plugin.errors import InvalidInputError, XStageError
from xstage_plugin.files import read_json, write_atomically
from xstage_plugin.provenance import package_versions, source_state

T = TypeVar("T")
SCHEMA = "xstage-ab/1"
LEAST_TRIALS, DEFAULT_TRIALS = 4, 20
DEFAULT_TIMEOUT_S = 120.0
MEASURED_PACKAGES = ("sgl-deep-gemm", "apache-tvm-ffi", "flash-attn-4", "fa3-fwd", "nvidia-cutlass-dsl", "nvidia-nccl-cu13")
Tick = Callable[[str], None]


class BenchError(XStageError):
    """A measurement cannot go on; the message names rank, arm and step. Raised on every rank."""


class LateError(BenchError):
    """A step did not answer in time: often only the echo of another rank's failure."""


@dataclass(frozen=True)
class Arm:
    """One of the things compared: ``family`` names the worker process that runs it, the rest is what it is told, if any."""

    name: str
    family: str
    lead: int | None = None
    pulls: str | None = None


def trial_order(arms: Sequence[Arm], trial: int) -> list[Arm]:
    """A B C, C B A, then the same from the next arm on: drift cancels within a pair, and no arm keeps its neighbours."""
    start = trial // 2 % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order if trial % 2 == 0 else order[::-1]


def alternate(arms: Sequence[Arm], trials: int, measure: Callable[[Arm], T]) -> dict[str, list[T]]:
    """``trials`` samples of every arm, in the order of :func:`trial_order`."""
    samples: dict[str, list[T]] = {arm.name: [] for arm in arms}
    for trial in range(trials):
        for arm in trial_order(arms, trial):
            samples[arm.name].append(measure(arm))
    return samples


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90, microseconds."""
    return {f"{name}_us": float(np.quantile(samples, level)) for name, level in (("median", 0.5), ("p10", 0.1), ("p90", 0.9))}


def aa_difference(samples: Sequence[float]) -> float:
    """Relative difference of the medians of the even and the odd trials of one arm: what no speedup below it can claim."""
    if len(samples) < 2:
        return math.inf
    even, odd = float(np.median(samples[::2])), float(np.median(samples[1::2]))
    return abs(even / odd - 1)


def drift(samples: Sequence[float]) -> float:
    """Median of the last quarter over that of the first, less 1."""
    quarter = max(1, len(samples) // 4)
    return float(np.median(samples[-quarter:]) / np.median(samples[:quarter])) - 1


def arm_row(
    arm: Arm, samples: Sequence[float], baseline: Sequence[float], floor_us: float, failures: Sequence[str]
) -> dict[str, Any]:
    """One arm of a case. An arm that failed a check keeps its samples and gets no figure: no number without a passing check."""
    row: dict[str, Any] = asdict(arm) | {"samples_us": [rounded(value) for value in samples], "failures": list(failures)}
    if failures or not samples or not baseline:
        return row
    numbers = quantiles(samples)
    speedup, aa = float(np.median(baseline)) / numbers["median_us"], aa_difference(baseline)
    verdict = "within A/A" if abs(speedup - 1) <= aa else "faster" if speedup > 1 else "slower"
    numbers |= {"drift": drift(samples), "speedup": speedup}
    numbers |= {"floor_ratio": numbers["median_us"] / floor_us} if floor_us > 0 else {}
    return row | {key: rounded(value) for key, value in numbers.items()} | {"verdict": verdict}


def spread(speedups: Sequence[float]) -> dict[str, float] | None:
    """Geometric mean, median, maximum and minimum over the cases; None without any."""
    if not speedups:
        return None
    mean = math.exp(float(np.mean(np.log(speedups))))
    values = {"geomean": mean, "median": float(np.median(speedups)), "max": max(speedups), "min": min(speedups)}
    return {key: rounded(value) for key, value in values.items()} | {"cases": len(speedups)}


def spread_text(value: Mapping[str, float]) -> str:
    """A :func:`spread` in words."""
    numbers = {"geometric mean": value["geomean"], "median": value["median"], "max": value["max"], "min": value["min"]}
    return ", ".join(f"{name} {number:.3f}x" for name, number in numbers.items()) + f" over {value['cases']} cases"


def rounded(value: float) -> float:
    """Five digits: below what any clock here resolves."""
    return float(f"{value:.5g}")


# Ranks.


class Group:
    """The processes that measure together; this one is of a single process."""

    rank, size, local_rank = 0, 1, 0

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, on every rank, in rank order."""
        return [value]

    def close(self) -> None:
        """Leave the group, when all are ready to."""


class GlooGroup(Group):
    """The processes that torchrun started on one host, over gloo: they never touch a GPU themselves."""

    def __init__(self, timeout_s: float) -> None:
        try:
            import torch.distributed as dist
        except ImportError as error:
            raise BenchError(f"cannot import torch ({error}); install the extra: pip install 'xstage-plugin[gpu]'") from None
        self._dist = dist
        self.rank, self.size, self.local_rank = env.torchrun_rank(), env.torchrun_ranks(), env.torchrun_local_rank()
        # A rank may wait for another's slowest step, and then for the ends of its workers.
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2 * timeout_s + 60))
        hosts = set(self.gather(socket.gethostname()))
        if len(hosts) > 1:
            raise BenchError(f"ranks run on {len(hosts)} hosts; expected one: peer memory is reached within a host")

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        try:
            self._dist.all_gather_object(values, value)
        except Exception as error:  # gloo's error for a peer that is gone is a bare RuntimeError
            raise BenchError(f"rank {self.rank}: another rank is gone or late ({one_line(error)[:120]})") from None
        return values

    def close(self) -> None:
        # torchrun ends all ranks as soon as one exits with an error: none may go while another still writes.
        with contextlib.suppress(BenchError):
            self.gather(None)
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def together(group: Group, step: Callable[[], T]) -> list[T]:
    """``step()`` on every rank: the values of all. If it fails on one, the same error on all; a cause goes before its echoes.

    Raises:
        BenchError: with the message of the rank that failed.
    """
    value, failure, late = None, "", False
    try:
        value = step()
    except Exception as error:  # every rank must hear of any failure, or it waits for a rank that has given up
        failure, late = (str(error) if isinstance(error, XStageError) else f"rank {group.rank}: {one_line(error)}"), False
        late = isinstance(error, LateError)
    answers = group.gather((value, failure, late))
    failures = sorted(((late, text) for _, text, late in answers if text), key=lambda entry: entry[0])
    if failures:
        raise BenchError(failures[0][1])
    return [value for value, _, _ in answers]


# Worker processes.


class Worker:
    """A process that answers one step at a time over a pipe. Every wait is bounded; one that is late is ended.

    ``command`` gets the number of the pipe's descriptor as its last argument and hands it to :func:`serve`.
    """

    def __init__(self, command: Sequence[str], rank: int, environment: Mapping[str, str] | None = None) -> None:
        self._rank = rank
        self._pipe, theirs = Pipe()
        try:
            # What the libraries print goes to stderr: stdout is for our tables.
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=environment,
            )
        except OSError as error:
            raise BenchError(f"rank {rank}: cannot start {command[0]}: {error.strerror or error}") from None
        finally:
            theirs.close()

    def call(self, step: str, timeout_s: float, arm: str, /, **arguments: Any) -> Any:
        """The worker's answer to ``step``.

        Raises:
            LateError: none within ``timeout_s``; the worker was ended.
            BenchError: the step failed there, or the process is gone.
        """
        where = f"rank {self._rank}, arm {arm}, {step}"
        try:
            self._pipe.send((step, arguments))
            if not self._pipe.poll(timeout_s):
                self.kill()
                raise LateError(f"{where}: no answer within {timeout_s:g} s; its worker was ended")
            sound, value = self._pipe.recv()
        except (EOFError, OSError):
            self.kill()
            raise BenchError(f"{where}: the worker ended by itself (exit code {self._process.returncode})") from None
        if not sound:
            raise BenchError(f"{where}: {value}")
        return value

    def close(self, timeout_s: float) -> None:
        """Ask it to end, and end it if it does not. Never raises."""
        with contextlib.suppress(BenchError):
            if self._process.poll() is None:
                self.call("close", timeout_s, "any")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        if self._process.poll() is None:
            # A worker that ended by itself has closed its pipe a moment before its exit code is there.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in the driver dies when that lets it
            self._process.wait(10)
        self._pipe.close()


def serve(handler: object, descriptor: int) -> None:
    """The worker's side: answer every step by the handler's method of that name, until ``close`` or the parent is gone."""
    pipe = Connection(descriptor)
    step = ""
    while step != "close":
        try:
            step, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(handler, step)(**arguments))
        except Exception as error:  # whatever it is, the parent reports it and decides
            if env.debug():
                traceback.print_exc()
            answer = (False, one_line(error))
        pipe.send(answer)


def free_port() -> int:
    """A TCP port that is free now on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


# Result files.


def provenance(command: str, before: MachineInfo, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a result rests on, as design/measurement asks for it. Clocks are kept beside each case."""
    gpu = before.gpus[0] if before.gpus else None
    linked = gpu is not None and gpu.nvlink_count and gpu.nvlink_mbps
    versions = {}
    for name in MEASURED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": f"{gpu.name} ({gpu.num_sms} SMs, {gpu.arch}, L2 {gpu.l2_bytes} bytes)" if gpu else f"none: {before.reason}",
        "link": f"{gpu.nvlink_count} NVLinks of {gpu.nvlink_mbps} MB/s" if gpu and linked else "not known",
        "driver": before.driver_version or "not known",
        "cuda": ".".join(str(part) for part in before.cuda_version or ()),
        "versions": {"xstage-plugin": __version__, "python": platform.python_version(), **package_versions(), **versions},
        "system": f"{platform.system()} {platform.release()}",
        **source_state(),
        "settings": dict(settings),
        "units": "us = microseconds, GB/s = 1e9 B/s; a sample is the maximum over ranks; speedup: baseline median over median",
    }


def gpu_states(machine: MachineInfo, count: int) -> list[dict[str, Any]]:
    """Clocks and temperature of the first ``count`` GPUs, now."""
    fields = ("ordinal", "sm_clock_mhz", "memory_clock_mhz", "temperature_c")
    return [{name: getattr(gpu, name) for name in fields} for gpu in machine.gpus[:count]]


def write_result(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` whole or not at all, one line per list of numbers.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    kept: list[str] = []

    def folded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: folded(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            if value and all(isinstance(entry, (int, float)) for entry in value):
                kept.append(json.dumps(list(value), allow_nan=False))
                return f"\0{len(kept) - 1}\0"
            return [folded(entry) for entry in value]
        return value

    text = json.dumps(folded(document), indent=1, allow_nan=False)
    for index, line in enumerate(kept):
        text = text.replace(f'"\\u0000{index}\\u0000"', line)
    write_atomically(path, f"{text}\n".encode())


def check_writable(path: Path, suffix: str) -> None:
    """Refuse, before anything is measured, a file that could not be written after it.

    Raises:
        InvalidInputError: another suffix, or no writable folder.
    """
    if path.suffix != suffix:
        raise InvalidInputError(f"{path}: expected a name that ends in {suffix}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidInputError(f"{path}: cannot be written: no such folder, or not writable; give another name")


# For people.


@contextlib.contextmanager
def progress(total: int, shown: bool) -> Iterator[Tick]:
    """A bar on stderr with the time left; where that is no terminal, a line every half minute. Call the yield once a step."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    begun = last = time.monotonic()
    done = 0
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("starting", total=total)

        def tick(what: str) -> None:
            nonlocal done, last
            done += 1
            bar.update(task, completed=done, description=what[:60])
            now = time.monotonic()
            if shown and not console.is_terminal and now - last > 30:
                left = (now - begun) / done * (total - done)
                print(f"{done}/{total} steps, about {left / 60:.0f} min left: {what}", file=sys.stderr, flush=True)
                last = now

        yield tick


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """A table on stdout; all but the first column to the right. A pipe gets a width that does not depend on where it runs."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    console.print(f"\n{title}")
    table = Table(header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(f"  {note}", soft_wrap=True)


def plot_speedups(result: Path, out: Path) -> None:
    """Speedup of every arm over the baseline, with the A/A difference as a band; from the result file and nothing else.

    Raises:
        InvalidInputError: no result file of this kind, one without figures, or ``out`` cannot be written.
    """
    from xstage_plugin.plots import COLOURS, save_figure  # matplotlib: workers start faster without it

    document = read_json(result, "a result of an A/B script")
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InvalidInputError(f"{result}: not a result of an A/B script; expected schema {SCHEMA!r}")
    cases = [
        (case, [row for row in case["arms"] if "speedup" in row and row["name"] != case["baseline"]])
        for case in document["cases"]
    ]
    cases = [(case, rows) for case, rows in cases if rows]
    if not cases:
        raise InvalidInputError(f"{result}: holds no arm with a speedup; nothing to draw")

    def draw() -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 1.5 + 0.24 * sum(len(rows) + 1 for _, rows in cases)), layout="constrained")
        axes = figure.subplots()
        at, ticks, labels = 0.0, [], []
        for case, rows in cases:
            aa = case["aa_difference"]
            axes.fill_betweenx([at - 0.6, at + len(rows) - 0.4], 1 - aa, 1 + aa, color="0.85", linewidth=0)
            for row in rows:
                colour = COLOURS[2] if row["name"] == case.get("auto_arm") else COLOURS[0]
                axes.barh(at, row["speedup"] - 1, left=1, height=0.8, color=colour)
                ticks.append(at)
                labels.append(f"{case['name']}  {row['name']}")
                at += 1
            at += 1
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(ticks, labels, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("speedup over the baseline (medians); grey: its A/A difference; green: what auto runs")
        axes.set_title(f"{document['benchmark']}: {document['meta']['gpu']}, {document['meta']['date']}", fontsize=9)
        return figure

    save_figure(draw, out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python benchmarks/harness.py RESULT.json PICTURE.png")
    try:
        plot_speedups(Path(sys.argv[1]), Path(sys.argv[2]))
    except XStageError as fault:
        print(f"harness: {fault}", file=sys.stderr)
        sys.exit(2)
