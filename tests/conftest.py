import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


@pytest.fixture(scope="session")
def h200_samples():
    return json.loads((RESULTS / "burst_gap_h200_nvlink_pair.json").read_text())


@pytest.fixture
def run(capsys):
    """Run the command line in this process: run("model", ...) -> (exit code, stdout, stderr)."""
    from xstage_plugin.cli import main

    def call(*args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call
