import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from harness import Group  # noqa: E402


class ThreadGroup(Group):
    """Ranks as threads of this process."""

    def __init__(self, rank, barrier, table):
        self.rank, self.local_rank, self.size = rank, rank, barrier.parties
        self.barrier, self.table = barrier, table

    def gather(self, value):
        self.table[self.rank] = value
        self.barrier.wait(30)
        values = list(self.table)
        self.barrier.wait(30)
        return values


@pytest.fixture
def on_two_ranks():
    """on_two_ranks(step) -> [step(group of rank 0), step(group of rank 1)]"""

    def call(step):
        barrier, table, answers = threading.Barrier(2), [None, None], [None, None]

        def rank(number):
            answers[number] = step(ThreadGroup(number, barrier, table))

        ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(60)
        return answers

    return call


@pytest.fixture
def fake_worker(tmp_path):
    """fake_worker(text, wish) -> the command of a worker with that text, which does as it is wished."""

    def call(text, wish):
        paths = f"import sys; sys.path[:0] = {[str(BENCHMARKS), str(Path(__file__).parent)]!r}"
        path = tmp_path / "fake.py"
        path.write_text(f"{paths}\n{text}")
        return [sys.executable, str(path), json.dumps(wish)]

    return call


@pytest.fixture
def script():
    """script("ab_moe", "--dry-run", ..., VARIABLE=value) -> the finished process."""

    def call(name, *args, **variables):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("XSTAGE_")} | variables
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    return call
