"""What is installed is found without importing it, and a look never raises."""

import sys

import pytest

from xstage_plugin.upstream.find import probe_installed


def probe(world):
    (installed,) = probe_installed([world.pin])
    return installed


def test_a_wheel_is_found_with_its_version_and_not_imported(world):
    found = probe(world)
    assert (found.package, found.version, found.root) == ("fake-gemm", "1.0", world.package.resolve())
    assert "deep_gemm" not in sys.modules


def test_nothing_installed_is_a_reason(world, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(world.site)])
    found = probe(world)
    assert found.root is None
    assert found.reason == "deep_gemm is not installed (package fake-gemm)"


def test_a_source_tree_before_the_wheel_is_what_counts(world, tmp_path, monkeypatch):
    tree = tmp_path / "source/deep_gemm"
    tree.mkdir(parents=True)
    (tree / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tree.parent)
    found = probe(world)
    assert (found.package, found.version, found.root) == (None, None, tree.resolve())


def test_a_loaded_module_counts_before_the_path(world, tmp_path, monkeypatch):
    import deep_gemm

    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(world.site)])
    found = probe(world)
    assert found.imported
    assert found.root == world.package.resolve()
    assert deep_gemm._C.given == [str(world.package)]


@pytest.mark.parametrize("error", [RuntimeError, ValueError, ImportError])
def test_a_broken_finder_of_somebody_else_is_a_reason(world, monkeypatch, error):
    class Broken:
        def find_spec(self, name, path, target=None):
            raise error("boom")

    monkeypatch.setattr(sys, "meta_path", [Broken()])
    assert error.__name__ in probe(world).reason
