"""ab_ulysses.py without a GPU: the plan, its pace, the figures, the command line, and whole runs over fake workers."""

import json
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import ab_ulysses  # noqa: E402
import attention_bench  # noqa: E402
import harness  # noqa: E402
import ulysses_figures as figures  # noqa: E402
from clocked import Reading  # noqa: E402

from xstage_plugin.attention.advisor import advise_attention  # noqa: E402
from xstage_plugin.attention.workload import AttentionWorkload  # noqa: E402
from xstage_plugin.burst_gap.catalog import load_platform  # noqa: E402

PLATFORM = load_platform("h200-nvlink-pair-bulk")
TIMES = {"attention": 190.0, "attention as launched": 191.0, "fused sender": 195.0, "fused": 200.0}
TIMES |= {"fused own first": 204.0, "fused by owner": 207.0, "serial nccl": 240.0, "serial copy": 215.0, "flashinfer": 212.0}
FAKE = f"""
from fake_worker import FakeWorker, wish, work
class Fake(FakeWorker):
    def missing(self, backends, others, head_dim):
        return {{name: wish.get("missing", [{{}}, {{}}])[self.rank].get(name, "") for name in (*backends, *others)}}
    def matrix_tflops(self):
        return 700.0 + self.rank
    def prepare(self, backend, arms, seed, seq_len, heads, head_dim):
        self.do("prepare", None)
        return {{"call_us": 190.0 + self.rank, "load": {{"power_w": 600 + self.rank}}}}
    def run(self, name):
        self.do("run", name)
        return {TIMES!r}[name] + self.rank, 1700.0
    def check(self, name, calls):
        self.do("check", name)
        self.calls += name == "fused"
        return {{"equal": not self.wrong(name), "finite": self.finite(name)}}
work(Fake())
"""


@pytest.fixture
def measure(fake_worker, on_two_ranks, tmp_path):
    """measure(timeout_s=..., others=..., **wish) -> (documents of both ranks, the result file)."""

    def call(timeout_s=20.0, others=(), **wish):
        plan = ab_ulysses.make_plan(PLATFORM, 2, ["fa3", "fa4"], [8192], [4], 128, 6, others)
        out, command = tmp_path / "result.json", fake_worker(FAKE, wish)
        documents = on_two_ranks(lambda group: ab_ulysses.run(plan, group, out, "command", timeout_s, command))
        return documents, json.loads(out.read_text())

    return call


def arms_of(case):
    return {row["name"]: row for row in case["arms"]}


def test_a_run_sets_every_arm_against_attention_and_the_best_serial_arm(measure, capsys, tmp_path):
    documents, result = measure()
    assert documents[0]["cases"] == result["cases"]
    assert (result["complete"], result["failed"], result["error"]) == (True, False, None)
    case = result["cases"][0]
    rows = arms_of(case)
    assert list(rows) == [name for name in TIMES if name != "flashinfer"]
    assert rows["attention"]["samples_us"] == [191.0] * 6  # the maximum over ranks
    assert (case["baseline"], rows["fused"]["verdict"]) == ("serial copy", "faster")
    assert rows["fused"]["speedup"] == pytest.approx(216 / 201, rel=1e-4)
    assert (rows["fused"]["residual_us"], rows["serial nccl"]["residual_us"]) == (10, 50)
    assert (rows["fused"]["hiding_nccl"], rows["fused"]["hiding_copy"]) == (0.8, 0.6)
    assert rows["fused sender"]["hiding_nccl"] == 0.9
    assert "residual_us" not in rows["attention"]
    assert rows["attention"]["at_clock_us"] == 190  # of the rank that waited least
    assert rows["fused"]["speedup_at_clock"] == pytest.approx(215 / 200, rel=1e-4)
    assert rows["fused"]["sm_mhz"] == [1700] * 6
    assert [state["power_w"] for state in case["gpus_under_attention"]] == [600, 601]
    assert case["attention_tflops"] == pytest.approx(4 * 8192**2 * 128 * 4 / 190 / 1e6, rel=1e-4)
    assert result["meta"]["rates"]["bf16_tflops"] == 700  # the slowest rank's
    assert case["floor"]["bound"] == "matrix"
    fused = [name for name in TIMES if name.startswith("fused")]
    assert set(result["summary"]) == {
        f"{b} {arm}{how}" for b in ("fa3", "fa4") for arm in fused for how in ("", ", at one clock")
    }
    ab_ulysses.print_result(result)
    out = capsys.readouterr().out
    assert "fa3 fused, speedup over the best serial arm: geometric mean 1.075x" in out
    assert "flashinfer" not in out
    harness.plot_speedups(tmp_path / "result.json", tmp_path / "plot.png")


def test_another_library_s_exchange_is_one_more_serial_arm(measure, capsys):
    _, result = measure(others=["flashinfer"])
    assert result["cases"][0]["baseline"] == "flashinfer"
    ab_ulysses.print_result(result)
    assert "flashinfer" in capsys.readouterr().out


def test_what_one_rank_lacks_is_left_out_on_all_with_the_reason(measure, capsys):
    missing = [{}, {"fa4": "no module named flash_attn", "flashinfer": "no nvcc"}]
    documents, result = measure(others=["flashinfer"], missing=missing)
    assert result["complete"]
    assert [case["backend"] for case in result["cases"]] == ["fa3"]
    assert "flashinfer" not in arms_of(result["cases"][0])
    assert {"case": "fa4", "reason": "rank 1: no module named flash_attn"} in documents[1]["skipped"]
    ab_ulysses.print_result(result)
    assert "skipped flashinfer: rank 1: no nvcc" in capsys.readouterr().out


@pytest.mark.parametrize(("calls", "when"), [(0, "before"), (1, "after")])
def test_a_mismatch_is_written_and_fails_the_run(measure, capsys, calls, when):
    documents, result = measure(wrong=[1, "fused"], after=calls)
    assert all(document["failed"] for document in documents)
    assert result["complete"]
    fused = arms_of(result["cases"][0])["fused"]
    assert f"{when} timing, rank 1: out differs from serial nccl's" in fused["failures"]
    assert "speedup" not in fused
    ab_ulysses.print_result(result)
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert f"fused: {when} timing, rank 1" in out


def test_without_attention_alone_there_is_no_residual_and_no_prediction(measure, capsys):
    _, result = measure(poisoned=[0, "attention"])
    case = result["cases"][0]
    assert result["failed"]
    assert (case["prediction"], case["attention_tflops"]) == (None, None)
    assert not any("residual_us" in row for row in case["arms"])
    assert arms_of(case)["fused"]["speedup"] > 1
    ab_ulysses.print_result(result)
    assert "attention: before timing, rank 0: out holds NaN or infinity" in capsys.readouterr().out


def test_a_serial_arm_that_failed_is_no_baseline(measure):
    _, result = measure(wrong=[0, "serial copy"])
    case = result["cases"][0]
    assert case["baseline"] == "serial nccl"
    assert arms_of(case)["fused"]["hiding_copy"] is None


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ({"hang": [1, "run", "fused"]}, "rank 1, arm fused, run: no answer within 4 s; its worker was ended"),
        ({"die": [0, "prepare", None]}, "rank 0, arm attention, prepare: the worker ended by itself (exit code 7)"),
        ({"missing": [{"fa3": "x"}, {"fa4": "y"}]}, "fa3 cannot be used, rank 0: x; fa4 cannot be used, rank 1: y"),
    ],
)
def test_a_broken_run_ends_on_every_rank_with_one_line(measure, wish, error):
    documents, result = measure(timeout_s=4.0, **wish)
    for document in (*documents, result):
        assert document["error"].startswith(error)
        assert document["failed"]
        assert not document["complete"]


@given(st.floats(1, 1e6), st.integers(1, 9), st.integers(4, 200))
def test_samples_last_3_ms_trials_come_in_pairs_and_long_cases_keep_six(call_us, arms, trials):
    calls, paced = attention_bench.pace(call_us, arms, trials)
    assert calls == 1 or (calls - 1) * call_us < 3000
    assert calls == attention_bench.MOST_CALLS or calls * call_us >= 3000
    assert paced % 2 == 0
    assert min(trials, 6) <= paced <= trials + 1
    assert paced <= 6 or paced * arms * calls * call_us <= attention_bench.CASE_BUDGET_US


def test_the_default_table_ends_within_8_minutes_on_two_gpus():
    lengths, heads = [4096, 8192, 16384, 32768, 65536], [4, 12, 20]
    plan = ab_ulysses.make_plan(PLATFORM, 2, ["fa3", "fa4"], lengths, heads, 128, 20, ["flashinfer"])
    assert (len(plan.cases), plan.skipped) == (30, ())
    assert plan.estimate_s < 8 * 60


@given(st.floats(-0.01, 0.01), st.integers(3, 10))
def test_a_drifting_clock_leaves_no_residual(slope, pairs):
    # Two arms of equal cost, run A B B A while the clock slows down steadily.
    clock = iter(range(10**6))
    arms = (figures.ATTENTION, figures.FUSED)
    samples = harness.alternate(arms, 2 * pairs, lambda arm: 100 + slope * next(clock))
    over = figures.paired_residuals_us(samples["fused"], samples["attention"])
    assert len(over) == pairs
    assert over == pytest.approx([0] * pairs, abs=1e-9)


@given(st.lists(st.floats(1200, 1900), min_size=12, max_size=12), st.floats(0, 100))
def test_a_wandering_clock_changes_no_figure_at_one_clock(clocks, cost_us):
    """Cycles are the arm's own; the other rank waits for the slower one."""
    arms = (figures.ATTENTION, figures.SENDER)
    wandering = iter(clocks)

    def measure(arm):
        cycles, mhz = 1.7e6 + 1500 * cost_us * (arm == figures.SENDER), next(wandering)
        return [Reading(cycles / mhz, mhz), Reading(cycles / mhz, 1.1 * mhz)]

    samples = harness.alternate(arms, 6, measure)
    rows, _ = figures.case_rows(arms, samples, {arm.name: [] for arm in arms}, 100.0)
    reference = statistics.median(reading.mhz for sample in samples["attention"] for reading in sample)
    assert rows[1]["residual_us"] == pytest.approx(1500 * cost_us / reference, rel=1e-4, abs=1e-6)


def test_the_prediction_is_the_advisor_s_with_sigma_from_the_measured_call():
    work = AttentionWorkload(8192, 4, 128, 2)
    # 256 output tiles are two waves of 132 SMs, 64 KV tiles each.
    assert figures.qloop_us_per_kv_tile(192.0, work, 132) == pytest.approx(192 / 128)
    found = figures.prediction(PLATFORM, work, 192.0)
    expected = advise_attention(PLATFORM, work, qloop_us_per_kv_tile=1.5)
    assert found["residual_us"] == pytest.approx(expected.residual_us, rel=1e-4)
    assert (found["min_seq_len"], found["reason"]) == (expected.min_seq_len, expected.reason)


def test_the_floor_is_the_slower_of_products_and_bytes_that_leave():
    work = AttentionWorkload(8192, 4, 128, 2)
    floor = figures.physical_floor(work, PLATFORM, 700.0)
    assert floor.matrix_us == pytest.approx(4 * 8192**2 * 128 * 4 / 700e6)
    assert floor.link_us == pytest.approx(8192 * 4 * 128 * 2 / 2 / 371.558e3, rel=1e-4)
    assert (floor.bound, floor.floor_us) == ("matrix", floor.matrix_us)
    short = figures.physical_floor(AttentionWorkload(256, 4, 128, 2), PLATFORM, 700.0)
    assert (short.bound, short.floor_us) == ("link", short.link_us)


@pytest.mark.parametrize(
    ("length", "heads", "head_dim", "ranks", "reason"),
    [
        (8192, 4, 128, 2, None),
        (8193, 4, 128, 2, "8193 tokens are no multiple of the 2 ranks"),
        (8192, 4, 100, 2, "head dimension 100 is no multiple of 8"),
        (2**20, 64, 128, 2, "are above 100 GB"),
    ],
)
def test_cases_that_cannot_be_compared_are_named(length, heads, head_dim, ranks, reason):
    plan = ab_ulysses.make_plan(PLATFORM, ranks, ["fa4"], [length], [heads], head_dim, 20)
    assert len(plan.cases) == (reason is None)
    assert all(reason in why for _, why in plan.skipped)


def test_dry_run_prints_the_plan_without_torch_and_gpus(tmp_path, script):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    run = script("ab_ulysses", "--dry-run", "--lengths", "8192,8193", PYTHONPATH=str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    assert "Plan: 6 cases on 2 ranks" in run.stdout
    assert "fa4 M8192 h20 d128" in run.stdout
    assert "skipped fa3 M8193 h4 d128: 8193 tokens are no multiple" in run.stdout
    assert "minutes" in run.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--backends", "fa2"], "unknown entry of --backends 'fa2'; did you mean fa4 or fa3?"),
        (["--others", "nvshmem"], "unknown entry of --others 'nvshmem'; known: flashinfer"),
        (["--lengths", "8k"], "--lengths holds '8k'; expected whole numbers from 1"),
        (["--heads", "0"], "--heads holds '0'; expected whole numbers from 1"),
        (["--head-dim", "300"], "--head-dim is 300; expected at most 256"),
        (["--lengths", ","], "nothing to measure: no backend, length or head count is given"),
        (["--lengths", "4097"], "nothing to measure: fa3 M4097 h4 d128: 4097 tokens"),
        (["--trials", "1"], "--trials is 1; expected at least 4"),
        (["--sample-ms", "0"], "--sample-ms is 0"),
        (["--platform", "h200-nvlink-pair"], "measured with st.v4 stores; attention stores in bulk"),
        (["--platform", "nowhere"], "unknown platform 'nowhere'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(args, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert ab_ulysses.main(["--dry-run", *args]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("ab_ulysses: ")
    assert (err.count("\n"), out) == (1, "")


def test_a_real_run_wants_torchrun(tmp_path, script):
    alone = script("ab_ulysses", "--out", str(tmp_path / "result.json"))
    assert (alone.returncode, alone.stderr.count("\n")) == (2, 1)
    assert "start with torchrun --nproc-per-node=2" in alone.stderr
