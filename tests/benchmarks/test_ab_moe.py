"""ab_moe.py without a GPU: the plan, the floors, the command line, and whole runs over fake workers in two ranks."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import ab_moe  # noqa: E402
import harness  # noqa: E402
import script as script_module  # noqa: E402

from xstage_plugin.burst_gap.catalog import load_platform  # noqa: E402
from xstage_plugin.burst_gap.gpu_info import MachineInfo  # noqa: E402

PLATFORM = load_platform("h200-nvlink-pair")
FAKE = """
from fake_worker import FakeWorker, wish, work
class Fake(FakeWorker):
    def start(self, **arguments):
        super().start(**arguments)
        return {"library_root": self.family, "in_place": self.family == wish.get("in_place")}
    def rates(self):
        return {"copy_gbps": 4000.0, "bf16_tflops": 700.0, "fp8_tflops": wish.get("fp8_tflops")}
    def prepare(self, shape, tokens, shares, seed):
        self.do("prepare", None)
        return {"pairs": [round(share * tokens * shape["topk"]) for share in shares[0]], "tokens": [tokens] * len(shares)}
    def run(self, lead, pulls):
        self.do("run", lead)
        return {None: 1000.0, 0: 1001.0}.get(lead, 800.0 + (lead or 0)) - 100 * (pulls == "shared") + self.rank
    def check(self, lead, pulls):
        self.do("check", lead)
        self.calls += 1
        return {"digest": "wrong" if self.wrong(lead) else f"y of rank {self.rank}", "finite": self.finite(lead)}
work(Fake())
"""


@pytest.fixture
def measure(fake_worker, on_two_ranks, tmp_path):
    """measure(timeout_s=..., **wish) -> (documents of both ranks, the result file)."""

    def call(timeout_s=20.0, routings=("balanced",), **wish):
        shapes = ab_moe.parse_shapes(None, ["4096,512,128,8"])
        plan = ab_moe.make_plan(PLATFORM, 2, shapes, [8192], routings, ["auto", "24"], 6, True)
        out, command = tmp_path / "result.json", fake_worker(FAKE, wish)
        commands = dict.fromkeys(plan.families, command)
        documents = on_two_ranks(lambda group: ab_moe.run(plan, group, out, "command", timeout_s, commands))
        return documents, json.loads(out.read_text())

    return call


def test_a_run_times_every_arm_and_judges_auto(measure, capsys, tmp_path):
    documents, result = measure(routings=("balanced", "skewed"))
    assert documents[0]["cases"] == result["cases"]
    assert (result["complete"], result["failed"], result["error"]) == (True, False, None)
    case = result["cases"][0]
    rows = {row["name"]: row for row in case["arms"]}
    assert list(rows) == ["stock", "stock again", "wave", "wave, shared", "lead 33", "lead 24, shared", "lead 33, shared"]
    assert all(len(row["samples_us"]) == 6 for row in rows.values())
    assert rows["stock"]["samples_us"] == [1001.0] * 6  # the maximum over ranks
    assert rows["lead 24, shared"]["speedup"] == pytest.approx(1001 / 725, rel=1e-4)
    assert (case["auto_arm"], case["order_arm"], case["best_arm"]) == ("lead 33, shared", "lead 33", "lead 24, shared")
    assert (case["auto"]["lead_rows"], case["auto"]["pulls"], case["auto"]["word"]) == (33, "shared", 33 + 65536)
    assert case["auto_regret"] == pytest.approx(734 / 725 - 1, rel=1e-3)
    assert case["floor"]["bound"] == "link"
    assert rows["stock"]["floor_ratio"] == pytest.approx(1001 / case["floor"]["floor_us"], rel=1e-3)
    assert result["meta"]["rates"]["fp8_tflops"] == 1400
    assert "twice bfloat16" in result["meta"]["rates"]["source"]
    assert result["summary"]["auto"]["cases"] == 2
    ab_moe.print_result(result)
    out = capsys.readouterr().out
    assert "auto: geometric mean 1.364x" in out
    assert "stock again: geometric mean 1.000x" in out
    harness.plot_speedups(tmp_path / "result.json", tmp_path / "plot.png")


@pytest.mark.parametrize(("calls", "when"), [(0, "before"), (3, "after")])
def test_a_mismatch_is_written_and_fails_the_run(measure, capsys, calls, when):
    documents, result = measure(wrong=[1, 24], after=calls)
    assert all(document["failed"] for document in documents)
    assert result["complete"]
    case = result["cases"][0]
    wrong = next(row for row in case["arms"] if row["name"] == "lead 24, shared")
    assert f"{when} timing, rank 1: y differs from stock's" in wrong["failures"]
    assert "speedup" not in wrong
    assert case["best_arm"] == "lead 33, shared"
    ab_moe.print_result(result)
    assert "lead 24, shared: " in capsys.readouterr().out


def test_poison_that_is_left_fails_every_figure_of_the_case(measure, capsys):
    _, result = measure(poisoned=[0, None])
    assert result["failed"]
    assert not any("speedup" in row for row in result["cases"][0]["arms"])
    ab_moe.print_result(result)
    assert "stock: before timing, rank 0: y holds NaN or infinity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ({"hang": [1, "run", 24]}, "rank 1, arm lead 24, shared, run: no answer within 4 s; its worker was ended"),
        ({"hang": [0, "prepare", None]}, "rank 0, arm stock, prepare: no answer within 4 s; its worker was ended"),
        ({"die": [1, "check", 0]}, "rank 1, arm wave, check: the worker ended by itself (exit code 7)"),
        ({"in_place": "xstage"}, "the installed deep_gemm carries our change itself"),
    ],
)
def test_a_broken_run_ends_on_every_rank_with_one_line(measure, wish, error):
    documents, result = measure(timeout_s=4.0, **wish)
    for document in (*documents, result):
        assert document["error"].startswith(error)
        assert "\n" not in document["error"]
        assert document["failed"]
        assert not document["complete"]


def shapes_of(*texts):
    return ab_moe.parse_shapes(None, texts)


def test_auto_is_what_the_product_would_run_and_is_timed_once():
    plan = ab_moe.make_plan(
        PLATFORM, 2, shapes_of("4096,512,128,8", "4096,2048,128,8"), [8192], ["skewed"], ["auto", "33", "0"], 20
    )
    fine, coarse = plan.cases
    assert [(arm.lead, arm.pulls) for arm in fine.arms[1:]] == [(0, "stock"), (0, "shared"), (33, "stock"), (33, "shared")]
    assert (fine.choice.lead_rows, fine.auto_arm, fine.order_arm) == (33, "lead 33, shared", "lead 33")
    assert (coarse.auto_arm, coarse.order_arm) == ("wave", "wave")
    assert plan.families == ("stock", "xstage")
    # The lead that was asked for is an arm of the coarse case too, with shared pulls.
    assert plan.steps == (1 + 5 * 22) + (1 + 4 * 22)


def test_a_control_is_the_untouched_library_in_a_process_of_its_own():
    plan = ab_moe.make_plan(PLATFORM, 2, shapes_of("4096,512,128,8"), [8192], ["balanced"], ["auto"], 20, control=True)
    assert plan.families == ("stock", "control", "xstage")
    assert plan.cases[0].arms[1].lead is None


def test_a_sweep_surrounds_the_knee_and_stays_within_the_rows():
    many, few = ab_moe.make_plan(PLATFORM, 2, shapes_of("4096,512,128,8"), [8192, 16], ["balanced"], ["sweep"], 20).cases
    assert [arm.lead for arm in many.arms if arm.pulls == "shared"] == [0, 8, 16, 25, 33, 50, 66, 99]
    assert max(arm.lead for arm in few.arms[1:]) <= few.decision.load.rows


RATES = {"fp8_tflops": 1000.0, "copy_gbps": 4000.0}


@pytest.fixture
def fine_case():
    return ab_moe.make_plan(PLATFORM, 2, shapes_of("4096,512,128,8"), [8192], ["balanced"], ["auto"], 20).cases[0]


def test_link_bytes_are_combine_stores_and_answers_to_dispatch_pulls_of_each_token_once(fine_case):
    pairs, tokens = ab_moe.expected_pairs(fine_case, 2), ab_moe.expected_tokens(fine_case, 2)
    assert (pairs.shape, tokens.shape) == ((2, 128), (2, 2))
    assert pairs.sum() == pytest.approx(2 * 8192 * 8)
    # With 8 experts a token, hardly one goes to a single rank of two.
    assert tokens == pytest.approx(8192 * (1 - 0.5**8))
    floor = ab_moe.physical_floor(fine_case, pairs, tokens, PLATFORM, RATES)
    stored, pulled = 8192 * 8 / 2, 8192 * (1 - 0.5**8)
    assert floor["link_bytes"] == pytest.approx(stored * 2 * 4096 + pulled * (4096 + 128), rel=1e-4)
    assert floor["matrix_operations"] == pytest.approx(8192 * 8 * 6 * 4096 * 512, rel=1e-4)
    assert floor["memory_bytes"] == pytest.approx(64 * 3 * 4096 * 512 + 8192 * 9 * 2 * 4096, rel=1e-4)
    assert floor["floor_us"] == max(floor["link_us"], floor["matrix_us"], floor["memory_us"])


def test_tokens_that_stay_cost_the_link_nothing(fine_case):
    pairs, tokens = np.zeros((2, 128)), np.diag([8192.0, 8192.0])
    pairs[0, :64] = pairs[1, 64:] = 1024
    assert ab_moe.physical_floor(fine_case, pairs, tokens, PLATFORM, RATES)["link_bytes"] == 0
    assert ab_moe.physical_floor(fine_case, pairs, tokens, PLATFORM, RATES | {"copy_gbps": None})["bound"] == "matrix"


def test_all_of_one_rank_s_experts_count_its_combine_stores(fine_case):
    pairs, tokens = np.zeros((2, 128)), np.array([[1000.0, 0.0], [1000.0, 0.0]])
    pairs[:, 0] = 1000
    floor = ab_moe.physical_floor(fine_case, pairs, tokens, PLATFORM, RATES)
    assert floor["link_bytes"] == pytest.approx(1000 * 2 * 4096, rel=1e-4)


def test_dry_run_prints_the_plan_without_torch_and_gpus(tmp_path, script):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    run = script("ab_moe", "--dry-run", PYTHONPATH=str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    assert "4096x512 E128 K8 T8192 balanced" in run.stdout
    assert "Hy3 4096x1536 E192 K8 T8192 skewed" in run.stdout
    assert "skipped DiT-MoE-G: hidden 1408" in run.stdout
    assert "auto runs interleaved: " in run.stdout


def test_a_dry_run_takes_what_a_run_takes(script):
    options = ["--models", "hy3,qwen3.5", "--shapes", "2048,512,64,8", "--tokens", "512,8192", "--routing", "skewed"]
    run = script("ab_moe", "--dry-run", *options, "--leads", "auto,24", "--trials", "40", "--ranks", "4")
    assert run.returncode == 0, run.stderr
    assert "Plan: 6 cases on 4 ranks, 40 trials" in run.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--models", "hy4"], "unknown model 'hy4'"),
        (["--shapes", "4096,512,128"], "--shapes is '4096,512,128'; expected H,I,E,K"),
        (["--shapes", "4096,512,4,8"], "topk is 8; expected at most the number of experts, 4"),
        (["--tokens", "-1"], "--tokens holds '-1'; expected whole numbers from 1"),
        (["--tokens", "8k"], "--tokens holds '8k'"),
        (["--tokens", ","], "nothing to measure"),
        (["--leads", "auto,fast"], "--leads holds 'fast'; expected auto, sweep, or rows"),
        (["--leads", "70000"], "--leads holds '70000'"),
        (["--routing", "odd"], "'odd' is not one of"),
        (["--trials", "1"], "--trials is 1; expected at least 4"),
        (["--timeout-s", "0"], "--timeout-s is 0"),
        (["--ranks", "0"], "--ranks is 0"),
        (["--ranks", "5", "--models", "hy3"], "192 experts are no multiple of the 5 ranks"),
        (["--platform", "paper-148sm"], "platform paper-148sm is of sm_100"),
        (["--platform", "nowhere"], "unknown platform 'nowhere'"),
        (["--fast"], "No such option"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(args, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert ab_moe.main(["--dry-run", *args]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("ab_moe: ")
    assert (err.count("\n"), out) == (1, "")


def test_a_real_run_wants_torchrun_and_a_file(tmp_path, capsys, monkeypatch, script):
    alone = script("ab_moe", "--out", str(tmp_path / "result.json"))
    assert (alone.returncode, alone.stderr.count("\n")) == (2, 1)
    assert "start with torchrun --nproc-per-node=2" in alone.stderr
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for args, message in (
        ([], "--out is missing"),
        (["--out", str(tmp_path / "no" / "a.json")], "cannot be written"),
        (["--out", str(tmp_path / "a.json"), "--plot", "a.txt"], "expected a name that ends in .png"),
        (["--out", str(tmp_path / "a.json"), "--ranks", "4"], "2 processes were started for 4 ranks"),
    ):
        assert ab_moe.main(args) == 2
        assert message in capsys.readouterr().err
    kept = tmp_path / "earlier.json"
    kept.write_text("{}")
    monkeypatch.setattr(script_module, "probe_machine", lambda: MachineInfo(reason="no driver"))
    assert ab_moe.main(["--out", str(kept)]) == 2
    assert "the ranks need 1 GPUs on this machine: no driver; or give --dry-run" in capsys.readouterr().err
    assert kept.read_text() == "{}"
    monkeypatch.setenv("RANK", "1")
    assert ab_moe.main([]) == 2
    assert capsys.readouterr().err == ""  # rank 0 says it for all
