"""The state of every target on this machine, as a document and in one sentence each. Never raises for what is missing."""

from __future__ import annotations

from typing import Any

from xstage_plugin.errors import XStageError
from xstage_plugin.upstream import activate
from xstage_plugin.upstream.check import compare, is_applied_in_place, mismatches, unrun_note
from xstage_plugin.upstream.find import Installed, probe_installed
from xstage_plugin.upstream.overlay import find_overlay, overlays_folder, plan_overlay
from xstage_plugin.upstream.pins import Pin, load_pins

SCHEMA = "xstage-overlay-status/1"


def status_document() -> dict[str, Any]:
    """What ``xstage overlay status`` shows: the cache folder, one entry a target, and the verdict. JSON types only."""
    pins = load_pins()
    installed = {entry.import_name: entry for entry in probe_installed(pins.values())}
    targets = [target_status(pin, installed[pin.import_name]) for pin in pins.values()]
    try:
        cache: str | None = str(overlays_folder())
    except XStageError:
        cache = None
    return {
        "schema": SCHEMA,
        "cache": cache,
        "installed": [str(entry) for entry in installed.values()],
        "targets": targets,
        "verdict": _overall(targets, installed.values()),
    }


def target_status(pin: Pin, installed: Installed) -> dict[str, Any]:
    """One target: is it what is installed, which files differ, is the overlay built, is it active, and a verdict."""
    status: dict[str, Any] = {
        "target": pin.name,
        "arch": list(pin.arch),
        "status": pin.status.value,
        "installed_version": None,
        "matches": None,
        "differing_files": [],
        "overlay": None,
        "overlay_built": False,
        "active": (current := activate.active()) is not None and current.pin.name == pin.name,
    }
    if installed.include_root is None:
        return {**status, "verdict": installed.reason}
    if pin.kind == "wheel":
        if (installed.package, installed.version) != (pin.package, pin.version):
            return {**status, "verdict": f"not the installed one, which is {installed}"}
        status["installed_version"] = installed.version
    checks = compare(pin, installed.include_root)
    wrong = mismatches(checks)
    if wrong and pin.kind == "submodule":
        return {**status, "verdict": f"not the installed one, which is {installed}"}
    status["installed_version"] = installed.version or pin.commit
    status["matches"] = not wrong
    status["differing_files"] = [check.path for check in wrong]
    if wrong:
        return {**status, "verdict": f"refused: {wrong[0].path} {wrong[0].state.value}; the stock library still works"}
    if not pin.has_overlay:
        return {**status, "verdict": f"known and not supported yet: {pin.reason}"}
    if is_applied_in_place(checks):
        return {**status, "verdict": "the tree carries the change itself; it needs no overlay"}
    try:
        plan = plan_overlay(pin, installed.include_root)
        status["overlay"] = str(overlays_folder() / plan.name)
        status["overlay_built"] = find_overlay(plan) is not None
    except XStageError as error:
        return {**status, "verdict": str(error)}
    if status["active"]:
        return {**status, "verdict": f"active: {activate.prove().detail}"}
    built = "overlay built" if status["overlay_built"] else "overlay not built yet"
    return {**status, "verdict": f"ready, {built}" if pin.ready else f"{built}; {unrun_note(pin)}"}


def _overall(targets: list[dict[str, Any]], installed: Any) -> str:
    for target in targets:
        if target["matches"] is not None:
            return f"{target['target']}: {target['verdict']}"
    names = ", ".join(target["target"] for target in targets)
    found = "; ".join(str(entry) for entry in installed)
    return f"no known target is installed ({found}); known: {names}"
