"""The shadow headers for the wheel 0.2.5 themselves, run by g++ over stand-ins of what they use of upstream (stand_in/).

No GPU has run them; what can be known without one is that they publish the tiles and tasks of our headers, each once, in tables
that hold them, and that upstream's own code runs where it should.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from xstage_plugin.bundled import bundled_folder
from xstage_plugin.moe.schedule_library import COMPILERS
from xstage_plugin.upstream.pins import load_pin, source_bytes

STAND_IN = Path(__file__).parent / "stand_in"
PIN = load_pin("sgl-deep-gemm-0.2.5")
LINEAR1, LINEAR2 = 1, 2
# Of walk_sm90.cpp: 6 CTAs, rows of 128 tokens, 4 and 6 tiles a row; upstream's lag of 3 units and 2 in one go.
CTAS, L1_TILES, L2_TILES, L1_KS, L2_KS, MOST_UNITS = 6, 4, 6, 2, 4, 5
# Of walk_sm100.cpp.
PAIRS, RING, L1_TASKS, L2_TASKS = 6, 40, 4, 16
TIMEOUT_S = 60


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The walks of both shadows, compiled: name -> path."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip(f"needs one of {', '.join(COMPILERS)}")
    folder = tmp_path_factory.mktemp("shadows")
    for shadow in PIN.shadows:
        (folder / shadow.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / shadow.path).write_bytes(source_bytes(shadow.source))
    includes = [f"-I{path}" for path in (folder, STAND_IN, bundled_folder("moe") / "include")]
    made = {}
    for name in ("walk_sm90", "walk_sm100"):
        command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *includes]
        run = subprocess.run(
            [*command, "-o", str(folder / name), str(STAND_IN / f"{name}.cpp")], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr[:3000]
        made[name] = folder / name
    return made


def walked(program, *arguments):
    """Rows of numbers that the program printed; its checks of the table are exit codes."""
    run = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, errors="replace"
    )
    assert run.returncode == 0, f"exit code {run.returncode}"
    if run.stdout == "upstream\n":
        return "upstream"
    return [tuple(map(int, line.split())) for line in run.stdout.splitlines()]


def num_rows(tokens):
    return [-(-count // 128) for count in tokens]


def capacity(tokens):
    """As upstream sizes a table: the even share, a spare entry and the end."""
    return -(-sum(num_rows(tokens)) * (L1_TILES + L2_TILES) // CTAS) + 2


TOKENS = {
    "even": (1024, 1024, 1024),
    "odd rows": (900, 0, 1500),
    "one row": (0, 1, 0),
    "none": (0, 0, 0),
    "hot": (5000, 130, 0),
}


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("lead", [1, 9, 17, 65535])
def test_sm90_publishes_every_tile_once_with_what_the_kernel_reads_of_it(programs, tokens, lead):
    visits = walked(programs["walk_sm90"], 1, lead, capacity(tokens), *tokens)
    rows = num_rows(tokens)
    seen = {}
    for _, _, phase, expert, offset, num_tokens, m, n, num_ks, _ in visits:
        seen[phase, expert, m, n] = seen.get((phase, expert, m, n), 0) + 1
        assert (offset, num_tokens) == (sum(rows[:expert]), tokens[expert])
        assert num_ks == (L1_KS if phase == LINEAR1 else L2_KS)
    expected = {
        (phase, expert, m, n)
        for expert, count in enumerate(rows)
        for m in range(count)
        for phase, tiles in ((LINEAR1, L1_TILES), (LINEAR2, L2_TILES))
        for n in range(tiles)
    }
    assert seen == dict.fromkeys(expected, 1)


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_sm90_pairs_stand_side_by_side_at_every_place_of_their_tables(programs, tokens):
    visits = walked(programs["walk_sm90"], 1, 12, capacity(tokens), *tokens)
    tiles = {(cta, place): tile for cta, place, *tile in visits}
    for (cta, place), (phase, expert, *_, m, n, _, is_paired) in tiles.items():
        other = tiles[cta ^ 1, place]
        assert other[:2] == [phase, expert]
        step = 1 if cta % 2 == 0 else -1
        assert is_paired == other[-1] == int((other[-4], other[-3]) == (m + step, n))


@pytest.mark.parametrize(("lead", "units"), [(1, 1), (8, 1), (9, 2), (24, 3), (40, 5), (65535, MOST_UNITS)])
def test_sm90_linear2_follows_the_lead_behind_and_never_more_than_upstream_has_under_way(programs, lead, units):
    tokens = (128 * 96, 0, 0)
    visits = walked(programs["walk_sm90"], 1, lead, capacity(tokens), *tokens)
    first = [(phase, m) for cta, _, phase, *_, m, _, _, _ in visits if cta == 0]
    begun = {m // 8 for phase, m in first[: [phase for phase, _ in first].index(LINEAR2)]}
    assert len(begun) == units


@pytest.mark.parametrize("spare", [-1, 0, 5])
def test_sm90_no_pair_writes_beyond_its_table(programs, spare):
    """The pairs run one after the other, so the first takes every ticket that its table holds."""
    tokens = TOKENS["hot"]
    entries = capacity(tokens) + spare
    visits = walked(programs["walk_sm90"], 1, 9, entries, *tokens)
    assert max(place for _, place, *_ in visits) == entries - 2


@pytest.mark.parametrize(("lag", "lead"), [(1, 0), (0, 0), (0, 5)], ids=["no lead", "waves, no lead", "waves"])
def test_sm90_upstreams_own_walk_runs_without_a_lead_and_in_waves(programs, lag, lead):
    assert walked(programs["walk_sm90"], lag, lead, 100, *TOKENS["even"]) == "upstream"


@pytest.mark.parametrize("domains", [1, 2])
@pytest.mark.parametrize(("lead", "rows"), [(1, 3), (1, 40), (5, 40), (30, 40), (65535, 17)])
def test_sm100_publishes_every_task_once_and_an_end_for_each_pair(programs, domains, lead, rows):
    tasks = walked(programs["walk_sm100"], domains, lead, rows)
    for phase, count, n_and_k in ((LINEAR1, L1_TASKS, (1024, 256)), (LINEAR2, L2_TASKS, (4096, 512))):
        mine = [task for task in tasks if task[1] == phase]
        assert sorted((row, n) for _, _, row, n, *_ in mine) == [(row, n) for row in range(rows) for n in range(count)]
        assert {task[4:] for task in mine} == {n_and_k}
    for pair in range(PAIRS):
        ends = [phase == 0 for owner, phase, *_ in tasks if owner == pair]
        assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize(("lead", "waves"), [(1, 2), (9, 6), (30, 20)])
def test_sm100_a_pair_begins_with_the_waves_that_the_lead_asks_for(programs, lead, waves):
    tasks = walked(programs["walk_sm100"], 1, lead, 40)
    begins = []
    for pair in range(PAIRS):
        phases = [phase for owner, phase, *_ in tasks if owner == pair]
        begins.append(phases.index(LINEAR2) if LINEAR2 in phases else len(phases))
    assert waves in begins  # a pair that starts late may find the others to have taken its share


@pytest.mark.parametrize(
    ("kind", "lead", "rows"),
    [(1, 0, 20), (1, 5, RING + 1), (1, 5, 2), (3, 5, 20)],
    ids=["no lead", "more rows than the ring", "too few tasks", "shared experts"],
)
def test_sm100_upstreams_own_walk_runs_where_a_lead_cannot_be_honoured(programs, kind, lead, rows):
    assert walked(programs["walk_sm100"], kind, lead, rows) == "upstream"
