"""Patches that only insert: what they do to a file, and everything else they might be is refused."""

import re
import shutil
import subprocess

import pytest

from xstage_plugin.upstream.errors import HeaderError
from xstage_plugin.upstream.insertions import Insertion, insert, parse_insertions
from xstage_plugin.upstream.pins import load_pins, source_bytes

ORIGINAL = "one\ntwo\nthree\n"
PATCH = """Why.
--- a/file
+++ b/file
@@ -0,0 +1 @@
+zero
@@ -2,0 +4,2 @@
+two and a half
+
@@ -3,0 +7 @@
+four
"""
RESULT = "zero\none\ntwo\ntwo and a half\n\nthree\nfour\n"
SHIPPED = [(pin.name, patch) for pin in load_pins().values() for patch in pin.patches]


def test_lines_go_where_the_hunks_say():
    assert insert(ORIGINAL, parse_insertions(PATCH, "p"), "p") == RESULT


def test_git_reads_the_patch_the_same_way(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    (tmp_path / "file").write_text(ORIGINAL)
    (tmp_path / "p").write_text(PATCH)
    subprocess.run(["git", "apply", "--unidiff-zero", "p"], cwd=tmp_path, check=True)
    assert (tmp_path / "file").read_text() == RESULT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("+zero", "-one", "does more than insert"),
        ("+zero", " one", "does more than insert"),
        ("+zero", "+zero\n-one", "does more than insert"),
        ("@@ -0,0 +1 @@", "@@ -1 +1 @@", "does more than insert"),
        ("@@ -0,0 +1 @@", "@@ -0,0 +1,2 @@", "does not add up with its 1 lines"),
        ("+4,2", "+5,2", "does not add up"),
        ("@@ -3,0 +7 @@", "@@ -1,0 +5 @@", "does not add up"),
        ("@@ -0,0 +1 @@\n+zero", "@@ -0,0 +1,0 @@", "does not add up"),
        ("@@ -0,0 +1 @@", "@@ -0,0 +\u0661 @@", "does more than insert"),
        ("@@ -3,0 +7 @@", f"@@ -{'3' * 5000},0 +7 @@", "does more than insert"),
        ("+four", "+four\n--- a/other\n+++ b/other", "several files"),
    ],
)
def test_a_patch_that_does_anything_else_is_refused(old, new, message):
    with pytest.raises(HeaderError, match=message):
        parse_insertions(PATCH.replace(old, new, 1), "p")


def test_a_file_without_a_last_line_end_gets_one_before_what_comes_after_it():
    assert insert("one\ntwo", (Insertion(2, ("three",)),), "p") == "one\ntwo\nthree\n"


def test_nothing_inserted_is_the_original():
    assert insert(ORIGINAL, (), "p") == ORIGINAL


def test_only_line_ends_end_a_line():
    patch = PATCH.replace("+zero", "+zero\u2028\x0bzero")
    assert insert(ORIGINAL, parse_insertions(patch, "p"), "p") == RESULT.replace("zero", "zero\u2028\x0bzero")


def test_a_text_without_hunks_is_refused():
    with pytest.raises(HeaderError, match="p: holds no hunk"):
        parse_insertions("nothing\n", "p")


def test_a_file_that_is_too_short_is_refused():
    with pytest.raises(HeaderError, match="goes behind line 3 of a file of 1"):
        insert("one\n", (Insertion(3, ("x",)),), "p")


@pytest.mark.parametrize(("name", "patch"), SHIPPED, ids=lambda value: getattr(value, "source", value))
def test_a_shipped_patch_says_why_and_is_for_the_pinned_file(name, patch):
    text = source_bytes(patch.source).decode()
    assert parse_insertions(text, patch.source)
    assert re.search(rf"^--- a/{re.escape(patch.path)}$", text, re.MULTILINE)
    assert not text.startswith("---")
