"""ab_projection.py without a GPU: the plan, the figures, the command line, and whole runs over fake workers."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import ab_projection  # noqa: E402
import harness  # noqa: E402
import projection_figures as figures  # noqa: E402
from clocked import Reading  # noqa: E402

from xstage_plugin.attention.workload import AttentionWorkload  # noqa: E402
from xstage_plugin.burst_gap.catalog import load_platform  # noqa: E402

PLATFORM = load_platform("h200-nvlink-pair-bulk")
TIMES = {"attention": 190.0, "attention as launched": 191.0, "arriving as launched": 192.0, "projection": 20.0}
TIMES |= {"arriving as launched, flags": 193.5, "serial nccl": 260.0, "serial copy": 240.0, "fused, barrier": 220.0}
TIMES |= {"arriving, barrier": 221.0, "flags, kernel waits": 218.0, "flags, 2 parts": 215.0, "flags, 4 parts": 219.0}
TIMES |= {"flags, kernel waits, by owner": 216.0}
FAKE = f"""
from fake_worker import FakeWorker, wish, work
class Fake(FakeWorker):
    def missing(self, backends, head_dim):
        return {{name: wish.get("missing", [{{}}, {{}}])[self.rank].get(name, "") for name in backends}}
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
        self.calls += name == "flags, 2 parts"
        found = dict.fromkeys(("finite", "equal", "projected", "counted"), True)
        rank, arm, fault = wish.get("fault", (None, None, None))
        if (rank, arm) == (self.rank, name) and self.calls > wish.get("after", 0):
            found[fault] = False
        return found
work(Fake())
"""


@pytest.fixture
def measure(fake_worker, on_two_ranks, tmp_path):
    """measure(timeout_s=..., **wish) -> (documents of both ranks, the result file)."""

    def call(timeout_s=20.0, **wish):
        plan = ab_projection.make_plan(PLATFORM, 2, ["fa3-arrival", "fa4-arrival"], [8192], [4], 128, 6)
        out, command = tmp_path / "result.json", fake_worker(FAKE, wish)
        documents = on_two_ranks(lambda group: ab_projection.run(plan, group, out, "command", timeout_s, command))
        return documents, json.loads(out.read_text())

    return call


def arms_of(case):
    return {row["name"]: row for row in case["arms"]}


def test_every_arm_has_a_time_in_this_test():
    assert {arm.name for arm in figures.ARMS} == set(TIMES)


def test_a_run_sets_flags_against_the_barrier_and_the_serial_exchanges(measure, capsys, tmp_path):
    documents, result = measure()
    assert documents[0]["cases"] == result["cases"]
    assert (result["complete"], result["failed"], result["error"]) == (True, False, None)
    case = result["cases"][0]
    rows = arms_of(case)
    assert list(rows) == [arm.name for arm in figures.ARMS]
    assert rows["attention"]["samples_us"] == [191.0] * 6  # the maximum over ranks
    assert case["baseline"] == "fused, barrier"
    flags = rows["flags, 2 parts"]
    assert (flags["speedup"], flags["verdict"]) == (pytest.approx(221 / 216, rel=1e-4), "faster")
    assert (flags["over_fused_us"], flags["over_fused_p10_us"], flags["over_fused_p90_us"]) == (-5, -5, -5)
    assert flags["over_serial"] == pytest.approx(240 / 215, rel=1e-4)
    assert rows["arriving, barrier"]["speedup_at_clock"] == pytest.approx(220 / 221, rel=1e-4)
    assert "over_serial" not in rows["projection"]
    assert "over_fused_us" not in rows["arriving, barrier"]
    assert case["flag_cost"]["cost_us"] == 1.5
    assert case["flag_cost"]["share"] == pytest.approx(1.5 / 192, rel=1e-3)
    assert case["floor"]["matrix_us"] > 4 * 8192**2 * 128 * 4 / 700e6
    ab_projection.print_result(result)
    out = capsys.readouterr().out
    assert "fa4-arrival flags, 2 parts, speedup over fused, barrier: geometric mean 1.023x" in out
    assert "+0.78%" in out
    harness.plot_speedups(tmp_path / "result.json", tmp_path / "plot.png")


def test_a_kernel_that_one_rank_lacks_is_left_out_on_all_with_the_reason(measure):
    documents, result = measure(missing=[{}, {"fa3-arrival": "no patched build"}])
    assert result["complete"]
    assert [case["backend"] for case in result["cases"]] == ["fa4-arrival"]
    assert {"case": "fa3-arrival", "reason": "rank 1: no patched build"} in documents[0]["skipped"]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("finite", "out holds NaN or infinity"),
        ("equal", "out differs from serial nccl's"),
        ("projected", "the projection is off by more than twice bfloat16's own error"),
        ("counted", "the counters do not show every tile once a call"),
    ],
)
@pytest.mark.parametrize(("calls", "when"), [(0, "before"), (1, "after")])
def test_a_wrong_arm_is_written_and_fails_the_run(measure, capsys, fault, text, calls, when):
    documents, result = measure(fault=[1, "flags, 2 parts", fault], after=calls)
    assert all(document["failed"] for document in documents)
    row = arms_of(result["cases"][0])["flags, 2 parts"]
    assert f"{when} timing, rank 1: {text}" in row["failures"]
    assert not {"speedup", "speedup_at_clock", "over_fused_us"} & row.keys()
    ab_projection.print_result(result)
    assert f"flags, 2 parts: {when} timing, rank 1: {text}" in capsys.readouterr().out


def test_without_a_baseline_there_is_no_speedup_and_without_a_sound_kernel_no_flag_cost(measure, capsys):
    _, result = measure(fault=[0, "fused, barrier", "equal"], after=-1)
    case = result["cases"][0]
    assert (case["baseline"], case["aa_difference"]) == (None, None)
    assert not any({"speedup", "speedup_at_clock", "over_fused_us"} & row.keys() for row in case["arms"])
    assert case["flag_cost"]["cost_us"] == 1.5
    ab_projection.print_result(result)
    assert "--" in capsys.readouterr().out
    _, result = measure(fault=[0, "arriving as launched, flags", "counted"], after=-1)
    assert result["cases"][0]["flag_cost"] is None


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ({"hang": [1, "run", "flags, 2 parts"]}, "rank 1, arm flags, 2 parts, run: no answer within 4 s; its worker was ended"),
        ({"die": [0, "prepare", None]}, "rank 0, arm attention, prepare: the worker ended by itself (exit code 7)"),
        (
            {"missing": [{"fa3-arrival": "x"}, {"fa4-arrival": "y"}]},
            "fa3-arrival cannot be used, rank 0: x; fa4-arrival cannot be used, rank 1: y",
        ),
    ],
)
def test_a_broken_run_ends_on_every_rank_with_one_line(measure, wish, error):
    documents, result = measure(timeout_s=4.0, **wish)
    for document in (*documents, result):
        assert document["error"].startswith(error)
        assert document["failed"]
        assert not document["complete"]


def test_differences_are_taken_at_one_clock_between_neighbours():
    # The arm with flags runs in fewer cycles, at a clock that falls all the time.
    def at(us, mhz):
        return [Reading(us * 1700 / mhz, mhz), Reading(us * 1700 / mhz + 1, mhz)]

    samples = {figures.ATTENTION.name: [at(190, 1700)] * 4}
    samples |= {
        figures.FUSED.name: [at(220, mhz) for mhz in (1700, 1650, 1600, 1550)],
        figures.FLAGS[2].name: [at(215, mhz) for mhz in (1690, 1640, 1590, 1540)],
    }
    arms = (figures.ATTENTION, figures.FUSED, figures.FLAGS[2])
    *_, row = figures.case_rows(arms, samples, {arm.name: [] for arm in arms}, 100.0)
    assert row["over_fused_us"] == pytest.approx(-5)
    assert row["speedup_at_clock"] == pytest.approx(220 / 215, rel=1e-4)


def test_the_projection_is_square_over_this_rank_s_rows():
    work = AttentionWorkload(8192, 4, 128, 2)
    assert figures.projection_operations(work) == 2 * 4096 * 1024**2
    floor = figures.floor_of(work, PLATFORM, 700.0)
    assert floor.matrix_us == pytest.approx((4 * 8192**2 * 128 * 4 + 2 * 4096 * 1024**2) / 700e6)


@pytest.mark.parametrize(("length", "reason"), [(8192, None), (8193, "8193 tokens are no multiple of the 2 ranks")])
def test_cases_that_cannot_be_compared_are_named(length, reason):
    plan = ab_projection.make_plan(PLATFORM, 2, ["fa4-arrival"], [length], [4], 128, 20)
    assert len(plan.cases) == (reason is None)
    assert all(reason in why for _, why in plan.skipped)


def test_dry_run_prints_the_plan_without_torch_and_gpus(tmp_path, script):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    run = script("ab_projection", "--dry-run", "--lengths", "8192,8193", PYTHONPATH=str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    assert "Plan: 6 cases on 2 ranks" in run.stdout
    assert "fa4-arrival M8192 h20 d128" in run.stdout
    assert "skipped fa3-arrival M8193 h4 d128: 8193 tokens are no multiple" in run.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--backends", "fa3"], "unknown entry of --backends 'fa3'; known: fa3-arrival, fa4-arrival"),
        (["--lengths", "4097"], "nothing to measure: fa3-arrival M4097 h4 d128: 4097 tokens"),
        (["--sample-ms", "0"], "--sample-ms is 0; expected"),
        (["--platform", "nowhere"], "unknown platform 'nowhere'"),
        (["--platform", "h200-nvlink-pair"], "measured with st.v4 stores; attention stores in bulk"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(args, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert ab_projection.main(["--dry-run", *args]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("ab_projection: ")
    assert (err.count("\n"), out) == (1, "")
