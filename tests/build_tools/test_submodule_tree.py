"""Our change in a submodule's tree: placed, replaced, taken out, and never over something that somebody edited."""

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
INCLUDE = "deep_gemm/include"
WALK, ROOMS = "deep_gemm/scheduler/walk.cuh", "deep_gemm/layout/rooms.cuh"
UPSTREAM_WALK, ORDER = "deep_gemm/scheduler/walk.upstream.cuh", "deep_gemm/xstage/order.hpp"
ORIGINAL, RELIED_ON = "#pragma once\nstruct Walk {};\n", "#pragma once\nstruct Rooms {};\n"
ORDER_TEXT = "#pragma once\n// order\n"
NEWER = "// newer\n"
# For every kind of pin: our file that changes walk.cuh and a newer one, what walk.cuh becomes, and what its pin says of it.
SHADOW = "#pragma once\n#include <deep_gemm/scheduler/walk.upstream.cuh>\n"
PATCH = "Why.\n--- a/walk.cuh\n+++ b/walk.cuh\n@@ -1,0 +2 @@\n+#define OURS\n"
KINDS = {
    "submodule": (SHADOW, SHADOW + NEWER, SHADOW),
    "source tree": (PATCH, PATCH.replace("OURS", "NEWER"), "#pragma once\n#define OURS\nstruct Walk {};\n"),
}


def load_build_tools():
    """The tools of this checkout; they are in no wheel."""
    if "build_tools" not in sys.modules:
        folder = REPOSITORY / "build_tools"
        spec = importlib.util.spec_from_file_location(
            "build_tools", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules["build_tools"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["build_tools"])
    return importlib.import_module("build_tools.submodule_tree")


tools = load_build_tools()
SubmoduleTree, TreeState = tools.SubmoduleTree, tools.TreeState


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Checkout:
    """A checkout that records a fabricated upstream as its submodule, and the pin of it."""

    def __init__(self, folder, kind):
        upstream, self.root, self.patches, self.kind = folder / "upstream", folder / "checkout", folder / "patches", kind
        for path, text in {WALK: ORIGINAL, ROOMS: RELIED_ON}.items():
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
        self.write_ours(KINDS[kind][0], ORDER_TEXT)
        (self.patches / "walk-1").mkdir()
        self.write_pin(ORIGINAL)

    def record(self, commit):
        git(self.root / "third_party/Walk", "checkout", "-q", commit)
        git(self.root, "add", ".")
        git(self.root, "commit", "-qm", "record")

    def write_ours(self, walk, order):
        (self.patches / "ours/walk").write_text(walk)
        (self.patches / "ours/order.hpp").write_text(order)

    def write_pin(self, walk):
        built = self.kind == "source tree"
        folder = f"{INCLUDE}/" if built else ""
        files = "".join(
            f'[[file]]\npath = "{folder}{path}"\nsha256 = "{hashlib.sha256(text.encode()).hexdigest()}"\nrole = "{role}"\n'
            for path, text, role in ((WALK, walk, "patched" if built else "shadowed"), (ROOMS, RELIED_ON, "relied on"))
        )
        ours = f'path = "{folder}{WALK}"\nsource = "patches/ours/walk"\n'
        shadow = f'[schedule_word]\nfirst_byte = 12\n[[shadow]]\n{ours}original_as = "{UPSTREAM_WALK}"\n'
        (self.patches / "walk-1/pin.toml").write_text(f"""schema = "xstage-pin/1"
name = "walk-1"
kind = "{self.kind}"
repository = "https://example.invalid/walk"
commit = "{self.commit}"
path = "third_party/Walk"
package_path = "deep_gemm"
import_name = "deep_gemm"
arch = ["sm_90"]
status = "ready"
why = "a test"
{files}{"[[patch]]" + chr(10) + ours if built else shadow}
[[add]]
path = "{folder}{ORDER}"
source = "patches/ours/order.hpp"
""")

    @property
    def tree(self):
        return SubmoduleTree(self.root, load_pin("walk-1", self.patches), "tool walk", self.patches)

    def file(self, path):
        return self.root / "third_party/Walk" / INCLUDE / path

    def changes(self):
        return git(self.root / "third_party/Walk", "status", "--porcelain")


@pytest.fixture(params=KINDS)
def checkout(request, tmp_path, monkeypatch):
    for key, value in {"COUNT": "1", "KEY_0": "protocol.file.allow", "VALUE_0": "always"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{key}", value)
    made = Checkout(tmp_path, request.param)
    monkeypatch.setattr(pins, "patches_folder", lambda: made.patches)
    return made


@pytest.fixture
def ready(checkout):
    checkout.tree.init()
    return checkout


def test_init_brings_the_submodule_to_the_pin(checkout):
    absent = checkout.tree.status()
    assert (absent.state, absent.next_step) == (TreeState.ABSENT, "run: tool walk init")
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
        SubmoduleTree(tmp_path / "plain", checkout.tree._pin, "tool walk", checkout.patches).init()


def test_a_failing_git_is_one_line(checkout, tmp_path):
    shutil.rmtree(checkout.root / ".git/modules")
    (tmp_path / "upstream").rename(tmp_path / "gone")
    with pytest.raises(UpstreamError, match="git submodule update failed") as caught:
        checkout.tree.init()
    assert "\n" not in str(caught.value)


def test_apply_changes_the_file_last_and_adds_ours(ready):
    assert ready.tree.apply()[-1].endswith(WALK)
    assert ready.file(WALK).read_text() == KINDS[ready.kind][2]
    assert ready.file(ORDER).read_text() == ORDER_TEXT
    assert ready.tree.check().state is TreeState.APPLIED


def test_a_shadow_keeps_the_original_beside_it_and_a_patch_needs_none(ready):
    ready.tree.apply()
    assert ready.file(UPSTREAM_WALK).exists() == (ready.kind == "submodule")
    if ready.kind == "submodule":
        assert ready.file(UPSTREAM_WALK).read_text() == ORIGINAL


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
    assert not ready.file(ORDER).parent.exists()
    assert ready.tree.status().state is TreeState.STOCK
    assert ready.tree.revert() == ()


def test_a_newer_change_of_ours_replaces_the_earlier_one(ready):
    ready.tree.apply()
    earlier = ready.file(WALK).read_text()
    ready.write_ours(KINDS[ready.kind][1], ORDER_TEXT + NEWER)
    assert ready.tree.status().state is TreeState.OUTDATED
    ready.tree.apply()
    assert ready.tree.status().state is TreeState.APPLIED
    assert ready.file(WALK).read_text() != earlier
    assert ready.file(ORDER).read_text() == ORDER_TEXT + NEWER
    ready.tree.revert()
    assert ready.changes() == ""


def test_an_earlier_change_of_ours_is_taken_out_too(ready):
    ready.tree.apply()
    ready.write_ours(KINDS[ready.kind][1], ORDER_TEXT)
    ready.tree.revert()
    assert ready.changes() == ""


@pytest.mark.parametrize("missing", [WALK, ORDER])
def test_a_half_placed_tree_is_completed_or_undone(ready, missing):
    ready.tree.apply()
    if missing == WALK:
        ready.file(missing).write_text(ORIGINAL)
    else:
        ready.file(missing).unlink()
    assert ready.tree.status().state is TreeState.OUTDATED
    ready.tree.apply()
    assert ready.tree.status().state is TreeState.APPLIED


@pytest.mark.parametrize("action", ["check", "apply", "revert"])
@pytest.mark.parametrize("path", [ROOMS, WALK, ORDER])
def test_an_edited_file_stops_and_stays(ready, path, action):
    ready.file(path).parent.mkdir(exist_ok=True)
    ready.file(path).write_text("somebody's work")
    before = ready.changes()
    with pytest.raises(MismatchError, match=path):
        getattr(ready.tree, action)()
    assert ready.file(path).read_text() == "somebody's work"
    assert ready.changes() == before


def test_a_pin_that_git_contradicts_stops(ready):
    ready.write_pin("another file")
    with pytest.raises(MismatchError, match="has another file than the pin walk-1"):
        ready.tree.apply()
    assert ready.changes() == ""


def test_another_commit_stops(ready):
    git(ready.root / "third_party/Walk", "checkout", "-q", ready.later)
    assert ready.tree.status().state is TreeState.OTHER_COMMIT
    with pytest.raises(MismatchError, match=ready.later):
        ready.tree.apply()


def call(*arguments):
    command = [sys.executable, "-m", "build_tools", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("submodule", "target"), [("deep-gemm", "deep-gemm-7f2a703"), ("flash-attention", "flash-attention-77aacb6")]
)
def test_the_command_line_says_what_the_tree_is_at_and_exits_with_2_on_an_error(tmp_path, submodule, target):
    absent = call("--repository", str(tmp_path), submodule, "status")
    assert (absent.returncode, absent.stderr) == (0, "")
    assert f"{target}: absent" in absent.stdout
    assert f"run: python -m build_tools {submodule} init" in absent.stdout
    refused = call("--repository", str(tmp_path), submodule, "apply")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"Error: {target}: absent")


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["deep-gemm", "bogus"],
        ["flash-attention", "check", "--json"],
        ["deep-gemm", "status", "extra"],
        ["deep-gemm", "--target", "nothing", "status"],
        ["flash-attention", "--target", "deep-gemm-7f2a703", "status"],
    ],
)
def test_a_usage_fault_is_one_line_and_exit_code_2(arguments):
    run = call(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("Error: ")
    assert run.stderr.count("\n") == 1
