"""The command line: the contract of each form, one JSON document with --json, one line for every wrong input."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from xstage_plugin.bundled import bundled_folder

MODEL = ["model", "--platform", "paper-148sm", "--producers", "148", "--burst-kib", "32"]
MOE = ["advise", "moe", "--model", "qwen3.5", "--tokens-per-rank", "8192", "--ranks", "8"]
SHAPE = ["--hidden", "4096", "--intermediate", "512", "--experts", "128", "--topk", "8"]
MOE_BY_SHAPE = ["advise", "moe", *SHAPE, "--tokens-per-rank", "8192", "--ranks", "2"]
ATTENTION = ["advise", "attention", "--seq-len", "8192", "--heads-per-rank", "4", "--head-dim", "128", "--ranks", "8"]

CONTRACT = {
    "model": (
        [*MODEL, "--gap-us", "2.5"],
        "producers burst_bytes_per_producer burst_bytes issue_floor_us issue_us overhead_us period_us recovery_gap_us "
        "peak_outstanding_bytes capacity_bytes isolated_issue_us rate_bound_holds capacity_bound_holds",
    ),
    "moe": (
        MOE,
        "schedule lead_rows lead_knee_rows gap_wave_us gap_interleaved_us overhead_wave_us overhead_interleaved_us "
        "interleaving_suffices stall_wave_us stall_interleaved_us reason sources",
    ),
    "moe by shape": ([*MOE_BY_SHAPE, "--platform", "h200-nvlink-pair", "--routing", "skewed"], "schedule lead_rows reason"),
    "attention": (
        ATTENTION,
        "action min_seq_len recovery_gap_us rate_bound_holds capacity_bound_holds residual_us "
        "completion_coupled_residual_us reason",
    ),
    "overview": (["advise"], "platform moe attention"),
}


@pytest.mark.parametrize("form", CONTRACT)
def test_json_is_one_document_with_the_contracts_keys_and_nothing_else(run, form):
    arguments, keys = CONTRACT[form]
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    assert set(keys.split()) <= set(json.loads(out))


@pytest.mark.parametrize("form", CONTRACT)
def test_every_form_prints_for_people_too(run, form):
    code, out, err = run(*CONTRACT[form][0])
    assert (code, err) == (0, "")
    assert len(out.splitlines()) > 5


def test_the_model_command_gives_the_papers_worst_aligned_case(run):
    document = json.loads(run(*MODEL, "--json")[1])
    assert document["burst_bytes_per_producer"] == 32 * 1024
    assert document["burst_bytes"] == 148 * 32 * 1024
    assert document["recovery_gap_us"] == pytest.approx(6.0, abs=0.05)
    assert document["capacity_bound_holds"] is True
    assert document["rate_bound_holds"] is False


def test_the_overview_is_the_main_job_for_every_bundled_shape(run):
    document = json.loads(run("advise", "--json")[1])
    assert {"dsv4-flash", "dsv4-pro", "qwen3.5", "glm-5.2", "mimo-v2.5", "hy3", "dit-moe", "dit-moe-swapped"} == {
        row["model"] for row in document["moe"]
    }
    assert [row["seq_len"] for row in document["attention"]] == [8192, 16384, 32768, 65536]
    out = run("advise")[1]
    assert all(row["model"] in out and row["schedule"] in out for row in document["moe"])


def test_the_default_platform_comes_from_the_environment(run, monkeypatch):
    monkeypatch.setenv("XSTAGE_PLATFORM", "h200-nvlink-pair")
    assert json.loads(run("advise", "--json")[1])["platform"] == "h200-nvlink-pair"


def test_platforms_and_models_are_listed(run):
    assert {row["name"] for row in json.loads(run("platforms", "--json")[1])} >= {"paper-148sm", "h200-nvlink-pair"}
    assert len(json.loads(run("models", "--json")[1])) == 8
    assert "h200-nvlink-pair" in run("platforms")[1]
    assert "qwen3.5" in run("models")[1]


def test_routing_from_a_file_of_ids_reaches_the_decision(run, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[index % 4 if slot == 0 else -1 for slot in range(8)] for index in range(64)]))
    document = json.loads(run(*MOE_BY_SHAPE, "--routing", ids, "--json")[1])
    assert "ids.json" in document["sources"]["routing"]
    assert document["load"]["active_experts"] == 4


def test_a_fitted_platform_is_used_and_drawn(run, tmp_path, h200_samples):
    samples, out, picture = tmp_path / "run.json", tmp_path / "node.toml", tmp_path / "node.png"
    samples.write_text(json.dumps(h200_samples))
    code, printed, err = run("fit", samples, "--out", out, "--json")
    assert (code, err) == (0, "")
    assert json.loads(printed)["holdout"][-1]["period_median"] < 0.01
    assert json.loads((tmp_path / "node.samples.json").read_text()) == h200_samples
    assert json.loads(run("model", "--platform", out, "--producers", 132, "--burst-kib", 8, "--json")[1])["issue_us"] > 0
    assert json.loads(run("plot", "platform", out, "--out", picture, "--json")[1])["with_samples"] is True
    assert picture.read_bytes().startswith(b"\x89PNG")


H200_RUN = Path(__file__).parents[1] / "benchmarks" / "results" / "burst_gap_h200_nvlink_pair.json"


def wrong(tmp):
    """name -> (arguments, what the one line says)."""
    (tmp / "not.toml").write_text("= =")
    (tmp / "other.toml").write_text("[project]\nname = 'x'\n")
    (tmp / "not.json").write_text("{")
    (tmp / "empty.json").write_text('{"zero_gap": [], "gap_sweep": [], "isolated": []}')
    (tmp / "nan.json").write_text('{"zero_gap": [{"num_producers": NaN}], "gap_sweep": [{}], "isolated": [{}]}')
    (tmp / "counts.json").write_text("[1, 2, 3]")
    (tmp / "folder.toml").mkdir()
    (tmp / "mine.samples.json").write_text("[]")
    (tmp / "run.toml").write_text(H200_RUN.read_text())
    paper = (bundled_folder("platforms") / "paper-148sm.toml").read_text()
    (tmp / "huge.toml").write_text(paper.replace("717.0", "9" * 401))
    (tmp / "longer.toml").write_text(paper.replace("717.0", "9" * 5000))
    (tmp / "longer.json").write_text('{"zero_gap": [' + "9" * 5000 + "]}")
    model = lambda **values: ["model", *(f"--{k.replace('_', '-')}={v}" for k, v in values.items())]  # noqa: E731
    point = {"producers": "8", "burst_kib": "8"}
    return {
        "unknown command": (["advize"], "advize"),
        "unknown option": (["advise", "--fast"], "--fast"),
        "unknown platform": (model(platform="papr-148sm", **point), "did you mean paper-148sm"),
        "unknown model": (
            ["advise", "moe", "--model", "qwen", "--tokens-per-rank", "1", "--ranks", "1"],
            "did you mean qwen3.5",
        ),
        "platform is a folder": (model(platform=tmp, **point), "is a directory"),
        "platform is no TOML": (model(platform=tmp / "not.toml", **point), "not TOML"),
        "platform is foreign": (model(platform=tmp / "other.toml", **point), "has no schema"),
        "platform is missing": (model(platform=tmp / "none.toml", **point), "no such file"),
        "producers missing": (["model", "--burst-kib", "8"], "--producers"),
        "producers a word": (model(producers="many", burst_kib="8"), "'many'"),
        "producers zero": (model(producers="0", burst_kib="8"), "producers is 0"),
        "producers negative": (model(producers="-5", burst_kib="8"), "producers is -5"),
        "burst zero": (model(producers="8", burst_kib="0"), "burst in KiB is 0"),
        "burst NaN": (model(producers="8", burst_kib="nan"), "burst in KiB is nan"),
        "burst infinite": (model(producers="8", burst_kib="inf"), "burst in KiB is inf"),
        "burst beyond reason": (model(producers="8", burst_kib="1e300"), "1e+300"),
        "gap negative": (model(gap_us="-1", **point), "gap in us is -1"),
        "gap NaN": (model(gap_us="nan", **point), "gap in us is nan"),
        "experts over ranks": ([*MOE[:-1], "7"], "experts is 512; expected a multiple of the 7 ranks"),
        "ranks zero": ([*MOE[:-1], "0"], "ranks is 0"),
        "tokens zero": ([*MOE_BY_SHAPE, "--tokens-per-rank", "0"], "tokens per rank is 0"),
        "topk above experts": ([*MOE_BY_SHAPE, "--topk", "200"], "topk is 200"),
        "hidden negative": ([*MOE_BY_SHAPE, "--hidden", "-4096"], "hidden is -4096"),
        "model and shape": ([*MOE, *SHAPE], "exclude each other"),
        "half a shape": ([*MOE[:2], "--hidden", "8", *MOE[4:]], "missing: --intermediate, --experts, --topk"),
        "neither model nor shape": ([*MOE[:2], *MOE[4:]], "give --model"),
        "routing unknown": ([*MOE, "--routing", "random"], "routing is 'random'"),
        "routing for other experts": ([*MOE, "--routing", tmp / "counts.json"], "3 counts; expected one for each of 512"),
        "skew negative": ([*MOE, "--routing", "skewed", "--skew", "-1"], "skew is -1"),
        "skew NaN": ([*MOE, "--routing", "skewed", "--skew", "nan"], "skew is nan"),
        "weight bits": ([*MOE, "--weight-bits", "3"], "weight bits is 3"),
        "options before moe": (["advise", "--ranks", "4", *MOE[1:]], "after 'moe'"),
        "length zero": ([*ATTENTION, "--seq-len", "0"], "seq_len is 0"),
        "qloop negative": ([*ATTENTION, "--qloop-us-per-kv-tile", "-1"], "qloop_us_per_kv_tile is -1"),
        "overview ranks": (["advise", "--ranks", "7"], "expected a number that divides the experts"),
        "overview ranks zero": (["advise", "--ranks", "0"], "ranks is 0"),
        "ranks beyond reason": (["advise", "--ranks", "9999999999999"], "expected at most"),
        "experts beyond reason": ([*MOE_BY_SHAPE, "--experts", "100000000000000"], "expected at most 65536"),
        "hidden beyond reason": ([*MOE_BY_SHAPE, "--hidden", "1" + "0" * 18], "expected at most 2147483647"),
        "hidden of 90 digits": ([*MOE_BY_SHAPE, "--hidden", "1" + "0" * 90], "more than 60 digits"),
        "head dimension beyond reason": ([*ATTENTION, "--head-dim", "999999999999999"], "expected at most"),
        "qloop tiny": ([*ATTENTION, "--qloop-us-per-kv-tile", "5e-324"], "at least 1e-09"),
        "skew NaN, balanced": ([*MOE, "--skew", "nan"], "skew is nan"),
        "platform empty": (model(platform="", **point), "unknown platform ''"),
        "platform of 5000 letters": (model(platform="p" * 5000, **point), "unknown platform 'ppp"),
        "file of 5000 letters": (model(platform="p" * 5000 + ".toml", **point), "cannot be read"),
        "routing of 5000 letters": ([*MOE, "--routing", "r" * 5000], "routing is 'rrr"),
        "number of 401 digits": (model(platform=tmp / "huge.toml", **point), "'gbps' is a number of more than 60 digits"),
        "number of 5000 digits": (model(platform=tmp / "longer.toml", **point), "not TOML"),
        "samples of 5000 digits": (["fit", tmp / "longer.json", "--out", tmp / "o.toml"], "too many digits"),
        "fit onto a folder": (["fit", H200_RUN, "--out", tmp / "folder.toml"], "is a directory"),
        "fit over other samples": (["fit", H200_RUN, "--out", tmp / "mine.toml"], "holds other samples"),
        "fit onto its own samples": (["fit", tmp / "run.toml", "--out", tmp / "run.toml"], "is the samples file itself"),
        "fit to a name too long": (["fit", H200_RUN, "--out", tmp / ("n" * 250 + ".toml")], "cannot be written"),
        "samples missing": (["fit", tmp / "none.json", "--out", tmp / "o.toml"], "no such file"),
        "samples no JSON": (["fit", tmp / "not.json", "--out", tmp / "o.toml"], "not JSON"),
        "samples empty": (["fit", tmp / "empty.json", "--out", tmp / "o.toml"], "holds no samples"),
        "samples NaN": (["fit", tmp / "nan.json", "--out", tmp / "o.toml"], "num_producers is nan"),
        "samples a folder": (["fit", tmp, "--out", tmp / "o.toml"], "is a directory"),
        "fit to no toml": (["fit", tmp / "empty.json", "--out", tmp / "o.txt"], "ends in .toml"),
        "fit for unknown GPU": (["fit", H200_RUN, "--out", tmp / "o.toml", "--device", "h2000"], "did you mean h200"),
        "fit into no folder": (["fit", H200_RUN, "--out", tmp / "no" / "o.toml"], "cannot be written"),
        "plot without suffix": (["plot", "platform", "paper-148sm", "--out", tmp / "picture"], "ends in .png"),
        "plot into no folder": (["plot", "advice", "--out", tmp / "no" / "a.png"], "cannot be written"),
        "plot of nothing": (["plot", "platform", "nowhere", "--out", tmp / "a.png"], "unknown platform"),
        "a line break in a name": (model(platform="a\nb", **point), "unknown platform"),
        "a NUL in a name": (model(platform="a\0.toml", **point), "a"),
    }


with tempfile.TemporaryDirectory() as folder:
    WRONG = sorted(wrong(Path(folder)))  # the names only; each test makes its own files


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_wrong_input_is_exit_code_2_and_one_line_that_names_it(run, tmp_path, case, as_json):
    arguments, names = wrong(tmp_path)[case]
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(*arguments, *(["--json"] if as_json else []))
    assert code == 2
    assert out == ""
    assert err.startswith("xstage: error: ")
    assert err.count("\n") == 1
    assert names in err
    assert sorted(tmp_path.rglob("*")) == before  # nothing written, nothing half-written


HELP = [[], ["advise"], ["advise", "moe"], ["advise", "attention"], ["model"], ["fit"], ["platforms"], ["models"]]
HELP += [["plot"], ["plot", "platform"], ["plot", "advice"], ["calibrate"], ["doctor"]]


@pytest.mark.parametrize("group", [[], ["plot"]])
def test_a_group_alone_shows_its_help(run, group):
    code, out, err = run(*group)
    assert (code, err) == (0, "")
    assert "Commands:" in out


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_reads_at_every_level(run, command):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert out.startswith("Usage: xstage")
    assert "None" not in out


def test_a_shape_that_the_ranks_cannot_share_is_left_out_of_the_overview(run):
    models = {row["model"] for row in json.loads(run("advise", "--ranks", "32", "--json")[1])["moe"]}
    assert "qwen3.5" in models
    assert "dit-moe" not in models


def test_texts_from_files_are_shown_as_they_are(run, tmp_path):
    """A description with markup, a name with a formula: neither may break the output."""
    text = (bundled_folder("platforms") / "paper-148sm.toml").read_text()
    strange = tmp_path / "a$b{.toml"
    strange.write_text(text.replace("the paper's eight-GPU", "[/x] [red]the"))
    code, out, err = run("advise", "--platform", strange)
    assert (code, err) == (0, "")
    assert "[/x] [red]the" in out
    assert run("plot", "platform", strange, "--out", tmp_path / "p.png")[0] == 0
    assert run("plot", "advice", "--platform", strange, "--out", tmp_path / "a.png")[0] == 0


def test_samples_with_an_unprintable_text_still_fit(run, tmp_path, h200_samples):
    document = h200_samples | {"meta": h200_samples["meta"] | {"what": "\ud800\n" + "x" * 5000}}
    (tmp_path / "s.json").write_text(json.dumps(document))
    assert run("fit", tmp_path / "s.json", "--out", tmp_path / "node.toml")[0] == 0
    assert run("advise", "--platform", tmp_path / "node.toml")[0] == 0


def test_a_link_is_followed_and_permissions_are_kept(run, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "node.toml").write_text("")
    (tmp_path / "real" / "node.toml").chmod(0o600)
    (tmp_path / "node.toml").symlink_to(tmp_path / "real" / "node.toml")
    assert run("fit", H200_RUN, "--out", tmp_path / "node.toml")[0] == 0
    assert (tmp_path / "node.toml").is_symlink()
    assert (tmp_path / "real" / "node.toml").stat().st_mode & 0o777 == 0o600
    assert "xstage-platform" in (tmp_path / "real" / "node.toml").read_text()


@pytest.mark.parametrize("sink", ["> /dev/full", ">&-", "| head -1"])
def test_an_output_that_cannot_be_written_is_no_traceback(sink):
    command = f"{sys.executable} -m xstage_plugin advise {sink}"
    shown = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert shown.returncode == (0 if "head" in sink else 2)
    assert "Traceback" not in shown.stderr
    assert len(shown.stderr.splitlines()) == (0 if "head" in sink else 1)


def test_a_fault_of_ours_is_one_line_with_the_way_to_more(run, monkeypatch):
    monkeypatch.setattr("xstage_plugin.report.print_overview", lambda *_: 1 / 0)
    code, _, err = run("advise")
    assert (code, err.count("\n")) == (1, 1)
    assert "internal error, ZeroDivisionError" in err
    assert "XSTAGE_DEBUG=1" in err


def test_it_runs_as_a_module_and_survives_a_reader_that_goes_away():
    command = f"{sys.executable} -m xstage_plugin"
    shown = subprocess.run(f"{command} --version", shell=True, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("xstage")
    piped = subprocess.run(f"{command} advise --json | head -c 1", shell=True, capture_output=True, text=True, check=False)
    assert piped.stderr == ""


def test_importing_the_package_imports_neither_torch_nor_cuda_nor_a_plotting_library():
    code = "import sys, xstage_plugin.cli; print([m for m in ('torch', 'cuda', 'matplotlib', 'scipy') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
