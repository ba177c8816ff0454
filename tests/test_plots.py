"""Pictures hold what they say they hold, in each format, and are written whole."""

import pytest

from xstage_plugin.burst_gap.catalog import load_platform, load_samples_of
from xstage_plugin.plots import platform_figure


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
@pytest.mark.parametrize(
    "command", [["plot", "platform", "h200-nvlink-pair"], ["plot", "platform", "paper-148sm"], ["plot", "advice"]]
)
def test_each_picture_is_written_in_each_format(run, tmp_path, command, suffix, magic):
    out = tmp_path / f"picture.{suffix}"
    code, printed, err = run(*command, "--out", out)
    assert (code, err, printed) == (0, "", f"wrote {out}\n")
    assert out.read_bytes().startswith(magic)
    assert list(tmp_path.iterdir()) == [out]


def test_the_panels_show_every_sample_as_a_point():
    model, samples = load_platform("h200-nvlink-pair"), load_samples_of("h200-nvlink-pair")
    issue, period, isolated, drain = platform_figure(model, samples).axes
    points = lambda axes: sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o")  # noqa: E731
    assert points(isolated) == len(samples.isolated)
    assert points(drain) == len(samples.zero_gap)
    shown = points(issue)
    assert shown == points(period)
    assert shown > 20


def test_a_platform_without_samples_is_drawn_from_its_model_alone():
    figure = platform_figure(load_platform("paper-148sm"), None)
    assert "without samples" in figure.get_suptitle()
    assert all(axes.lines for axes in figure.axes)
