"""What ab_projection.py times is one computation: all arms over gloo ranks, shared memory in place of peer memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ALONE = {"attention", "attention as launched", "arriving as launched", "arriving as launched, flags"}
COMPLETE = {"serial nccl", "serial copy", "fused, barrier", "arriving, barrier"}
COMPLETE |= {"flags, kernel waits", "flags, 2 parts", "flags, 4 parts", "flags, kernel waits, by owner"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_arm_fills_its_poisoned_outputs_with_the_same_rows_and_their_projection(ranks):
    pytest.importorskip("torch", reason="torch is not installed: no gloo")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "benchmarks"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [*command, str(Path(__file__).with_name("projection_arms_ranks.py"))],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout)
    assert len(answers) == ranks
    for answer in answers:
        assert answer.keys() == ALONE | COMPLETE | {"projection"}
        for name, found in answer.items():
            wanted = {"counted", "clear"} | ({"rows"} if name in ALONE | COMPLETE else set())
            wanted |= {"projected"} if name not in ALONE else set()
            assert found == dict.fromkeys(wanted, True), (name, found)
