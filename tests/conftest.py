import json
import os
from pathlib import Path

import pytest
from hypothesis import settings

# No example may fail for being slow. CI draws the same examples each time; a person's run draws new ones.
settings.register_profile("person", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("many", deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "person"))

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


def pytest_collection_modifyitems(items):
    """Skip what needs more GPUs than there are, with the reason."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    from xstage_plugin.burst_gap.gpu_info import probe_machine

    machine = probe_machine()
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker and len(machine.gpus) < marker.args[0]:
            reason = f"needs {marker.args[0]} GPUs, this machine has {len(machine.gpus)}"
            item.add_marker(pytest.mark.skip(reason=f"{reason} ({machine.reason})" if machine.reason else reason))
