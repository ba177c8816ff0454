"""MegaMoE under every schedule gives the bits of the untouched library, on two GPUs. Needs DeepGEMM (sgl-deep-gemm 0.1.3)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("mega_moe_ranks.py")
TIMEOUT_S = 280

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="sgl-deep-gemm is not installed"),
]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mega_moe")
    results = {}
    for family in ("stock", "xstage"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(RANKS), "--family", family]
        run = subprocess.run(
            [*command, "--out", str(folder / f"{family}.json")],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=os.environ | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"},
        )
        assert run.returncode == 0, run.stderr[-3000:]
        results[family] = [json.loads((folder / f"{family}.{rank}.json").read_text()) for rank in range(2)]
    return results


def test_every_schedule_and_every_lead_gives_the_stock_kernels_bits(families):
    for stock, ours in zip(families["stock"], families["xstage"], strict=True):
        for case, digests in stock.items():
            arms = {name: value for name, value in ours[case].items() if name not in ("difference", "rounds")}
            assert set(arms.values()) == {digests["wave"]}, (case, arms)
            assert digests["wave, rank 1 late"] == digests["wave"]
            assert len(arms) > 28


def test_a_buffer_that_is_used_again_gives_the_new_inputs_bits(families):
    for stock, ours in zip(families["stock"], families["xstage"], strict=True):
        for case, digests in stock.items():
            assert ours[case]["rounds"] == digests["rounds"], case


def test_the_overlay_is_what_was_compiled(families):
    for ours in families["xstage"]:
        in_effect, compiled, detail = ours["proof"]
        assert in_effect is True, detail
        assert compiled is True, detail


def test_what_the_ranks_disagree_on_is_an_error_on_all_of_them_and_changes_nothing(families):
    first, second = (ours["faults"] for ours in families["xstage"])
    assert first == second
    assert "the ranks ask for leads of [5, 6]" in first["different leads"]
    assert "the ranks ask for leads of [0, 9]" in first["different schedules"]
    assert first["one rank asks for nonsense"].startswith("rank 1: lead is 0; expected")
    assert first["a lead of 0"].startswith("rank 0: lead is 0; expected")
    assert first["lead afterwards"] == "0"
    assert "is of sm_100 and this GPU of sm_90" in first["platform of another GPU"]
    assert first["one rank cannot run"].startswith("rank 1: l1_weights: '(4, 1024, 512) float8_e4m3fn'")
    assert first["hidden"] == "MegaMoE takes no such buffer: hidden 1088 is no multiple of 256"
    assert "DeepGEMM is set to 131 SMs" in first["odd SMs"]
    assert first["auto"] == "wave"  # 64 tokens a rank are too few to interleave
