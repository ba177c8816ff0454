"""Our headers in the submodule's tree: placed, replaced, taken out, and never over something that somebody edited."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xstage_plugin.errors import InvalidInputError
from xstage_plugin.upstream import pins
from xstage_plugin.upstream.errors import MismatchError, UpstreamError
from xstage_plugin.upstream.pins import load_pin

pytest.importorskip("git", reason="needs GitPython (the extra 'test')")

REPOSITORY = Path(__file__).resolve().parents[2]
INCLUDE = "deep_gemm/include/deep_gemm"
ORIGINAL, RELIED_ON = "#pragma once\nstruct Walk {};\n", "#pragma once\nstruct Rooms {};\n"
SHADOW, ORDER = "#pragma once\n#include <deep_gemm/scheduler/walk.upstream.cuh>\n", "#pragma once\n// order\n"


def load_build_tools():
    """The tools of this checkout; they are in no wheel."""
    if "build_tools" not in sys.modules:
        folder = REPOSITORY / "build_tools"
        spec = importlib.util.spec_from_file_location(
            "build_tools", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules["build_tools"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["build_tools"])
    return importlib.import_module("build_tools.deep_gemm_tree")


tools = load_build_tools()
DeepGemmTree, TreeState = tools.DeepGemmTree, tools.TreeState


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Checkout:
    """A checkout that records a fabricated upstream as its submodule, and the pin of it."""

    def __init__(self, folder):
        upstream, self.root, self.patches = folder / "upstream", folder / "checkout", folder / "patches"
        for path, text in {"scheduler/walk.cuh": ORIGINAL, "layout/rooms.cuh": RELIED_ON}.items():
            (upstream / INCLUDE / path).parent.mkdir(parents=True)
            (upstream / INCLUDE / path).write_text(text)
        git(folder, "init", "-q", "-b", "main", upstream)
        git(upstream, "add", ".")
        git(upstream, "commit", "-qm", "first")
        self.commit = git(upstream, "rev-parse", "HEAD")
        (upstream / "later").write_text("")
        git(upstream, "add", ".")
        git(upstream, "commit", "-qm", "second")
        self.later = git(upstream, "rev-parse", "HEAD")
        git(folder, "init", "-q", "-b", "main", self.root)
        git(self.root, "submodule", "--quiet", "add", str(upstream), "third_party/Walk")
        self.record(self.commit)
        git(self.root, "submodule", "--quiet", "deinit", "-f", "third_party/Walk")
        (self.patches / "ours").mkdir(parents=True)
        (self.patches / "ours/walk.cuh").write_text(SHADOW)
        (self.patches / "ours/order.hpp").write_text(ORDER)
        self.write_pin()

    def record(self, commit):
        git(self.root / "third_party/Walk", "checkout", "-q", commit)
        git(self.root, "add", ".")
        git(self.root, "commit", "-qm", "record")

    def write_pin(self):
        files = "".join(
            f'[[file]]\npath = "deep_gemm/{path}"\nsha256 = "{hashlib.sha256(text.encode()).hexdigest()}"\nrole = "{role}"\n'
            for path, text, role in (("scheduler/walk.cuh", ORIGINAL, "shadowed"), ("layout/rooms.cuh", RELIED_ON, "relied on"))
        )
        (self.patches / "walk-1").mkdir()
        (self.patches / "walk-1/pin.toml").write_text(f"""schema = "xstage-pin/1"
name = "walk-1"
kind = "submodule"
repository = "https://example.invalid/walk"
commit = "{self.commit}"
path = "third_party/Walk"
package_path = "deep_gemm"
import_name = "deep_gemm"
arch = ["sm_90"]
status = "ready"
why = "a test"
{files}[schedule_word]
first_byte = 12
[[shadow]]
path = "deep_gemm/scheduler/walk.cuh"
source = "patches/ours/walk.cuh"
original_as = "deep_gemm/scheduler/walk.upstream.cuh"
[[add]]
path = "deep_gemm/xstage/order.hpp"
source = "patches/ours/order.hpp"
""")

    @property
    def tree(self):
        return DeepGemmTree(self.root, load_pin("walk-1", self.patches), self.patches)

    def file(self, path):
        return self.root / "third_party/Walk" / INCLUDE / path

    def changes(self):
        return git(self.root / "third_party/Walk", "status", "--porcelain")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for key, value in {"COUNT": "1", "KEY_0": "protocol.file.allow", "VALUE_0": "always"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{key}", value)
    made = Checkout(tmp_path)
    monkeypatch.setattr(pins, "patches_folder", lambda: made.patches)
    return made


@pytest.fixture
def ready(checkout):
    checkout.tree.init()
    return checkout


def test_init_brings_the_submodule_to_the_pin(checkout):
    assert checkout.tree.status().state is TreeState.ABSENT
    checkout.tree.init()
    assert checkout.tree.status().state is TreeState.STOCK
    checkout.tree.init()


def test_init_leaves_an_applied_tree_as_it_is(ready):
    ready.tree.apply()
    ready.tree.init()
    assert ready.tree.status().state is TreeState.APPLIED


def test_init_refuses_a_checkout_that_records_another_commit(checkout):
    git(checkout.root, "submodule", "--quiet", "update", "--init")
    checkout.record(checkout.later)
    with pytest.raises(InvalidInputError, match=f"records {checkout.later}; expected the pin {checkout.commit}"):
        checkout.tree.init()


def test_init_outside_of_a_checkout_says_so(checkout, tmp_path):
    (tmp_path / "plain").mkdir()
    with pytest.raises(InvalidInputError, match="not a git checkout"):
        DeepGemmTree(tmp_path / "plain", checkout.tree._pin, checkout.patches).init()


def test_a_failing_git_is_one_line(checkout, tmp_path):
    shutil.rmtree(checkout.root / ".git/modules")
    (tmp_path / "upstream").rename(tmp_path / "gone")
    with pytest.raises(UpstreamError, match="git submodule update failed") as caught:
        checkout.tree.init()
    assert "\n" not in str(caught.value)


def test_apply_places_our_headers_and_a_copy_of_the_original(ready):
    assert ready.tree.apply()[-1] == "deep_gemm/scheduler/walk.cuh"
    assert ready.file("scheduler/walk.cuh").read_text() == SHADOW
    assert ready.file("scheduler/walk.upstream.cuh").read_text() == ORIGINAL
    assert ready.file("xstage/order.hpp").read_text() == ORDER
    assert ready.tree.check().state is TreeState.APPLIED


def test_applying_twice_is_applying_once(ready):
    ready.tree.apply()
    changes = ready.changes()
    assert ready.tree.apply() == ()
    assert ready.changes() == changes


def test_revert_leaves_the_tree_as_git_has_it(ready):
    ready.tree.apply()
    assert ready.changes()
    ready.tree.revert()
    assert ready.changes() == ""
    assert not ready.file("xstage").exists()
    assert ready.tree.status().state is TreeState.STOCK
    assert ready.tree.revert() == ()


def test_newer_headers_of_ours_replace_the_earlier_ones(ready):
    ready.tree.apply()
    (ready.patches / "ours/order.hpp").write_text(ORDER + "// newer\n")
    (ready.patches / "ours/walk.cuh").write_text(SHADOW + "// newer\n")
    assert ready.tree.status().state is TreeState.OUTDATED
    ready.tree.apply()
    assert ready.file("xstage/order.hpp").read_text().endswith("// newer\n")
    assert ready.file("scheduler/walk.upstream.cuh").read_text() == ORIGINAL
    ready.tree.revert()
    assert ready.changes() == ""


def test_earlier_headers_of_ours_are_taken_out_too(ready):
    ready.tree.apply()
    (ready.patches / "ours/walk.cuh").write_text(SHADOW + "// newer\n")
    ready.tree.revert()
    assert ready.changes() == ""


@pytest.mark.parametrize("missing", ["scheduler/walk.upstream.cuh", "xstage/order.hpp", "scheduler/walk.cuh"])
def test_a_half_placed_tree_is_completed_or_undone(ready, missing):
    ready.tree.apply()
    if missing == "scheduler/walk.cuh":
        ready.file(missing).write_text(ORIGINAL)
    elif missing == "scheduler/walk.upstream.cuh":
        ready.file("scheduler/walk.cuh").write_text(ORIGINAL)
        ready.file(missing).unlink()
    else:
        ready.file(missing).unlink()
    assert ready.tree.status().state is TreeState.OUTDATED
    ready.tree.apply()
    assert ready.tree.status().state is TreeState.APPLIED


@pytest.mark.parametrize("action", ["check", "apply", "revert"])
@pytest.mark.parametrize("path", ["layout/rooms.cuh", "scheduler/walk.cuh", "xstage/order.hpp"])
def test_an_edited_file_stops_and_stays(ready, path, action):
    ready.file(path).parent.mkdir(exist_ok=True)
    ready.file(path).write_text("somebody's work")
    before = ready.changes()
    with pytest.raises(MismatchError, match=path):
        getattr(ready.tree, action)()
    assert ready.file(path).read_text() == "somebody's work"
    assert ready.changes() == before


def test_another_commit_stops(ready):
    git(ready.root / "third_party/Walk", "checkout", "-q", ready.later)
    assert ready.tree.status().state is TreeState.OTHER_COMMIT
    with pytest.raises(MismatchError, match=ready.later):
        ready.tree.apply()


def test_the_command_line_says_what_the_tree_is_at_and_exits_with_2_on_an_error(checkout):
    def call(*arguments):
        command = [sys.executable, "-m", "build_tools", *arguments]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)

    absent = call("--repository", str(checkout.root), "status")
    assert (absent.returncode, absent.stderr) == (0, "")
    assert "absent" in absent.stdout
    refused = call("--repository", str(checkout.root), "apply")
    assert refused.returncode == 2
    assert refused.stderr.startswith("Error: deep-gemm-7f2a703: absent")


@pytest.mark.parametrize("arguments", [["bogus"], ["check", "--json"], ["status", "extra"], ["--target", "nothing", "status"]])
def test_a_usage_fault_is_one_line_and_exit_code_2(arguments):
    run = subprocess.run(
        [sys.executable, "-m", "build_tools", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("Error: ")
    assert run.stderr.count("\n") == 1
