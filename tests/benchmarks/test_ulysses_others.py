"""Another library's arm is run or refused on all ranks alike; flashinfer is a stand-in over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def on_ranks(installed):
    pytest.importorskip("torch", reason="torch is not installed: no gloo")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "benchmarks"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(installed)}"]
    run = subprocess.run(
        [*command, str(Path(__file__).with_name("ulysses_others_ranks.py")), json.dumps(installed)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_where_it_works_the_arm_brings_every_rank_its_rows_of_all_heads():
    assert on_ranks(["", ""]) == [{"refusal": "", "right": True, "left_open": 0}] * 2


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (["", None], "cannot be imported"),
        (["Ninja build failed.\nlong output", "Ninja build failed.\nlong output"], "Ninja build failed."),
    ],
    ids=["one rank has it not", "does not compile"],
)
def test_what_stops_it_is_one_line_and_the_same_on_every_rank(installed, reason):
    first, second = on_ranks(installed)
    assert first == second
    assert reason in first["refusal"]
    assert "\n" not in first["refusal"]
    assert first["left_open"] == 0
