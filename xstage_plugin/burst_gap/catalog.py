"""Platform models by bundled name or by file, and the GPUs whose figures are bundled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from xstage_plugin import env
from xstage_plugin.bundled import bundled_folder, looks_like_file
from xstage_plugin.burst_gap.device import DeviceSpec
from xstage_plugin.burst_gap.platform_file import parse_device, read_platform
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.burst_gap.samples import BurstGapSamples, read_samples
from xstage_plugin.checks import unknown_name
from xstage_plugin.toml_table import Table


def bundled_platforms() -> tuple[str, ...]:
    """Names of the platform models that come with the package."""
    return tuple(sorted(path.stem for path in bundled_folder("platforms").glob("*.toml")))


def platform_path(name_or_file: str) -> Path:
    """The file behind a bundled name or a path.

    Raises:
        InvalidInputError: neither; near names are suggested.
    """
    if name_or_file.lower() in bundled_platforms():
        return bundled_folder("platforms") / f"{name_or_file.lower()}.toml"
    if looks_like_file(name_or_file):
        return Path(name_or_file)
    raise unknown_name("platform", name_or_file, bundled_platforms())


def load_platform(name_or_file: str) -> PlatformModel:
    """The platform model of a bundled name or a file.

    Raises:
        InvalidInputError: unknown name, unreadable or foreign file.
    """
    return read_platform(platform_path(name_or_file))


def platform_for(name: str | None, arch: str, store: str) -> PlatformModel:
    """The platform of ``name``, else of $XSTAGE_PLATFORM; where nobody chose, a bundled one of ``arch`` and ``store``.

    Args:
        name: bundled name or file, None for the environment's.
        arch: of the GPU that runs the kernel, as ``sm_90``.
        store: how the kernel stores, ``st.v4`` or ``bulk``: only a measurement of that speaks for it.

    Raises:
        InvalidInputError: unknown name, unreadable or foreign file.
    """
    chosen = load_platform(name or env.default_platform())
    if name or chosen.device.arch == arch or env.default_platform() != env.DEFAULT_PLATFORM:
        return chosen
    models = (load_platform(bundled) for bundled in bundled_platforms())
    return next((model for model in models if model.device.arch == arch and model.store == store), chosen)


def samples_path(platform_file: Path) -> Path:
    """Where the raw samples of a platform file lie: beside it, under its name."""
    return platform_file.with_name(f"{platform_file.stem}.samples.json")


def load_samples_of(name_or_file: str) -> BurstGapSamples | None:
    """The samples that a platform was fitted to, or None where it came without.

    Raises:
        InvalidInputError: unknown platform, or its samples file is broken.
    """
    path = samples_path(platform_path(name_or_file))
    return read_samples(path) if path.exists() else None


@dataclass(frozen=True)
class BundledDevice:
    """A GPU of the bundled list: its short name, what to look for in the driver's name of it, its figures."""

    key: str
    match: str
    spec: DeviceSpec


def bundled_devices() -> tuple[BundledDevice, ...]:
    """Every GPU whose figures come with the package."""
    table = Table.read(bundled_folder("burst_gap") / "devices.toml", "a list of devices")
    return tuple(
        BundledDevice(key, table.table(key).text("match"), parse_device(table.table(key)))
        for key in table.keys()  # noqa: SIM118
    )


def find_device(gpu_name: str) -> BundledDevice | None:
    """The bundled GPU that ``gpu_name`` (a short name, or what the driver reports) speaks of, if any."""
    for device in bundled_devices():
        if device.key == gpu_name.lower() or re.search(rf"\b{device.match}\b", gpu_name, re.IGNORECASE):
            return device
    return None
