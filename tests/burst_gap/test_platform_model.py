"""The model's laws, for any platform that the format can hold, and the paper's figures from its equations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xstage_plugin.burst_gap.catalog import load_platform
from xstage_plugin.burst_gap.curves import Capacity, FloorCurve, IssueFloor, ServiceShare
from xstage_plugin.burst_gap.device import DeviceSpec
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.burst_gap.units import KIB, MIB
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.provenance import Origin, Source

ORIGIN = Origin(Source.ESTIMATED)
DEVICE = DeviceSpec("test", "sm_90", 132, 50.0, 1979.0, 989.0, 0.4, 0.7, ORIGIN)
# The largest rounding error of sums of a few terms, relative to the largest of them.
ROUNDING = 1e-12


def platform(rate, curves, capacity, share=None):
    return PlatformModel(
        "test", "", "st.v4", rate, ORIGIN, IssueFloor(curves, ORIGIN), capacity, 2.0, ORIGIN, DEVICE, service_share=share
    )


@st.composite
def floor_curve(draw, producers):
    sizes = sorted(draw(st.sets(st.integers(1, 512), min_size=1, max_size=5)))
    floors = sorted(draw(st.lists(st.floats(0.01, 20), min_size=len(sizes), max_size=len(sizes))))
    return FloorCurve(producers, tuple(map(float, sizes)), tuple(floors))


@st.composite
def platforms(draw):
    counts = sorted(draw(st.sets(st.integers(1, 256), min_size=1, max_size=3)))
    curves = tuple(draw(floor_curve(count)) for count in counts)
    mib = sorted(draw(st.lists(st.floats(0.01, 64), min_size=len(counts), max_size=len(counts))))
    return platform(draw(st.floats(1, 5000)), curves, Capacity(tuple(counts), tuple(mib), ORIGIN))


PRODUCERS = st.integers(1, 1024)
BURST = st.floats(1, 1e9)
GAP = st.floats(0, 1e6)


@given(platforms(), PRODUCERS, BURST, BURST, GAP, GAP)
def test_issue_and_period_never_fall_with_the_burst_and_issue_never_rises_with_the_gap(model, k, b1, b2, g1, g2):
    (small, large), (short, long) = sorted((b1, b2)), sorted((g1, g2))
    assert model.issue_us(k, small, short) <= model.issue_us(k, large, short) * (1 + ROUNDING) + ROUNDING
    assert model.period_us(k, small, short) <= model.period_us(k, large, short) * (1 + ROUNDING)
    assert model.issue_us(k, small, long) <= model.issue_us(k, small, short)
    assert model.overhead_us(k, small, long) <= model.overhead_us(k, small, short)
    assert model.period_us(k, small, short) <= model.period_us(k, small, long)
    assert model.isolated_issue_us(k, small) <= model.isolated_issue_us(k, large) * (1 + ROUNDING)


@given(platforms(), PRODUCERS, BURST, GAP)
def test_the_period_is_issue_plus_gap_and_follows_the_max_law(model, k, burst, gap):
    floor, drain = model.issue_floor_us(k, burst), model.drain_us(model.burst_total_bytes(k, burst))
    assert model.period_us(k, burst, gap) == max(floor + gap, drain)
    assert model.issue_us(k, burst, gap) + gap == pytest.approx(model.period_us(k, burst, gap), rel=1e-9)


@given(platforms(), PRODUCERS, BURST, GAP)
def test_the_design_test_holds_exactly_when_nothing_waits(model, k, burst, gap):
    test = model.design_test(k, burst, gap)
    assert bool(test.rate_bound_holds) == (model.overhead_us(k, burst, gap) == 0)
    assert bool(test.capacity_bound_holds) == (model.isolated_overhead_us(k, burst) == 0)
    assert bool(test.holds) == bool(test.rate_bound_holds and test.capacity_bound_holds)


@given(platforms(), PRODUCERS, BURST)
def test_a_gap_of_the_recovery_gap_recovers(model, k, burst):
    gap = model.recovery_gap_us(k, burst)
    assert model.overhead_us(k, burst, gap) <= ROUNDING * max(1.0, float(gap))
    if gap > 0:
        assert model.overhead_us(k, burst, gap / 2) > 0


@given(platforms(), PRODUCERS, BURST)
def test_capacity_units_agree_between_bytes_and_time(model, k, burst):
    """Equation 7 from equation 6: what exceeds the capacity drains at R."""
    excess = float(model.peak_outstanding_bytes(k, burst) - model.capacity_bytes(k))
    scale = float(model.issue_floor_us(k, burst) + model.drain_us(model.burst_total_bytes(k, burst)))
    expected = max(0.0, excess) / (model.drain_rate_gbps * 1e3)
    assert model.isolated_overhead_us(k, burst) == pytest.approx(expected, rel=1e-9, abs=1e-9 * scale)


@given(platforms(), PRODUCERS, st.floats(1e-6, 1e14), st.floats(1e-9, 1e14))
def test_any_finite_positive_input_gives_finite_numbers(model, k, burst, gap):
    values = [
        model.issue_us(k, burst, gap),
        model.period_us(k, burst, gap),
        model.recovery_gap_us(k, burst),
        model.peak_outstanding_bytes(k, burst),
        model.isolated_issue_us(k, burst),
        model.capacity_bytes(k),
        model.median_producer_period_us(k, burst, gap),
    ]
    assert all(np.isfinite(value) and value >= 0 for value in values)


@given(platforms())
def test_arrays_give_what_single_points_give(model):
    k, burst, gap = np.array([[1], [40], [300]]), np.array([1e3, 3e4, 2e6]), 2.5
    period = model.period_us(k, burst, gap)
    assert period.shape == (3, 3)
    for i, j in np.ndindex(3, 3):
        assert period[i, j] == model.period_us(int(k[i, 0]), float(burst[j]), gap)


@given(platforms(), st.integers(1, 512))
def test_the_knee_is_where_an_isolated_burst_starts_to_wait(model, k):
    knee = model.knee_burst_bytes(k)
    if np.isfinite(knee):
        assert model.isolated_overhead_us(k, knee * 1.001) > 0
        assert model.isolated_overhead_us(k, knee * 0.999) == 0


def test_the_papers_figures_follow_from_its_three_parameters():
    """Section 3.5, 4.3: K = 148, B = 32 KiB. Tolerances are half a unit of the last digit that the paper prints."""
    model = load_platform("paper-148sm")
    k, burst = 148, 32 * KIB
    assert model.burst_total_bytes(k, burst) / MIB == pytest.approx(4.6, abs=0.05)
    assert model.peak_outstanding_bytes(k, burst) / MIB == pytest.approx(4.1, abs=0.05)
    assert model.recovery_gap_us(k, burst) == pytest.approx(6.0, abs=0.05)
    assert model.knee_burst_bytes(k) / KIB == pytest.approx(33, abs=0.5)
    assert model.knee_burst_bytes(k) * k / MIB == pytest.approx(4.77, abs=0.05)  # the knee itself is rounded to 1 KiB
    assert bool(model.design_test(k, burst, 80.0).holds)
    assert not bool(model.design_test(k, burst, 5.0).rate_bound_holds)


def test_between_measured_points_it_interpolates_and_outside_it_says_so():
    curves = (FloorCurve(32, (8.0, 16.0), (0.1, 0.3)), FloorCurve(64, (8.0, 16.0), (0.2, 0.4)))
    model = platform(300.0, curves, Capacity((32, 64), (1.0, 3.0), ORIGIN))
    assert model.issue_floor_us(48, 12 * KIB) == pytest.approx(0.25)
    assert model.capacity_bytes(48) == pytest.approx(2 * MIB)
    assert model.outside(48, 12 * KIB) == ()
    assert model.outside(64, 24 * KIB) == ("issue floor at 24 KiB is extrapolated from 8 to 16 KiB",)
    assert len(model.outside(128, 12 * KIB)) == 2
    # Outside it takes the cautious side: no more per producer below, no more in total above.
    assert model.capacity_bytes(16) == pytest.approx(0.5 * MIB)
    assert model.capacity_bytes(128) == pytest.approx(3 * MIB)


def test_unequal_service_shortens_the_median_producers_period_only():
    curves = (FloorCurve(64, (8.0, 16.0), (0.1, 0.2)),)
    capacity = Capacity((64,), (1.0,), ORIGIN)
    share = ServiceShare((64,), (0.8,), ORIGIN)
    equal, unequal = platform(300.0, curves, capacity), platform(300.0, curves, capacity, share)
    burst = 16 * KIB
    assert equal.median_producer_period_us(64, burst, 0.0) == equal.period_us(64, burst, 0.0)
    assert unequal.median_producer_period_us(64, burst, 0.0) == pytest.approx(0.8 * equal.period_us(64, burst, 0.0))
    assert unequal.period_us(64, burst, 0.0) == equal.period_us(64, burst, 0.0)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: FloorCurve(0, (1.0,), (1.0,)), "producers"),
        (lambda: FloorCurve(1, (), ()), "0 points"),
        (lambda: FloorCurve(1, (1.0, 2.0), (1.0,)), "2 points"),
        (lambda: FloorCurve(1, (2.0, 1.0), (1.0, 2.0)), "rising"),
        (lambda: FloorCurve(1, (1.0, 2.0), (2.0, 1.0)), "fall"),
        (lambda: FloorCurve(1, (1.0,), (float("nan"),)), "nan"),
        (lambda: IssueFloor((), ORIGIN), "no curve"),
        (lambda: Capacity((1,), (-1.0,), ORIGIN), "-1"),
        (lambda: platform(float("inf"), (FloorCurve(1, (1.0,), (1.0,)),), Capacity((1,), (1.0,), ORIGIN)), "drain rate"),
    ],
)
def test_a_model_with_impossible_numbers_cannot_be_made(make, names):
    with pytest.raises(InvalidInputError, match=names):
        make()
