"""Starts a script on several ranks from a test, and gives what each of them wrote as OUT.RANK.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOO = {"OMP_NUM_THREADS": "1", "XSTAGE_PLATFORM": "", "CUDA_VISIBLE_DEVICES": ""}
GPUS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "XSTAGE_PLATFORM": ""}


def answers_of_ranks(script, ranks, out, timeout_s, settings):
    """What ``script --out OUT`` wrote on each of ``ranks`` ranks; the test fails where one of them did."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [*command, str(script), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | settings | {"PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(ranks)]
