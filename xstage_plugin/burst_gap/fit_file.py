"""Fit a samples file into a platform file, with the samples kept beside it."""

from __future__ import annotations

from pathlib import Path

from xstage_plugin.burst_gap.catalog import bundled_devices, find_device, samples_path
from xstage_plugin.burst_gap.device import DeviceSpec
from xstage_plugin.burst_gap.fit import FitReport, fit_platform
from xstage_plugin.burst_gap.platform_file import write_platform
from xstage_plugin.burst_gap.samples import BurstGapSamples, read_samples
from xstage_plugin.checks import unknown_name
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import read_text, write_atomically
from xstage_plugin.provenance import Origin, Source

# Meta keys that a platform file carries on as its provenance.
PROVENANCE_KEYS = ("what", "date", "gpu", "link", "driver", "cuda", "commit", "method")
ASSUMED_LATENCY = (2.0, Origin(Source.ESTIMATED, "not measured; taken over from the paper's platform"))


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
    report = fit_platform(
        samples,
        name=out.stem,
        description=description or str(samples.meta.get("what", f"fitted to {samples_file.name}")),
        store=store or str(samples.meta.get("store", "st.v4")),
        device=_device(device, samples),
        completion_latency_us=ASSUMED_LATENCY[0],
        completion_latency_origin=ASSUMED_LATENCY[1],
        provenance={key: str(samples.meta[key]) for key in PROVENANCE_KEYS if key in samples.meta}
        | {"samples": samples_path(out).name},
    )
    beside = samples_path(out)
    if not (beside.exists() and samples_file.exists() and beside.samefile(samples_file)):
        write_atomically(beside, read_text(samples_file, "samples file (JSON)").encode())
    write_platform(report.model, out)
    return report


def _device(name: str | None, samples: BurstGapSamples) -> DeviceSpec:
    known = [device.key for device in bundled_devices()]
    if name is not None:
        found = find_device(name)
        if found is None:
            raise unknown_name("device", name, known)
        return found.spec
    gpu = str(samples.meta.get("gpu", ""))
    found = find_device(gpu)
    if found is None:
        named = f"the samples name GPU {gpu!r}, which is not known" if gpu else "the samples name no GPU"
        raise InvalidInputError(f"{named}; give --device with one of {', '.join(known)}")
    return found.spec
