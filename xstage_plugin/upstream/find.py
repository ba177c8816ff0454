"""Which upstream libraries are installed, without importing them."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from xstage_plugin.upstream.pins import INCLUDE, Pin


@dataclass(frozen=True)
class Installed:
    """What an import of ``import_name`` would load, or has loaded.

    Attributes:
        package, version: of the distribution that owns it; None where none does (a source tree on the path).
        root: the package folder; None where nothing is installed, and then ``reason`` says so.
        imported: the module is loaded in this process already.
    """

    import_name: str
    package: str | None = None
    version: str | None = None
    root: Path | None = None
    imported: bool = False
    reason: str = ""

    @property
    def include_root(self) -> Path | None:
        return self.root / INCLUDE if self.root else None

    def __str__(self) -> str:
        if self.root is None:
            return self.reason
        owner = f"{self.package} {self.version}" if self.package else f"{self.import_name} of no distribution"
        return f"{owner} in {self.root}"


def probe_installed(pins: Iterable[Pin]) -> tuple[Installed, ...]:
    """One entry for every import name of ``pins``, in their order. Imports nothing. Never raises."""
    pins = tuple(pins)
    packages: dict[str, list[str]] = {}
    for pin in pins:
        packages.setdefault(pin.import_name, []).extend([pin.package] if pin.package else [])
    return tuple(_probe(name, tuple(dict.fromkeys(known))) for name, known in packages.items())


def module_root(module: object) -> Path | None:
    """The folder of a loaded package, resolved."""
    origin = getattr(module, "__file__", None)
    return Path(origin).resolve().parent if isinstance(origin, str) else None


def _probe(import_name: str, packages: tuple[str, ...]) -> Installed:
    imported = import_name in sys.modules
    try:
        root = module_root(sys.modules[import_name]) if imported else _import_root(import_name)
    except Exception as error:  # a finder of somebody else may do anything; a report must not end a program
        return Installed(import_name, imported=imported, reason=f"{import_name} cannot be looked up ({type(error).__name__})")
    if root is None:
        wanted = " or ".join(packages) or import_name
        return Installed(import_name, imported=imported, reason=f"{import_name} is not installed (package {wanted})")
    for package in (*packages, import_name):
        version = _version_at(package, import_name, root)
        if version is not None:
            return Installed(import_name, package, version, root, imported)
    return Installed(import_name, root=root, imported=imported)


def _import_root(import_name: str) -> Path | None:
    spec = importlib.util.find_spec(import_name)  # of a top-level name: looks, and imports nothing
    if spec is None or not spec.origin or not spec.submodule_search_locations:
        return None
    return Path(spec.origin).resolve().parent


def _version_at(package: str, import_name: str, root: Path) -> str | None:
    """The version of ``package`` if it is what ``root`` belongs to."""
    with contextlib.suppress(Exception):  # broken metadata of any package on the path
        distribution = metadata.distribution(package)
        if Path(str(distribution.locate_file(import_name))).resolve() == root:
            return distribution.version
    return None
