"""Platform models as TOML files: the format, reading with one-line errors, and writing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import tomli_w

from xstage_plugin.burst_gap.curves import Capacity, FloorCurve, IssueFloor, ServiceShare
from xstage_plugin.burst_gap.device import DeviceSpec
from xstage_plugin.burst_gap.platform_model import PlatformModel, PublishedTimes
from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import write_atomically
from xstage_plugin.provenance import Origin
from xstage_plugin.toml_table import Table

SCHEMA = "xstage-platform/1"


def parse_platform(table: Table, name: str) -> PlatformModel:
    """The model that ``table`` describes.

    Raises:
        InvalidInputError: not a platform file, another schema version, a key missing or out of its range.
    """
    if "schema" not in table:
        raise InvalidInputError(f"{table.where}: not a platform file: it has no schema; expected schema = {SCHEMA!r}")
    schema = table.text("schema")
    if schema != SCHEMA:
        raise InvalidInputError(f"{table.where}: schema is {shown(schema)}; this version reads {SCHEMA!r}")
    drain, latency = table.table("drain_rate"), table.table("completion_latency")
    provenance = table.table("provenance") if "provenance" in table else Table({}, table.where)
    return table.build(
        lambda: PlatformModel(
            name=name,
            description=table.text("description"),
            store=table.text("store"),
            drain_rate_gbps=drain.number("gbps"),
            drain_rate_origin=drain.origin(),
            issue_floor=_issue_floor(table.table("issue_floor")),
            capacity=_capacity(table.table("capacity")),
            service_share=_service_share(table.table("service_share")) if "service_share" in table else None,
            completion_latency_us=latency.number("us"),
            completion_latency_origin=latency.origin(),
            device=parse_device(table.table("device")),
            num_gpus=table.integer("num_gpus"),
            published=_published(table.table("published")) if "published" in table else None,
            provenance={key: provenance.text(key) for key in provenance.keys()},  # noqa: SIM118
        )
    )


def read_platform(path: Path) -> PlatformModel:
    """The model in the file ``path``, named after the file.

    Raises:
        InvalidInputError: as :func:`parse_platform`, or the file cannot be read.
    """
    return parse_platform(Table.read(path, "a platform file (TOML)"), path.stem)


def write_platform(model: PlatformModel, path: Path) -> None:
    """Write ``model`` to ``path``, whole or not at all.

    Raises:
        InvalidInputError: ``path`` cannot be written.
    """
    write_atomically(path, platform_text(model).encode())


def platform_text(model: PlatformModel) -> str:
    """The TOML text of ``model``."""
    return tomli_w.dumps(platform_document(model))


def platform_document(model: PlatformModel) -> dict[str, Any]:
    """``model`` as the plain values that its TOML file holds; read_platform gives the same model back."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "description": model.description,
        "store": model.store,
        "num_gpus": model.num_gpus,
        "drain_rate": {"gbps": model.drain_rate_gbps, **_origin(model.drain_rate_origin)},
        "issue_floor": {
            **_origin(model.issue_floor.origin),
            "curve": [
                {
                    "producers": curve.producers,
                    "burst_kib": list(curve.burst_kib),
                    "floor_us": list(curve.floor_us),
                }
                for curve in model.issue_floor.curves
            ],
        },
        "capacity": {
            **_origin(model.capacity.origin),
            "producers": list(model.capacity.producers),
            "mib": list(model.capacity.capacity_mib),
        },
        "completion_latency": {"us": model.completion_latency_us, **_origin(model.completion_latency_origin)},
    }
    if model.service_share is not None:
        document["service_share"] = {
            **_origin(model.service_share.origin),
            "producers": list(model.service_share.producers),
            "median_over_aggregate": list(model.service_share.median_over_aggregate),
        }
    if model.published is not None:
        document["published"] = {
            **_origin(model.published.origin),
            "moe_table": model.published.moe_table,
            "qloop_us_per_kv_tile": model.published.qloop_us_per_kv_tile,
            "qloop_head_dim": model.published.qloop_head_dim,
        }
    device = model.device
    document["device"] = {
        "name": device.name,
        "arch": device.arch,
        "num_sms": device.num_sms,
        "l2_mib": device.l2_mib,
        "fp8_tflops": device.fp8_tflops,
        "bf16_tflops": device.bf16_tflops,
        "moe_efficiency": device.moe_efficiency,
        "attention_efficiency": device.attention_efficiency,
        **_origin(device.origin),
    }
    document["provenance"] = dict(model.provenance)
    return document


def _origin(origin: Origin) -> dict[str, str]:
    return {"source": origin.source.value, "note": origin.note}


def _issue_floor(table: Table) -> IssueFloor:
    def curve(entry: Table) -> FloorCurve:
        return entry.build(
            lambda: FloorCurve(entry.integer("producers"), entry.numbers("burst_kib"), entry.numbers("floor_us"))
        )

    return table.build(lambda: IssueFloor(tuple(curve(entry) for entry in table.tables("curve")), table.origin()))


def _capacity(table: Table) -> Capacity:
    return table.build(lambda: Capacity(_counts(table), table.numbers("mib"), table.origin()))


def _service_share(table: Table) -> ServiceShare:
    return table.build(lambda: ServiceShare(_counts(table), table.numbers("median_over_aggregate"), table.origin()))


def _published(table: Table) -> PublishedTimes:
    return table.build(
        lambda: PublishedTimes(
            table.text("moe_table"), table.number("qloop_us_per_kv_tile"), table.integer("qloop_head_dim"), table.origin()
        )
    )


def _counts(table: Table) -> tuple[int, ...]:
    values = table.numbers("producers")
    if not all(math.isfinite(value) and value == int(value) for value in values):
        raise InvalidInputError(f"{table.where}: 'producers' is {list(values)}; expected whole numbers")
    return tuple(int(value) for value in values)


def parse_device(table: Table) -> DeviceSpec:
    """The GPU that ``table`` describes. Raises InvalidInputError: a key missing or out of its range."""
    return table.build(
        lambda: DeviceSpec(
            name=table.text("name"),
            arch=table.text("arch"),
            num_sms=table.integer("num_sms"),
            l2_mib=table.number("l2_mib"),
            fp8_tflops=table.number("fp8_tflops"),
            bf16_tflops=table.number("bf16_tflops"),
            moe_efficiency=table.number("moe_efficiency"),
            attention_efficiency=table.number("attention_efficiency"),
            origin=table.origin(),
        )
    )
