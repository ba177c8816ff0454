"""What an A/B script does on all ranks together: start workers, ask them for steps, measure case after case."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import harness
from harness import Arm, BenchError, Group, Tick, Worker, together

from xstage_plugin.burst_gap.gpu_info import MachineInfo, probe_machine

T = TypeVar("T")
WORKER_ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


class Session:
    """This rank's workers. Every step is done by all ranks together, and its failure on one is raised on all."""

    def __init__(self, group: Group, commands: Mapping[str, Sequence[str]], timeout_s: float) -> None:
        self.group, self._commands, self._timeout_s = group, commands, timeout_s
        self._workers: dict[str, Worker] = {}

    def start(self) -> dict[str, Any]:
        """Start the workers of every family; what rank 0's say of themselves."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
        found = {}
        for family, command in self._commands.items():
            port = together(self.group, lambda: harness.free_port() if self.group.rank == 0 else 0)[0]

            def begin(family: str = family, command: Sequence[str] = command, port: int = port) -> Any:
                self._workers[family] = Worker(command, self.group.rank, WORKER_ENVIRONMENT | kept)
                numbers = {"rank": self.group.rank, "ranks": self.group.size, "local_rank": self.group.local_rank}
                return self._call(family, "start", family, family=family, port=port, timeout_s=self._timeout_s, **numbers)

            found[family] = together(self.group, begin)[0]
        return found

    def each(self, arm: Arm, step: str, **arguments: Any) -> list[Any]:
        """The answers of all ranks' workers of ``arm``'s family."""
        return together(self.group, lambda: self._call(arm.family, step, arm.name, **arguments))

    def all_families(self, arms: Sequence[Arm], step: str, **arguments: Any) -> list[list[Any]]:
        """The answers of all ranks, arm by arm, from workers that do the step side by side: compilers take most of its time."""

        def side_by_side() -> list[Any]:
            with ThreadPoolExecutor(len(arms)) as pool:
                answers = [pool.submit(self._call, arm.family, step, arm.name, **arguments) for arm in arms]
            return [answer.result() for answer in answers]

        return [list(answers) for answers in zip(*together(self.group, side_by_side), strict=True)]

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close(min(10.0, self._timeout_s))

    def kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def _call(self, family: str, step: str, arm: str, /, **arguments: Any) -> Any:
        return self._workers[family].call(step, self._timeout_s, arm, **arguments)


def new_document(benchmark: str, command: str, machine: MachineInfo, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A result file before its first case."""
    return {
        "schema": harness.SCHEMA,
        "benchmark": benchmark,
        "complete": False,
        "failed": False,
        "error": None,
        "meta": harness.provenance(command, machine, settings),
        "summary": {},
        "cases": [],
    }


def measure_cases(
    session: Session,
    document: dict[str, Any],
    out: Path,
    steps: int,
    begin: Callable[[], Sequence[T]],
    measure: Callable[[T, Tick], dict[str, Any]],
    summary: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]],
) -> None:
    """``measure`` every case that ``begin`` gives; ``out`` is written after each. What broke it off is under ``error``."""
    group = session.group

    def save() -> None:
        together(group, lambda: harness.write_result(out, document) if group.rank == 0 else None)

    try:
        with harness.progress(steps, shown=group.rank == 0) as tick:
            for case in begin():
                before = harness.gpu_states(probe_machine(), group.size)
                found = measure(case, tick)
                found |= {"gpus_before": before, "gpus_after": harness.gpu_states(probe_machine(), group.size)}
                document["cases"].append(found)
                document["failed"] |= found["failed"]
                document["summary"] = summary(document["cases"])
                save()
        document["complete"] = True
        session.close()
        save()
    except BenchError as error:
        document |= {"failed": True, "error": str(error)}
        session.kill()
        if group.rank == 0:  # the group may be broken: no collective any more
            harness.write_result(out, document)
    finally:
        session.kill()
