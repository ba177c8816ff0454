"""The probe on GPUs: every byte arrives, wrong bytes are seen, and what it measures is of the right order. Small runs."""

import dataclasses

import numpy as np
import pytest

from xstage_plugin.burst_gap.platform_model import STORES
from xstage_plugin.burst_gap.probe import ProbeDevice, Traffic, run_concurrent
from xstage_plugin.burst_gap.probe_bench import OneProcessBench
from xstage_plugin.burst_gap.probe_config import ProbeConfig

PERIODIC = ProbeConfig(num_producers=8, burst_bytes=4096, gap_us=2.0, window_us=3000.0, warmup_us=200.0)
ISOLATED = dataclasses.replace(PERIODIC, isolated=True, gap_us=30.0, num_bursts=8)


@pytest.fixture(scope="module")
def bench():
    with OneProcessBench([0, 1]) as made:
        made.reserve(2**22)
        yield made


@pytest.mark.gpu(2)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("topology", ["local", "one-way", "both-ways"])
@pytest.mark.parametrize("config", [PERIODIC, ISOLATED], ids=["periodic", "isolated"])
def test_every_byte_arrives(bench, config, topology, store):
    results = bench.run(dataclasses.replace(config, store=store), topology)
    assert [result.mismatches for result in results] == [0] * (2 if topology == "both-ways" else 1)
    for result in results:
        assert result.target == ("local" if topology == "local" else "remote")
        assert len(result.num_bursts) == config.num_producers
        assert np.isfinite(result.issue_us).all()
        assert (result.issue_us > 0).all()
        if config.isolated:
            assert set(result.num_bursts) == {config.num_bursts}
        else:
            # The gap is at least what was asked for; the clock that converts it was read in an earlier run.
            assert np.median(result.period_us - result.issue_us) > 0.9 * config.gap_us


@pytest.mark.gpu(1)
@pytest.mark.parametrize("store", STORES)
def test_wrong_bytes_are_seen(store):
    """Two bursts a slot and then a claim of one burst more: the last slot's words must all be found wrong."""
    config = dataclasses.replace(ISOLATED, store=store)
    with ProbeDevice(0) as device:
        memory = device.allocate(config.region_bytes())
        (result,) = run_concurrent([Traffic(device, (memory,), config)])
        assert device.verify(memory, config, result.num_bursts, 0, 1) == (0, "")
        more = [count + 1 for count in result.num_bursts]
        wrong, text = device.verify(memory, config, more, 0, 1)
        stamped = config.burst_bytes // 16 // (1 if store == "st.v4" else 32)
        assert wrong == config.num_producers * stamped
        assert "expected" in text
        device.poison(memory)
        wrong, _ = device.verify(memory, config, result.num_bursts, 0, 1)
        assert wrong == config.num_producers * config.num_slots * config.burst_bytes // 16
