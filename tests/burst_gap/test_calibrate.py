"""Calibration without a GPU: a bench that obeys the model must come out as that model, and a disturbed one must not."""

import dataclasses
import json

import numpy as np
import pytest

from xstage_plugin.burst_gap import calibrate_file
from xstage_plugin.burst_gap.calibrate import DisturbedRunError, link_raw_gbps, measure
from xstage_plugin.burst_gap.calibrate_file import MachineLacksError, calibrate_to_file, check_request, device_spec
from xstage_plugin.burst_gap.catalog import find_device, load_platform
from xstage_plugin.burst_gap.fit_file import fit_document
from xstage_plugin.burst_gap.gpu_info import GpuInfo, MachineInfo, PeerAccess
from xstage_plugin.burst_gap.measuring_plan import make_plan, periodic_config, sweep_gaps_us
from xstage_plugin.burst_gap.probe import ProbeResult
from xstage_plugin.burst_gap.samples import parse_samples
from xstage_plugin.burst_gap.topology import available_topologies, stores_to
from xstage_plugin.burst_gap.units import KIB, MIB
from xstage_plugin.errors import InvalidInputError, XStageError

GPU = GpuInfo(0, "NVIDIA H200", (9, 0), 132, 2**37, 60 * MIB, 1980.0, "0000:01:00.0", 18, 4, 26562, 1980, 3201, 40, ())


def machine(count=2, **changes):
    gpus = tuple(dataclasses.replace(GPU, ordinal=n, **changes) for n in range(count))
    peers = tuple(PeerAccess(a, b, True, True) for a in range(count) for b in range(count) if a != b)
    return MachineInfo(gpus, peers, (13, 0), "580.1")


class ModelBench:
    """A bench whose GPUs obey equations 3 and 7 to the letter, in 132 producers of equal service."""

    num_sms, largest_burst_kib, how, processes_per_gpu = 132, 227.0, "a model", 1
    rate_gbps, capacity_mib = 400.0, 2.0

    def __init__(self, num_gpus=2):
        self.num_gpus, self.runs, self.closed, self.reserved = num_gpus, [], False, 0

    def reserve(self, num_bytes):
        self.reserved = num_bytes

    def close(self):
        self.closed = True

    def copy_rates_gbps(self):
        return {"memcpy_peer": 420.0, "memcpy_local": 2000.0}

    def clock_mhz(self):
        return 1980.0

    def wrong_words(self):
        return 0

    def rate_of_launch(self):
        return self.rate_gbps

    def run(self, config, topology):
        assert config.region_bytes() <= self.reserved
        self.runs.append((config, topology))
        return [self.result(config, topology) for _ in stores_to(topology, self.num_gpus)]

    def result(self, config, topology):
        floor = 0.05 + 0.015 * config.burst_bytes / KIB
        drain = (lambda b: 0.0) if topology == "local" else (lambda b: b / (self.rate_of_launch() * 1e3))
        gap = config.gap_us + 0.3  # book-keeping between bursts, as the real kernel has it
        waits = config.burst_total_bytes - self.capacity_mib * MIB if config.isolated else config.burst_total_bytes
        issue = max(floor, drain(waits) - (0.0 if config.isolated else gap))
        shape = (config.num_producers, 30)
        rate = config.burst_bytes / (issue + gap) / 1e3
        return ProbeResult(
            config=config,
            target="local" if topology == "local" else "remote",
            issue_us=np.full(shape, issue),
            period_us=np.full(shape, issue + gap),
            rates_gbps=np.full(0 if config.isolated else config.num_producers, rate),
            aggregate_period_us=None if config.isolated else issue + gap,
            aggregate_gbps=None if config.isolated else rate * config.num_producers,
            sm_clock_mhz=self.clock_mhz(),
            mismatches=self.wrong_words(),
            num_bursts=(30,) * config.num_producers,
            first_mismatch="GPU 1, producer 3, slot 0, word 7: got 0, expected 1" if self.wrong_words() else "",
        )


def run_measure(bench, mode="quick", **options):
    plan = make_plan(mode, bench.num_sms, 1e6)
    values = {"store": "st.v4", "topology": "one-way", "before": machine(bench.num_gpus), "command": "xstage calibrate"}
    values |= {"after": lambda: machine(bench.num_gpus), "ordinals": tuple(range(bench.num_gpus))}
    return measure(bench, plan, **(values | options))


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_a_bench_that_obeys_the_model_comes_out_as_that_model(mode, tmp_path):
    report = fit_document(run_measure(ModelBench(), mode), tmp_path / "node.toml", device=find_device("h200").spec)
    assert report.model.drain_rate_gbps == pytest.approx(400.0, rel=1e-3)
    assert report.model.capacity_bytes(132) / MIB == pytest.approx(2.0, rel=0.01)
    assert report.model.issue_floor_us(132, 8 * KIB) == pytest.approx(0.17, rel=0.01)
    overall = report.holdout[-1]
    assert overall.period_law == "aggregate"
    assert overall.period_p90 < 1e-3


def test_the_held_out_sweep_has_at_least_four_sizes_and_three_producer_counts():
    for mode in ("quick", "full"):
        rows = run_measure(ModelBench(), mode)["gap_sweep"]
        assert len({row["burst_kib"] for row in rows}) >= 4
        assert len({row["num_producers"] for row in rows}) >= 3
        assert len({row["gap_requested_us"] for row in rows}) > 20


def test_every_remote_point_stands_beside_its_local_control_and_the_rounds_turn():
    bench = ModelBench()
    plan = make_plan("full", 132, 1e6)
    run_measure(bench, "full")
    points = [(config, topology) for config, topology in bench.runs if config.isolated]
    assert [topology for _, topology in points] == ["one-way", "local"] * (len(plan.isolated) * plan.rounds)
    remote = [config for config, topology in points if topology == "one-way"]
    first, second = remote[: len(plan.isolated)], remote[len(plan.isolated) : 2 * len(plan.isolated)]
    assert second == first[::-1]


def test_the_document_says_what_was_measured_with_what():
    document = run_measure(ModelBench())
    meta = document["meta"]
    assert {
        "date",
        "gpu",
        "driver",
        "link",
        "command",
        "versions",
        "sm_clock_mhz",
        "gpus_before",
        "gpus_after",
        "units",
    } <= set(meta)
    assert meta["gpus_before"][1]["temperature_c"] == 40
    assert document["copies"] == {"memcpy_peer": 420.0, "memcpy_local": 2000.0, "link_raw_gbps": pytest.approx(478.1, abs=0.1)}
    assert [row["topology"] for row in document["topologies"]] == ["one-way", "both-ways"]
    json.dumps(document, allow_nan=False)
    parse_samples(document, "samples")


def test_progress_goes_to_its_end():
    seen = []
    run_measure(ModelBench(4), progress=lambda done, total, what: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(seen[0][1]))


def test_a_clock_that_moves_disturbs_the_run():
    class Throttled(ModelBench):
        def clock_mhz(self):
            return 1980.0 if len(self.runs) < 200 else 1500.0

    with pytest.raises(DisturbedRunError, match=r"SM clock moved by 24%.*1500 to 1980 MHz") as caught:
        run_measure(Throttled())
    assert caught.value.document["zero_gap"]


def test_rounds_that_disagree_disturb_the_run():
    class Shared(ModelBench):
        def rate_of_launch(self):
            return 400.0 if len(self.runs) % 7 else 200.0

    with pytest.raises(DisturbedRunError, match="something else uses the link"):
        run_measure(Shared(), "full")


def test_a_process_that_came_during_the_run_disturbs_it():
    assert run_measure(ModelBench(), after=lambda: machine(2, compute_pids=(1,)))["zero_gap"]
    with pytest.raises(DisturbedRunError, match=r"GPU 0 has 2 processes at the end of the run \(1, 4711\)"):
        run_measure(ModelBench(), after=lambda: machine(2, compute_pids=(1, 4711)))


def test_wrong_data_stops_the_run_at_once():
    class Wrong(ModelBench):
        def wrong_words(self):
            return 5 if len(self.runs) == 40 else 0

    bench = Wrong()
    with pytest.raises(DisturbedRunError, match=r"5 words are wrong \(GPU 1, producer 3"):
        run_measure(bench)
    assert len(bench.runs) == 40


def test_bytes_that_nobody_checked_are_no_measurement():
    class Unchecked(ModelBench):
        def wrong_words(self):
            return None

    with pytest.raises(DisturbedRunError, match="was not checked"):
        run_measure(Unchecked())


LACKS = {
    "no GPU": (MachineInfo(reason="cuInit: no driver"), {}, MachineLacksError, "this machine has none: cuInit: no driver"),
    "unknown index": (machine(), {"ordinals": [0, 7]}, InvalidInputError, "device 7 does not exist; this machine has 0, 1"),
    "negative index": (machine(), {"ordinals": [-1, 0]}, InvalidInputError, "from 0 on"),
    "same index twice": (machine(), {"ordinals": [1, 1]}, InvalidInputError, "expected each once"),
    "no peer access": (dataclasses.replace(machine(), peers=()), {}, MachineLacksError, "GPU 0 has no peer access to GPU 1"),
    "PCIe only": (machine(nvlink_count=0), {}, MachineLacksError, "only PCIe"),
    "too old a driver": (dataclasses.replace(machine(), cuda_version=(12, 4)), {}, MachineLacksError, "serves CUDA 12.4"),
    "older GPU": (machine(compute_capability=(8, 0)), {}, MachineLacksError, "is sm_80"),
    "in use": (machine(compute_pids=(4711,)), {}, MachineLacksError, "GPU 0 is in use .process 4711"),
    "incast of two": (machine(), {"topology": "incast"}, InvalidInputError, "expected one of: one-way, both-ways"),
}


@pytest.mark.parametrize("case", LACKS)
def test_what_is_missing_is_one_line(case):
    found, options, kind, message = LACKS[case]
    arguments = {"ordinals": None, "topology": "one-way"} | options
    with pytest.raises(kind, match=message) as caught:
        check_request(found, **arguments)
    assert "\n" not in str(caught.value)


def test_different_gpus_are_not_mixed_into_one_model():
    pair = machine()
    mixed = dataclasses.replace(pair, gpus=(pair.gpus[0], dataclasses.replace(pair.gpus[1], name="NVIDIA H100")))
    with pytest.raises(MachineLacksError, match="2 kinds"):
        check_request(mixed, None, "one-way")


def test_an_unknown_gpu_takes_the_figures_of_its_architecture_and_says_so():
    spec = device_spec(dataclasses.replace(GPU, name="NVIDIA H20", num_sms=78))
    assert (spec.name, spec.num_sms, spec.origin.source) == ("NVIDIA H20", 78, "estimated")
    assert "assumed to be those of NVIDIA H200" in spec.origin.note
    assert device_spec(GPU).origin.source == "measured"


def calibrate(out, monkeypatch, bench, found=None, **options):
    monkeypatch.setattr(calibrate_file, "OneProcessBench", lambda ordinals: bench)
    monkeypatch.setattr(calibrate_file, "probe_machine", lambda: found or machine())
    arguments = {"devices": None, "mode": "quick", "store": "st.v4", "topology": "one-way", "command": "xstage calibrate"}
    return calibrate_to_file(out, **(arguments | {"progress": lambda *_: None} | options))


def test_a_calibration_writes_the_model_with_its_samples_beside_it(tmp_path, monkeypatch):
    bench = ModelBench()
    calibrate(tmp_path / "node.toml", monkeypatch, bench)
    assert load_platform(str(tmp_path / "node.toml")).drain_rate_gbps == pytest.approx(400.0, rel=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.samples.json", "node.toml"]
    assert bench.closed


def test_a_disturbed_run_keeps_its_samples_apart_and_leaves_an_earlier_model_alone(tmp_path, monkeypatch):
    class Throttled(ModelBench):
        def clock_mhz(self):
            return 1980.0 if len(self.runs) < 200 else 1500.0

    (tmp_path / "node.toml").write_text("earlier")
    (tmp_path / "node.samples.json").write_text("earlier")
    bench = Throttled()
    with pytest.raises(DisturbedRunError, match=r"samples kept in node\.samples\.rejected\.json"):
        calibrate(tmp_path / "node.toml", monkeypatch, bench)
    assert (tmp_path / "node.toml").read_text() == (tmp_path / "node.samples.json").read_text() == "earlier"
    assert json.loads((tmp_path / "node.samples.rejected.json").read_text())["zero_gap"]
    assert bench.closed


def test_samples_that_determine_no_model_are_kept_and_no_model_is_written(tmp_path, monkeypatch):
    class Endless(ModelBench):
        capacity_mib = 1000.0  # no isolated burst reaches it

    with pytest.raises(XStageError, match=r"past its knee.*samples kept in node\.samples\.rejected\.json"):
        calibrate(tmp_path / "node.toml", monkeypatch, Endless())
    assert [path.name for path in tmp_path.iterdir()] == ["node.samples.rejected.json"]


def test_with_one_gpu_the_local_control_is_measured_and_no_model_is_made(tmp_path, monkeypatch):
    lines = []
    with pytest.raises(MachineLacksError, match="no model can come of it"):
        calibrate(tmp_path / "node.toml", monkeypatch, ModelBench(1), machine(1), say=lines.append)
    assert any("KiB" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "node.txt"], "ends in .toml"),
        (["--out", "nowhere/node.toml"], "no such folder"),
        (["--out", "node.toml", "--devices", "a,b"], "devices is 'a,b'; expected whole numbers"),
        (["--out", "node.toml", "--devices", "0,9"], "device 9 does not exist"),
        (["--out", "node.toml", "--store", "memcpy"], "memcpy"),
        (["--out", "node.toml", "--threads", "100"], "num_threads is 100"),
        (["--out", "node.toml", "--topology", "incast"], "expected one of: one-way, both-ways"),
    ],
)
def test_the_command_refuses_wrong_input_in_one_line(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate_file, "OneProcessBench", lambda ordinals: ModelBench())
    monkeypatch.setattr(calibrate_file, "probe_machine", machine)
    code, out, err = run("calibrate", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_held_out_error_and_what_the_rate_compares_with(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate_file, "OneProcessBench", lambda ordinals: ModelBench())
    monkeypatch.setattr(calibrate_file, "probe_machine", machine)
    code, out, err = run("calibrate", "--out", "node.toml")
    assert (code, err) == (0, "")
    assert "Held-out gap sweep" in out
    assert "95.2% of a peer copy, 420.0 GB/s" in out
    assert "83.7% of the raw link rate, 478.1 GB/s" in out
    code, out, err = run("calibrate", "--out", "node.toml", "--json")
    document = json.loads(out)
    assert {"drain", "capacity", "holdout", "meta", "copies", "topologies"} <= set(document)


def test_a_machine_without_gpus_cannot_be_calibrated(run, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate_file, "probe_machine", lambda: MachineInfo(reason="no driver"))
    code, out, err = run("calibrate", "--out", tmp_path / "node.toml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "needs two GPUs" in err


def test_doctor_speaks_of_every_piece(run):
    document = json.loads(run("doctor", "--json")[1])
    assert {package["name"] for package in document["packages"]} >= {"torch", "sgl-deep-gemm", "flash-attn-4", "fa3-fwd"}
    assert document["verdict"]
    code, out, _ = run("doctor")
    assert code == 0
    assert document["verdict"][:40] in " ".join(out.split())


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_topologies_hold_for_any_number_of_gpus(count):
    for topology in available_topologies(count):
        pattern = stores_to(topology, count)
        assert len({source for source, _ in pattern}) == len(pattern)
        assert all(source not in peers and len(set(peers)) == len(peers) for source, peers in pattern)
    assert dict(stores_to("one-way", count)) == {0: (1,)}
    if count > 2:
        assert {peer for _, peers in stores_to("incast", count) for peer in peers} == {0}
        assert all(len(peers) == count - 1 for _, peers in stores_to("all-to-all", count))
        assert len({peers[0] for _, peers in stores_to("all-to-all", count)}) == count


@pytest.mark.parametrize("num_sms", [8, 20, 78, 132, 148])
@pytest.mark.parametrize("mode", ["quick", "full"])
def test_the_plan_fits_the_gpu(mode, num_sms):
    plan = make_plan(mode, num_sms, 227.0)
    points = (*plan.zero_gap, *plan.gap_sweep, *plan.isolated)
    assert all(1 <= count <= num_sms and size <= 227 for count, size in points)
    assert max(count for count, _ in plan.zero_gap) == num_sms
    for count, size in plan.zero_gap:
        config = periodic_config(plan, "bulk", count, size, 0.0)
        assert config.window_us >= plan.window_us
        assert sweep_gaps_us(plan, count, size, 370.0)[0] == 0.0


@pytest.mark.parametrize(("mode", "num_sms", "message"), [("slow", 132, "mode is 'slow'"), ("quick", 4, "num_sms is 4")])
def test_an_impossible_plan_is_refused(mode, num_sms, message):
    with pytest.raises(InvalidInputError, match=message):
        make_plan(mode, num_sms, 227.0)


def test_the_raw_link_rate_is_known_only_where_nvml_says_it():
    assert link_raw_gbps(GPU) == pytest.approx(478.1, abs=0.1)
    assert link_raw_gbps(dataclasses.replace(GPU, nvlink_mbps=None)) is None
