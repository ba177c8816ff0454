"""Pins of trees that are built from source: apart from those of run-time compilers, and whole."""

import re

import pytest

from xstage_plugin.errors import InvalidInputError
from xstage_plugin.upstream.pins import Role, load_pin, load_pins, load_source_trees, read_pin

PIN = """schema = "xstage-pin/1"
name = "tree-1"
kind = "source tree"
repository = "https://example.invalid/tree"
commit = "0123456789012345678901234567890123456789"
path = "third_party/tree"
import_name = "tree"
arch = ["sm_90"]
status = "ready"
why = "a test"
[[file]]
path = "src/kernel.h"
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
role = "patched"
[[patch]]
path = "src/kernel.h"
source = "patches/tree-1/kernel.patch"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tree-1").mkdir()
    (tmp_path / "tree-1/pin.toml").write_text(PIN)
    return tmp_path


def test_a_source_tree_is_none_of_the_libraries_that_compile_at_run_time(folder):
    assert load_pins(folder) == {}
    assert set(load_source_trees(folder)) == {"tree-1"}
    assert load_pin("tree-1", folder).path == "third_party/tree"
    assert not set(load_pins()) & set(load_source_trees())


def test_it_has_no_overlay_and_its_paths_begin_at_its_root(folder):
    pin = load_pin("tree-1", folder)
    assert pin.ready
    assert not pin.has_overlay
    assert pin.folder == ""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('commit = "0123', 'commit = "x123', "expected a full commit in hex"),
        ('path = "third_party/tree"', 'path = "/tree"', "expected a relative path"),
        ('role = "patched"', 'role = "relied on"', "not the paths of [[patch]]"),
        (
            "[[patch]]",
            "[schedule_word]\nfirst_byte = 12\n[[patch]]",
            "expected [schedule_word] exactly where there is [[shadow]]",
        ),
        (
            "[[patch]]",
            '[[shadow]]\npath = "src/kernel.h"\nsource = "patches/k"\noriginal_as = "src/k.h"\n[[patch]]',
            "expected [[shadow]] exactly where there is an overlay",
        ),
    ],
)
def test_a_broken_one_is_one_line(folder, old, new, message):
    assert old in PIN
    (folder / "tree-1/pin.toml").write_text(PIN.replace(old, new, 1))
    with pytest.raises(InvalidInputError, match=re.escape(message)) as caught:
        read_pin(folder / "tree-1/pin.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pin", load_source_trees().values(), ids=str)
def test_a_shipped_one_hashes_what_it_patches_and_says_what_stands_against_it(pin):
    assert {pinned.role for pinned in pin.files} == {Role.PATCHED, Role.RELIED_ON}
    assert pin.why
    assert bool(pin.reason) != pin.ready
    assert set(pin.arch) <= {"sm_90", "sm_100"}
