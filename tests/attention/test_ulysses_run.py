import json
import subprocess
import sys
from pathlib import Path

import pytest
from attention.ulysses_run import Run, chosen, verdict

NAMES = ("127", "129, fp16", "spans", "rounds, barrier", "rounds, inputs")


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (None, list(NAMES)),
        ("rounds, barrier", ["rounds, barrier"]),
        ("rounds", ["rounds, barrier", "rounds, inputs"]),
        ("spans,12", ["127", "129, fp16", "spans"]),
        ("spans, 129", ["129, fp16", "spans"]),
    ],
)
def test_checks_are_chosen_by_name_or_by_beginnings(only, expected):
    assert chosen(NAMES, only) == expected


@pytest.mark.parametrize(("only", "wrong"), [("graph", "graph"), ("spans,graph", "graph"), ("spans,", ""), ("", "")])
def test_what_begins_no_name_is_refused(only, wrong):
    with pytest.raises(ValueError, match=f"nothing begins with '{wrong}'; known: 127; 129, fp16; spans"):
        chosen(NAMES, only)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"fused": True, "serial": True}, "ok"),
        ({"fused": True, "serial": False, "module": False}, "WRONG: serial; module"),
        ({"refused": "takes bfloat16"}, "refused"),
        ({"closed": "SpanClosedError: make a new one"}, "ok"),
        (0, "ok"),
        (3, "WRONG: 3"),
    ],
)
def test_a_verdict_names_what_is_wrong(found, expected):
    assert verdict(found) == expected


def test_what_was_found_is_kept_after_every_check_and_the_one_under_way_is_named(tmp_path, capsys):
    summary = {"kernels": {}, "seconds": {}}
    run = Run(summary, 1, tmp_path / "rank.json", 60)

    def kept():
        return json.loads((tmp_path / "rank.1.json").read_text())

    run.check("fa4", "spans", lambda: {"closed": True})
    assert kept()["kernels"] == {"fa4": {"spans": {"closed": True}}}
    with pytest.raises(TimeoutError):
        run.check("fa4", "rounds", lambda: (_ for _ in ()).throw(TimeoutError))
    assert kept()["running"] == "fa4: rounds"
    assert kept()["kernels"] == {"fa4": {"spans": {"closed": True}}}
    run.check("fa3", "rounds", lambda: 2)
    assert "running" not in kept()
    assert "rank 1: fa3: rounds: WRONG: 2" in capsys.readouterr().err
    run.end(ledger=[])
    assert json.loads(capsys.readouterr().out) == kept() == summary


def test_a_check_that_stands_still_ends_with_its_stack(tmp_path):
    code = """
import time, pathlib, sys
from attention.ulysses_run import Run
def stands_still():
    time.sleep(60)
Run({"kernels": {}, "seconds": {}}, 0, pathlib.Path(sys.argv[1]), 0.2).check("fa4", "rounds", stands_still)
"""
    tests = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "rank.json")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=tests,
    )
    assert ended.returncode == 1
    assert "in stands_still" in ended.stderr
    assert json.loads((tmp_path / "rank.0.json").read_text())["running"] == "fa4: rounds"
