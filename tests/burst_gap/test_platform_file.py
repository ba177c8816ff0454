"""Platform files: what is written is read back, and a broken or foreign file is one clear line."""

import pytest
import tomli_w

from xstage_plugin.burst_gap.catalog import bundled_platforms, load_platform, samples_path
from xstage_plugin.burst_gap.platform_file import platform_document, read_platform, write_platform
from xstage_plugin.errors import InvalidInputError


@pytest.mark.parametrize("name", bundled_platforms())
def test_a_written_platform_is_read_back_the_same(name, tmp_path):
    model = load_platform(name)
    path = tmp_path / f"{name}.toml"
    write_platform(model, path)
    assert read_platform(path) == model
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_bundled_platforms_are_the_papers_and_the_measured_one():
    assert {"paper-148sm", "h200-nvlink-pair"} <= set(bundled_platforms())
    assert load_platform("paper-148sm").drain_rate_origin.source == "paper"
    assert load_platform("h200-nvlink-pair").drain_rate_origin.source == "measured"


def document(**changes):
    values = platform_document(load_platform("paper-148sm"))
    for path, value in changes.items():
        *tables, key = path.split("__")
        target = values
        for table in tables:
            target = target[table]
        if value is None:
            del target[key]
        else:
            target[key] = value
    return tomli_w.dumps(values)


BROKEN = {
    "not TOML": ("= =", "not TOML"),
    "empty": ("", "has no schema"),
    "another project's": ("[tool.ruff]\nline-length = 3\n", "has no schema"),
    "a later schema": (document(schema="xstage-platform/9"), "this version reads"),
    "no drain rate": (document(drain_rate=None), "'drain_rate' is missing"),
    "drain rate a text": (document(drain_rate__gbps="fast"), "'gbps' is 'fast'; expected a number"),
    "drain rate negative": (document(drain_rate__gbps=-1.0), "drain rate in GB/s is -1"),
    "drain rate NaN": (document(drain_rate__gbps=float("nan")), "drain rate in GB/s is nan"),
    "unknown source": (document(drain_rate__source="a friend"), "expected one of"),
    "unknown store": (document(store="memcpy"), "store is 'memcpy'"),
    "no curve": (document(issue_floor__curve=[]), "'curve' is \\[\\]"),
    "curve a number": (document(issue_floor__curve=[3]), "expected a list of tables"),
    "curve falls": (
        document(issue_floor__curve=[{"producers": 8, "burst_kib": [1.0, 2.0], "floor_us": [2.0, 1.0]}]),
        "expected them not to",
    ),
    "producers not whole": (document(capacity__producers=[1.5]), "expected whole numbers"),
    "producers NaN": (document(capacity__producers=[float("nan")]), "expected whole numbers"),
    "lengths differ": (document(capacity__mib=[1.0, 2.0]), "expected as many"),
    "unknown architecture": (document(device__arch="sm_70"), "arch is 'sm_70'"),
    "SMs a truth value": (document(device__num_sms=True), "expected a whole number"),
    "efficiency above 1": (document(device__moe_efficiency=40.0), "expected a fraction"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_or_foreign_file_is_one_line_that_names_it(case, tmp_path, run):
    text, reason = BROKEN[case]
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=reason) as caught:
        read_platform(path)
    assert str(caught.value).startswith(str(path))
    code, out, err = run("model", "--platform", path, "--producers", 8, "--burst-kib", 8)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_file_that_is_not_there_a_folder_and_binary_data_are_one_line_each(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    for name, reason in (("none.toml", "no such file"), ("folder.toml", "is a directory"), ("binary.toml", "not a text file")):
        with pytest.raises(InvalidInputError, match=reason):
            load_platform(str(tmp_path / name))


def test_an_unknown_name_suggests_the_near_one():
    with pytest.raises(InvalidInputError, match=r"unknown platform 'h200-nvlink-par'; did you mean h200-nvlink-pair"):
        load_platform("h200-nvlink-par")


def test_samples_lie_beside_their_platform(tmp_path):
    assert samples_path(tmp_path / "node.toml") == tmp_path / "node.samples.json"
