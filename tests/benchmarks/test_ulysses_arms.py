"""What ab_ulysses.py times is one computation: all arms over gloo ranks, shared memory in place of peer memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ARMS = {"attention", "attention as launched", "fused sender", "fused", "fused own first", "fused by owner"}
ARMS |= {"serial nccl", "serial copy"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_arm_fills_its_poisoned_output_with_the_same_rows(ranks):
    pytest.importorskip("torch", reason="torch is not installed: no gloo")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "benchmarks"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [*command, str(Path(__file__).with_name("ulysses_arms_ranks.py"))],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout)
    assert len(answers) == ranks
    for answer in answers:
        assert answer["right"]
        assert answer["equal"] == dict.fromkeys(ARMS, True)
