"""Fit a samples file into a platform file, with the samples kept beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xstage_plugin.burst_gap.catalog import bundled_devices, find_device, samples_path
from xstage_plugin.burst_gap.device import DeviceSpec
from xstage_plugin.burst_gap.fit import FitReport, fit_platform
from xstage_plugin.burst_gap.platform_file import platform_text
from xstage_plugin.burst_gap.samples import BurstGapSamples, parse_samples, read_samples
from xstage_plugin.checks import plain_text, shown, unknown_name
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import read_text, write_together
from xstage_plugin.provenance import Origin, Source

# Meta keys that a platform file carries on as its provenance.
PROVENANCE_KEYS = ("what", "topology", "date", "gpu", "link", "driver", "cuda", "commit", "tree", "method", "command")
ASSUMED_LATENCY = (3.1, Origin(Source.ESTIMATED, "not measured; taken over from the paper's platform"))


def fit_samples_file(
    samples_file: Path,
    out: Path,
    *,
    device: str | None = None,
    store: str | None = None,
    description: str | None = None,
) -> FitReport:
    """Fit the samples in ``samples_file`` and write the model to ``out``, the samples beside it.

    Args:
        samples_file: JSON as :mod:`xstage_plugin.burst_gap.samples` describes it.
        out: platform file, ending in .toml; the model is named after it.
        device: short name of a bundled GPU; default: the one that the samples' meta names.
        store: ``st.v4`` or ``bulk``; default: meta's, else ``st.v4``.
        description: one line; default: meta's ``what``.

    Raises:
        InvalidInputError: unreadable samples, an unusable ``out``, or a GPU that is not known.
        FitRefusedError: the samples determine no model. Nothing is written then.
    """
    if out.suffix != ".toml":
        raise InvalidInputError(f"{out}: a platform file ends in .toml; give such a name")
    samples = read_samples(samples_file)
    if _exists(out) and samples_file.samefile(out):
        raise InvalidInputError(f"{out}: is the samples file itself; give another --out")
    measured = samples.meta.get("store")
    if store is not None and measured is not None and store != measured:
        raise InvalidInputError(f"--store is {store!r} and the samples were measured with {shown(measured)}; leave it out")
    report = fit_samples(samples, out, device=_device(device, samples), store=store, description=description)
    write_fit(report, read_text(samples_file, "a samples file (JSON)").encode(), out)
    return report


def fit_document(
    document: dict[str, Any], out: Path, *, device: DeviceSpec, store: str | None = None, description: str | None = None
) -> FitReport:
    """Fit a samples document that a calibration just made; the model is named after ``out``. Writes nothing.

    Raises:
        InvalidInputError, FitRefusedError: as :func:`fit_samples_file`.
    """
    return fit_samples(parse_samples(document, "samples"), out, device=device, store=store, description=description)


def fit_samples(
    samples: BurstGapSamples, out: Path, *, device: DeviceSpec, store: str | None, description: str | None
) -> FitReport:
    """Fit ``samples`` with what their meta says of them. Raises FitRefusedError: they determine no model."""
    num_gpus = samples.meta.get("num_gpus", 2)
    return fit_platform(
        samples,
        name=out.stem,
        description=plain_text(description or str(samples.meta.get("what", f"fitted to {out.stem}"))),
        store=store or str(samples.meta.get("store", "st.v4")),
        device=device,
        num_gpus=num_gpus if isinstance(num_gpus, int) and not isinstance(num_gpus, bool) and num_gpus > 0 else 2,
        completion_latency_us=ASSUMED_LATENCY[0],
        completion_latency_origin=ASSUMED_LATENCY[1],
        provenance={key: plain_text(str(samples.meta[key])) for key in PROVENANCE_KEYS if key in samples.meta}
        | {"samples": samples_path(out).name},
    )


def write_fit(report: FitReport, samples: bytes, out: Path) -> None:
    """Write the model to ``out`` and its samples beside it: both or neither.

    Raises:
        InvalidInputError: one of the two cannot be written, or other samples, of no model, stand in their place.
    """
    beside = samples_path(out)
    if _exists(beside) and not _exists(out) and beside.read_bytes() != samples:
        raise InvalidInputError(f"{beside}: holds other samples and no model beside them; move them or choose another --out")
    write_together([(beside, samples), (out, platform_text(report.model).encode())])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have; writing says so
        return False


def _device(name: str | None, samples: BurstGapSamples) -> DeviceSpec:
    known = [device.key for device in bundled_devices()]
    if name is not None:
        found, measured = find_device(name), find_device(str(samples.meta.get("gpu", "")))
        if found is None:
            raise unknown_name("device", name, known)
        if measured is not None and measured.key != found.key:
            raise InvalidInputError(f"--device is {name!r} and the samples are of {measured.spec.name}; leave it out")
        return found.spec
    gpu = str(samples.meta.get("gpu", ""))
    found = find_device(gpu)
    if found is None:
        named = f"the samples name GPU {shown(gpu)}, which is not known" if gpu else "the samples name no GPU"
        raise InvalidInputError(f"{named}; give --device with one of {', '.join(known)}")
    return found.spec
