"""The shared half of the A/B scripts: order, statistics, ranks that fail together, workers that hang or die, result files."""

import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import harness  # noqa: E402
from harness import Arm, BenchError, Group, LateError, Worker  # noqa: E402

from xstage_plugin.burst_gap.gpu_info import MachineInfo  # noqa: E402
from xstage_plugin.errors import InvalidInputError  # noqa: E402

SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from harness import serve
class Fake:
    def add(self, a, b): return a + b
    def hang(self): time.sleep(60)
    def die(self): os._exit(7)
    def fail(self): raise ValueError("no such thing\\nsecond line")
    def chat(self): print("to stdout"); return "said"
    def close(self): return None
serve(Fake(), int(sys.argv[-1]))
"""


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(SCRIPT)
    worker = Worker([sys.executable, str(script)], rank=3)
    yield worker
    worker.kill()


def arms(count):
    return [Arm(f"arm {index}", "family", index) for index in range(count)]


@given(st.integers(1, 12), st.integers(0, 40))
def test_a_pair_of_trials_is_a_palindrome_of_all_arms(count, pair):
    first, second = (harness.trial_order(arms(count), trial) for trial in (2 * pair, 2 * pair + 1))
    assert first == second[::-1]
    assert sorted(arm.name for arm in first) == sorted(arm.name for arm in arms(count))


def test_two_arms_run_a_b_b_a():
    order = []
    samples = harness.alternate(arms(2), 4, lambda arm: order.append(arm.lead) or float(len(order)))
    assert order == [0, 1, 1, 0, 1, 0, 0, 1]
    assert samples == {"arm 0": [1, 4, 6, 7], "arm 1": [2, 3, 5, 8]}


@given(st.integers(2, 9), st.floats(-0.01, 0.01))
def test_linear_drift_leaves_no_difference_between_arms(count, slope):
    clock = iter(range(10**6))
    samples = harness.alternate(arms(count), 4 * count, lambda arm: 100 * (1 + slope * next(clock) / (4 * count * count)))
    means = [sum(values) for values in samples.values()]
    assert max(means) / min(means) - 1 < 1e-9


def test_statistics():
    numbers = [float(value) for value in range(101)]
    assert harness.quantiles(numbers) == pytest.approx({"median_us": 50, "p10_us": 10, "p90_us": 90})
    assert harness.aa_difference([100, 110] * 10) == pytest.approx(1 / 11)
    assert harness.aa_difference([1.0]) == math.inf
    assert harness.drift([100.0] * 5 + [0.0] * 10 + [103.0] * 5) == pytest.approx(0.03)
    assert harness.spread([]) is None
    assert harness.spread([2.0, 0.5]) == {"geomean": 1.0, "median": 1.25, "max": 2.0, "min": 0.5, "cases": 2}


@pytest.mark.parametrize(
    ("time_us", "verdict"), [(100.0, "within A/A"), (104.0, "within A/A"), (80.0, "faster"), (120.0, "slower")]
)
def test_a_gain_is_one_only_beyond_the_aa_difference(time_us, verdict):
    row = harness.arm_row(Arm("ours", "xstage", 8), [time_us] * 20, [98.0, 103.0] * 10, 50.0, [])
    assert row["verdict"] == verdict
    assert row["speedup"] == pytest.approx(100.5 / time_us, rel=1e-4)
    assert row["floor_ratio"] == pytest.approx(time_us / 50, rel=1e-4)


def test_an_arm_that_failed_a_check_gets_no_figure():
    row = harness.arm_row(Arm("ours", "xstage", 8), [1.0] * 4, [2.0] * 4, 1.0, ["before timing, rank 0: y differs"])
    assert row["failures"]
    assert row["samples_us"] == [1.0] * 4
    assert not {"speedup", "median_us", "verdict"} & set(row)


def test_a_worker_answers_and_keeps_stdout_clean(worker, capfd):
    assert worker.call("add", 20, "stock", a=1, b=2) == 3
    assert worker.call("chat", 20, "stock") == "said"
    worker.close(20)
    assert "to stdout" not in capfd.readouterr().out


def test_an_error_of_a_worker_names_rank_arm_and_step_in_one_line(worker):
    with pytest.raises(BenchError, match=r"^rank 3, arm lead 8, fail: no such thing$"):
        worker.call("fail", 20, "lead 8")
    assert worker.call("add", 20, "lead 8", a=1, b=1) == 2


def test_a_worker_that_hangs_is_ended(worker):
    worker.call("add", 20, "stock", a=1, b=1)
    begun = time.monotonic()
    with pytest.raises(LateError, match=r"^rank 3, arm wave, hang: no answer within 0.3 s; its worker was ended$"):
        worker.call("hang", 0.3, "wave")
    assert time.monotonic() - begun < 10
    with pytest.raises(BenchError, match="ended by itself"):
        worker.call("add", 20, "wave", a=1, b=1)


def test_a_worker_that_dies_is_named_with_its_exit_code(worker):
    with pytest.raises(BenchError, match=r"^rank 3, arm wave, die: the worker ended by itself \(exit code 7\)$"):
        worker.call("die", 20, "wave")


def test_a_worker_that_cannot_start_is_an_error():
    with pytest.raises(BenchError, match="rank 0: cannot start /no/such/python"):
        Worker(["/no/such/python"], rank=0)


class Told(Group):
    """A group whose other rank says what the test wants."""

    size = 2

    def __init__(self, other):
        self.other = other

    def gather(self, value):
        return [value, self.other]


def test_a_failure_on_one_rank_is_raised_on_all():
    with pytest.raises(BenchError, match="rank 1, arm wave, run: broken"):
        harness.together(Told((None, "rank 1, arm wave, run: broken", False)), lambda: 5)
    with pytest.raises(BenchError, match="rank 0: ValueError"):
        harness.together(Told((5, "", False)), lambda: (_ for _ in ()).throw(ValueError()))
    assert harness.together(Told((7, "", False)), lambda: 5) == [5, 7]


def test_the_cause_goes_before_the_rank_that_only_waited_for_it():
    def late():
        raise LateError("rank 0, arm wave, run: no answer within 120 s")

    with pytest.raises(BenchError, match="exit code 7"):
        harness.together(Told((None, "rank 1, arm wave, run: the worker ended by itself (exit code 7)", False)), late)


def gloo_rank(rank, port, answers):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group = harness.GlooGroup(5)
    answers.put((rank, harness.together(group, lambda: rank * 10)))
    if rank == 1:
        answers.close()
        answers.join_thread()
        os._exit(9)
    try:
        group.gather("still there?")
    except BenchError as error:
        answers.put((rank, str(error)))


def test_ranks_over_gloo_and_one_that_dies():
    pytest.importorskip("torch", reason="torch is not installed: no gloo")
    context = multiprocessing.get_context("fork")
    answers, port = context.Queue(), harness.free_port()
    ranks = [context.Process(target=gloo_rank, args=(rank, port, answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = [answers.get(timeout=60) for _ in range(3)]
    for rank in ranks:
        rank.join(60)
    assert (0, [0, 10]) in found
    assert (1, [0, 10]) in found
    assert any(isinstance(text, str) and text.startswith("rank 0: another rank is gone or late") for _, text in found)


def test_a_result_file_is_json_with_numbers_in_lines(tmp_path):
    path = tmp_path / "result.json"
    document = {"samples": [1.5, 2.5], "rows": [{"name": "a", "text": ["x", "y"], "empty": []}], "none": None}
    harness.write_result(path, document)
    assert json.loads(path.read_text()) == document
    assert '"samples": [1.5, 2.5]' in path.read_text()
    with pytest.raises(ValueError, match="JSON"):
        harness.write_result(path, {"samples": [float("nan")]})
    assert json.loads(path.read_text()) == document


def test_provenance_says_what_a_result_rests_on():
    found = harness.provenance("command", MachineInfo(reason="no driver"), {"trials": 20})
    assert found["gpu"] == "none: no driver"
    assert {"command", "date", "driver", "versions", "system", "settings", "units"} <= set(found)
    assert {"xstage-plugin", "python", "numpy"} <= set(found["versions"])


@pytest.mark.parametrize("name", ["result.txt", "no/such/folder/result.json"])
def test_a_file_that_could_not_be_written_is_refused_before(tmp_path, name):
    with pytest.raises(InvalidInputError, match="result"):
        harness.check_writable(tmp_path / name, ".json")


def test_progress_is_a_bar_or_nothing_where_nobody_looks(capsys):
    with harness.progress(2, shown=True) as tick:
        tick("a")
        tick("b")
    assert capsys.readouterr().out == ""


def test_a_plot_reads_the_result_file_only(tmp_path):
    aa, floor = [100.0, 101.0] * 10, 50.0
    rows = [
        harness.arm_row(Arm(name, "x", 1), [value] * 20, aa, floor, []) for name, value in (("stock", 100.5), ("lead 8", 80.0))
    ]
    case = {"name": "case", "baseline": "stock", "aa_difference": 0.01, "auto_arm": "lead 8", "arms": rows}
    meta = {"gpu": "GPU", "date": "today"}
    path = tmp_path / "result.json"
    harness.write_result(path, {"schema": harness.SCHEMA, "benchmark": "ab", "meta": meta, "cases": [case]})
    harness.plot_speedups(path, tmp_path / "result.png")
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    for content, message in (("[]", "not a result"), (json.dumps({"schema": harness.SCHEMA, "cases": []}), "nothing to draw")):
        path.write_text(content)
        with pytest.raises(InvalidInputError, match=message):
            harness.plot_speedups(path, tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()
