"""`xstage calibrate`: check what the machine has, measure, fit, and write the model with its raw samples beside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xstage_plugin import env
from xstage_plugin.burst_gap.calibrate import DisturbedRunError, Progress, measure, measure_local_only
from xstage_plugin.burst_gap.catalog import bundled_devices, find_device, samples_path
from xstage_plugin.burst_gap.device import ARCHITECTURES, DeviceSpec
from xstage_plugin.burst_gap.fit import FitReport
from xstage_plugin.burst_gap.fit_file import fit_document, write_fit
from xstage_plugin.burst_gap.gpu_info import GpuInfo, MachineInfo, probe_machine
from xstage_plugin.burst_gap.measuring_plan import make_plan
from xstage_plugin.burst_gap.probe_bench import Bench, OneProcessBench
from xstage_plugin.burst_gap.probe_config import SLOT_ALIGNMENT_BYTES, ProbeConfig
from xstage_plugin.burst_gap.topology import available_topologies
from xstage_plugin.burst_gap.units import MIB
from xstage_plugin.errors import InvalidInputError, XStageError
from xstage_plugin.files import write_atomically
from xstage_plugin.provenance import Origin, Source

OLDEST_CUDA = (13, 0)


class MachineLacksError(XStageError):
    """This machine cannot be calibrated; the message names what is missing."""


@dataclass(frozen=True)
class Calibration:
    """A finished calibration: the fit, the samples document, and the file that holds the model."""

    report: FitReport
    document: dict[str, Any]
    out: Path


def check_request(machine: MachineInfo, ordinals: Sequence[int] | None, topology: str) -> tuple[int, ...]:
    """The GPUs to use, if this machine can be calibrated with them.

    Raises:
        InvalidInputError: a device index that does not exist or stands twice, or a topology that so few GPUs do not have.
        MachineLacksError: no GPU, one GPU, too old a driver, an unsupported GPU, no peer access, no NVLink between the GPUs,
            or another process on one of them.
    """
    if ordinals is not None and (len(set(ordinals)) != len(ordinals) or min(ordinals, default=-1) < 0):
        raise InvalidInputError(f"devices are {', '.join(map(str, ordinals)) or 'none'}; expected each once, from 0 on")
    if not machine.gpus:
        raise MachineLacksError(f"calibrate needs two GPUs with peer access; this machine has none: {machine.reason}")
    by_ordinal = {gpu.ordinal: gpu for gpu in machine.gpus}
    chosen = tuple(by_ordinal if ordinals is None else ordinals)
    for ordinal in chosen:
        if ordinal not in by_ordinal:
            known = ", ".join(str(known) for known in by_ordinal)
            raise InvalidInputError(f"device {ordinal} does not exist; this machine has {known} (see `xstage doctor`)")
    if machine.cuda_version is not None and machine.cuda_version < OLDEST_CUDA:
        version, oldest = (".".join(map(str, pair)) for pair in (machine.cuda_version, OLDEST_CUDA))
        raise MachineLacksError(f"the driver serves CUDA {version}; calibrate needs {oldest} or later: update the driver")
    for ordinal in chosen:
        _check_gpu(by_ordinal[ordinal])
        # Under torchrun the other ranks may be on their GPUs already; each speaks for its own.
        if env.torchrun_ranks() == 1 or ordinal == env.torchrun_local_rank():
            _refuse_in_use(by_ordinal[ordinal])
    if len(chosen) < 2:
        return chosen
    names = {by_ordinal[ordinal].name for ordinal in chosen}
    if len(names) > 1:
        raise MachineLacksError(f"devices are of {len(names)} kinds ({', '.join(sorted(names))}); a model is of one: choose")
    for source in chosen:
        for destination in chosen:
            if source != destination and not machine.can_access(source, destination):
                raise MachineLacksError(f"GPU {source} has no peer access to GPU {destination}; choose GPUs with --devices")
    for ordinal in chosen:
        if by_ordinal[ordinal].nvlink_count == 0:
            raise MachineLacksError(f"GPU {ordinal} has no active NVLink, only PCIe; X-Stage is of stores over NVLink")
    if topology not in available_topologies(len(chosen)):
        known = ", ".join(available_topologies(len(chosen)))
        raise InvalidInputError(f"topology is {topology!r}; with {len(chosen)} GPUs expected one of: {known}")
    return chosen


def calibrate_to_file(
    out: Path,
    *,
    devices: Sequence[int] | None,
    mode: str,
    store: str,
    topology: str,
    command: str,
    progress: Progress,
    description: str | None = None,
    num_threads: int = 256,
    say: Callable[[str], None] = lambda line: None,
    machine: MachineInfo | None = None,
) -> Calibration | None:
    """Calibrate the GPUs ``devices`` (default: all) and write the model to ``out``, the samples beside it.

    Under torchrun every process calls this; rank 0 measures and returns, the others serve it and get None.

    Raises:
        InvalidInputError: ``out`` is unusable, or the request does not fit the machine.
        MachineLacksError: the machine cannot be calibrated; with one GPU only, after its local control was measured and
            printed through ``say``.
        DisturbedRunError: something else had a part in the run. Its samples are kept beside ``out``, no model is written.
        FitRefusedError: the samples determine no model. They are kept too.
    """
    if out.suffix != ".toml":
        raise InvalidInputError(f"{out}: a platform file ends in .toml; give such a name")
    if not out.resolve().parent.is_dir():
        raise InvalidInputError(f"{out}: cannot be written: no such folder {out.parent}")
    ProbeConfig(1, SLOT_ALIGNMENT_BYTES, num_threads=num_threads)  # its checks, before any GPU is looked for
    machine = machine or probe_machine()
    distributed = env.torchrun_ranks() > 1
    if distributed and devices is not None:
        raise InvalidInputError("--devices does not go with torchrun: every process takes the GPU of its local rank")
    ordinals = check_request(machine, devices, topology)
    if len(ordinals) < 2:
        _say_local_control(ordinals[0], mode, store, say)
        raise MachineLacksError("one GPU: the local control above is all that can be measured; no model can come of it")
    if distributed:
        from xstage_plugin.burst_gap.torchrun_bench import TorchrunBench

        crew = TorchrunBench()
        if env.torchrun_rank() > 0:
            crew.serve()
            return None
        bench: Bench = crew
        ordinals = tuple(range(env.torchrun_ranks()))
    else:
        bench = OneProcessBench(ordinals)
    with contextlib.closing(bench):
        largest_kib = bench.largest_burst_kib if store == "bulk" else float("1e6")
        plan = replace(make_plan(mode, bench.num_sms, largest_kib), num_threads=num_threads)
        try:
            document = measure(
                bench,
                plan,
                store=store,
                topology=topology,
                before=machine,
                after=probe_machine,
                command=command,
                ordinals=ordinals,
                progress=progress,
            )
        except DisturbedRunError as error:
            raise _kept(error, error.document, out) from None
    gpu = next(gpu for gpu in machine.gpus if gpu.ordinal == ordinals[0])
    try:
        report = fit_document(document, out, device=device_spec(gpu), store=store, description=description)
    except XStageError as error:
        raise _kept(error, document, out) from None
    write_fit(report, json.dumps(document, indent=1).encode(), out)
    return Calibration(report, document, out)


def device_spec(gpu: GpuInfo) -> DeviceSpec:
    """The bundled figures of ``gpu`` with its own SM count and cache; of an unknown GPU, those of its architecture."""
    found = find_device(gpu.name)
    like = found or next(device for device in bundled_devices() if device.spec.arch == gpu.arch)
    note = like.spec.origin.note if found else f"matrix rates and efficiencies assumed to be those of {like.spec.name}"
    origin = like.spec.origin if found else Origin(Source.ESTIMATED, note)
    return replace(like.spec, name=gpu.name, num_sms=gpu.num_sms, l2_mib=gpu.l2_bytes / MIB, origin=origin)


def _check_gpu(gpu: GpuInfo) -> None:
    if gpu.arch not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise MachineLacksError(f"GPU {gpu.ordinal} ({gpu.name}) is {gpu.arch}; the kernels this is for run on {known}")


def _refuse_in_use(gpu: GpuInfo) -> None:
    if gpu.compute_pids:
        pids = ", ".join(str(pid) for pid in gpu.compute_pids)
        raise MachineLacksError(f"GPU {gpu.ordinal} is in use (process {pids}); a disturbed run gives no model: end it first")


def _say_local_control(ordinal: int, mode: str, store: str, say: Callable[[str], None]) -> None:
    with contextlib.closing(OneProcessBench([ordinal])) as bench:
        largest = bench.largest_burst_kib if store == "bulk" else float("1e6")
        say(f"local control on GPU {ordinal}, {store}: issue time of {bench.num_sms} producers")
        for row in measure_local_only(bench, make_plan(mode, bench.num_sms, largest), store):
            say(f"{row['burst_kib']:7g} KiB  {row['issue_us_median']:8.3f} us  (p90 {row['issue_us_p90']:.3f})")


def _kept(error: XStageError, document: dict[str, Any], out: Path) -> XStageError:
    """``error`` with a word on where the samples of the failed run are, if there are any."""
    if document:
        path = samples_path(out).with_suffix(".rejected.json")
        write_atomically(path, json.dumps(document, indent=1).encode())
        error.args = (f"{error} (samples kept in {path.name})", *error.args[1:])
    return error
