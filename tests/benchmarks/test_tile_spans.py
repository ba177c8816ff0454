"""tile_spans.py without a GPU: what spans say, whole runs over fake workers, the command line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import tile_span_figures as figures  # noqa: E402
import tile_spans  # noqa: E402

from xstage_plugin.burst_gap.catalog import load_platform  # noqa: E402
from xstage_plugin.errors import InvalidInputError  # noqa: E402

PLATFORM = load_platform("h200-nvlink-pair-bulk")
FAKE = """
from fake_worker import FakeWorker, wish, work
class Fake(FakeWorker):
    def refusal(self, head_dim):
        return wish.get("refusal", "") if self.rank else ""
    def spans(self, seq_len, heads, head_dim, head_by_head, local):
        self.do("spans", None)
        late = 100 if local else 2000
        return {"remote": [[5000, 5600, 5600 + late], [6000, 6700, 6700 + late]], "own": [[4000, 4500, 5000]]}
work(Fake())
"""


@pytest.fixture
def measure(fake_worker, on_two_ranks, tmp_path):
    def call(**wish):
        cases = tile_spans.make_cases(2, [8192], [4], 128)
        out, command = tmp_path / "result.json", fake_worker(FAKE, wish)
        documents = on_two_ranks(lambda group: tile_spans.run(cases, PLATFORM, group, out, "command", 10.0, command))
        return documents, json.loads(out.read_text())

    return call


def test_spans_count_from_the_first_store_of_the_kernel():
    assert figures.from_first([[7000, 7500, 9000], [6000, 6100, 6200]]).tolist() == [[1, 1.5, 3], [0, 0.1, 0.2]]


def test_what_is_under_way_grows_with_an_issue_and_falls_with_a_completion():
    moments, held = figures.under_way_bytes(np.array([[0, 1, 4], [2, 3, 5], [4, 5, 6.0]]), 10)
    assert moments.tolist() == [0, 2, 4, 4, 5, 6]
    # At 4 one completes and another one is issued: never three at once.
    assert held.tolist() == [10, 20, 10, 20, 10, 0]


def test_a_case_holds_remote_and_own_tiles_and_the_same_stored_locally(measure, capsys, tmp_path):
    documents, result = measure()
    assert (result["complete"], result["failed"], documents[0]["cases"]) == (True, False, result["cases"])
    assert [case["head_by_head"] for case in result["cases"]] == [True, False]
    found = result["cases"][0]["figures"]
    assert found["remote tiles"] == {
        "tiles": 2,
        "smem_free_median_us": 0.65,
        "smem_free_p90_us": 0.69,
        "smem_free_max_us": 0.7,
        "complete_median_us": 2.65,
        "complete_p90_us": 2.69,
        "complete_max_us": 2.7,
        "peak_under_way_bytes": 2 * 128 * 128 * 2,
    }
    assert found["own tiles"]["complete_max_us"] == 1
    assert found["the remote tiles stored locally"]["complete_max_us"] == 0.8
    assert result["cases"][0]["remote_tiles_of_waves"] == [68, 60]
    tile_spans.print_result(result)
    assert "own tiles" in capsys.readouterr().out
    figures.draw(tmp_path / "result.json", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ({"refusal": "flash-attn-4 is not installed"}, "rank 1: flash-attn-4 is not installed"),
        ({"die": [0, "spans", None]}, "rank 0, arm fa4-arrival, spans: the worker ended by itself (exit code 7)"),
    ],
)
def test_a_broken_run_ends_on_every_rank_with_one_line(measure, wish, error):
    documents, result = measure(**wish)
    for document in (*documents, result):
        assert (document["error"], document["failed"], document["complete"]) == (error, True, False)


def test_another_file_is_not_drawn(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(InvalidInputError, match=r"not a result of tile_spans\.py"):
        figures.draw(other, tmp_path / "plot.png")


def test_dry_run_prints_the_plan_without_torch_and_gpus(tmp_path, script):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    run = script("tile_spans", "--dry-run", PYTHONPATH=str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    assert "Plan: 4 cases on 2 ranks" in run.stdout
    assert "68, 60" in run.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lengths", "8k"], "--lengths holds '8k'"),
        (["--lengths", "8191"], "--lengths holds 8191; expected multiples of the 2 ranks"),
        (["--heads", ","], "nothing to measure"),
        (["--head-dim", "256"], "--head-dim is 256; expected at most 128"),
        (["--head-dim", "7"], "--head-dim is 7; expected a multiple of 8"),
        (["--platform", "nowhere"], "unknown platform 'nowhere'"),
        (["--platform", "paper-148sm"], "attention stores in bulk"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(args, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert tile_spans.main(["--dry-run", *args]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (err.count("\n"), out) == (1, "")
