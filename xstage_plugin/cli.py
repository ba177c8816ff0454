"""The command line: ``xstage`` and ``python -m xstage_plugin``. Parses, calls the library, prints; decides nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from xstage_plugin import __version__, env, report
from xstage_plugin.attention.advisor import AttentionDecision, advise_attention
from xstage_plugin.attention.workload import AttentionWorkload
from xstage_plugin.bundled import looks_like_file
from xstage_plugin.burst_gap.catalog import bundled_platforms, load_platform
from xstage_plugin.burst_gap.platform_model import STORES, PlatformModel
from xstage_plugin.burst_gap.topology import TOPOLOGIES
from xstage_plugin.burst_gap.units import KIB
from xstage_plugin.checks import not_negative, positive, positive_int, shown
from xstage_plugin.errors import InvalidInputError, XStageError
from xstage_plugin.moe.advisor import ScheduleDecision, advise_moe
from xstage_plugin.moe.routing import DEFAULT_SKEW, MOST_EXPERTS, Routing, balanced_routing, read_routing, skewed_routing
from xstage_plugin.moe.shapes import ExpertShape, bundled_shapes, load_shape
from xstage_plugin.moe.workload import MoeWorkload

Command = TypeVar("Command", bound=Callable[..., Any])

USAGE_ERROR = 2
INTERNAL_ERROR = 1
INTERRUPTED = 130
# The overview's batch: what one rank of a serving node prefills at once. Heads are the paper's FA4 configuration.
OVERVIEW_RANKS, OVERVIEW_TOKENS_PER_RANK = 8, 8192
OVERVIEW_SEQ_LENS = (8192, 16384, 32768, 65536)
OVERVIEW_HEADS, OVERVIEW_HEAD_DIM = 4, 128


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 2 with one line on stderr for wrong input, 130 when interrupted, 1 for our faults."""
    if sys.stdout is None:  # closed before we began
        sys.exit(_complain("output cannot be written: stdout is closed"))
    try:
        code = cli.main(args=args, prog_name="xstage", standalone_mode=False) or 0
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except click.ClickException as error:
        code = _complain(error.format_message())
    except XStageError as error:
        code = _complain(str(error))
    except BrokenPipeError:  # the reader went away (| head); nothing of ours is wrong
        code = 0
        _drop_stdout()
    except OSError as error:  # a full disk or a closed stream behind stdout
        code = _complain(f"output cannot be written: {error.strerror or error}")
        _drop_stdout()
    except Exception as error:
        if env.debug():
            raise
        text = str(error).splitlines()[0] if str(error) else ""
        _complain(f"internal error, {type(error).__name__}: {text[:200]} (run with {env.DEBUG}=1 for the traceback)")
        code = INTERNAL_ERROR
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> int:
    with contextlib.suppress(OSError):
        click.echo(f"xstage: error: {' '.join(message.split())}", err=True)
    return USAGE_ERROR


def _drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's own flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else.")(command)


def platform_option(command: Command) -> Command:
    return click.option(
        "--platform",
        "platform_name",
        metavar="P",
        default=env.default_platform,
        show_default=f"${env.PLATFORM}, else {env.DEFAULT_PLATFORM}",
        help="Platform model: a bundled name (see `xstage platforms`) or a TOML file.",
    )(command)


def routing_options(command: Command) -> Command:
    command = click.option(
        "--skew", type=float, default=DEFAULT_SKEW, show_default=True, help="Zipf exponent of --routing skewed."
    )(command)
    return click.option(
        "--routing",
        default="balanced",
        show_default=True,
        metavar="balanced|skewed|FILE",
        help="How tokens spread over experts; FILE holds one count per expert, or topk ids with -1 as padding "
        "(.json, .npy, or text).",
    )(command)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="xstage")
@click.pass_context
def cli(context: click.Context) -> None:
    """How far a GPU kernel runs ahead of its own remote stores (X-Stage), and how to schedule by it.

    `xstage advise` is the main job: it says, for MegaMoE and for Ulysses attention, which schedule to run and why.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.group(invoke_without_command=True)
@platform_option
@click.option("--ranks", type=int, default=OVERVIEW_RANKS, show_default=True, help="GPUs that share the layer.")
@click.option(
    "--tokens-per-rank",
    type=int,
    default=OVERVIEW_TOKENS_PER_RANK,
    show_default=True,
    help="Tokens that each rank brings.",
)
@routing_options
@json_option
@click.pass_context
def advise(
    context: click.Context,
    platform_name: str,
    ranks: int,
    tokens_per_rank: int,
    routing: str,
    skew: float,
    as_json: bool,
) -> None:
    """Say which schedule to run, and why.

    Alone: every bundled expert shape, and attention from 8K to 64K tokens. `advise moe` and `advise attention` answer
    for one workload.
    """
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"give the options after '{context.invoked_subcommand}', not before it")
        return
    platform = load_platform(platform_name)
    moe = _overview_moe(platform, positive_int("ranks", ranks), tokens_per_rank, routing, skew)
    attention = _overview_attention(platform, ranks)
    if as_json:
        report.print_json(
            {
                "platform": platform.name,
                "ranks": ranks,
                "tokens_per_rank": tokens_per_rank,
                "moe": [{"model": key, **report.moe_document(decision)} for key, decision in moe],
                "attention": [{"seq_len": m, **report.attention_document(decision)} for m, decision in attention],
            }
        )
    else:
        setting = f"{ranks} ranks, {tokens_per_rank} tokens a rank, {moe[0][1].sources['routing']} routing"
        report.print_overview(platform, moe, attention, setting, f"{OVERVIEW_HEADS} heads of {OVERVIEW_HEAD_DIM} a rank")


@advise.command("moe")
@platform_option
@click.option("--model", metavar="M", help="Expert shape: a bundled name (see `xstage models`) or a TOML file.")
@click.option("--hidden", type=int, metavar="H", help="Hidden dimension, in place of --model.")
@click.option("--intermediate", type=int, metavar="I", help="Intermediate dimension of one expert.")
@click.option("--experts", type=int, metavar="E", help="Routed experts over all ranks.")
@click.option("--topk", type=int, metavar="K", help="Experts per token.")
@click.option("--tokens-per-rank", type=int, required=True, metavar="T", help="Tokens that each rank brings.")
@click.option("--ranks", type=int, required=True, metavar="N", help="Expert-parallel ranks (GPUs).")
@routing_options
@click.option("--weight-bits", type=int, default=8, show_default=True, help="Bits of an expert weight: 8 or 4.")
@json_option
def advise_moe_command(
    platform_name: str,
    model: str | None,
    hidden: int | None,
    intermediate: int | None,
    experts: int | None,
    topk: int | None,
    tokens_per_rank: int,
    ranks: int,
    routing: str,
    skew: float,
    weight_bits: int,
    as_json: bool,
) -> None:
    """Wave or interleaved for one MegaMoE layer."""
    platform = load_platform(platform_name)
    dimensions = {"--hidden": hidden, "--intermediate": intermediate, "--experts": experts, "--topk": topk}
    given = [name for name, value in dimensions.items() if value is not None]
    if model is not None:
        if given:
            raise click.UsageError(f"--model and {given[0]} exclude each other; give the one or the other")
        workload = _workload(load_shape(model), ranks, tokens_per_rank, routing, skew)
    elif hidden is None or intermediate is None or experts is None or topk is None:
        missing = [name for name in dimensions if name not in given]
        raise click.UsageError(f"give --model, or all four dimensions; missing: {', '.join(missing)}")
    else:
        spread = _routing(routing, positive_int("experts", experts, MOST_EXPERTS), positive_int("topk", topk), skew)
        workload = MoeWorkload(
            hidden, intermediate, experts, topk, ranks, positive_int("tokens per rank", tokens_per_rank), spread
        )
    decision = advise_moe(platform, workload, weight_bits=weight_bits)
    if as_json:
        report.print_json(report.moe_document(decision))
    else:
        report.print_moe(platform, workload, decision)


@advise.command("attention")
@platform_option
@click.option("--seq-len", type=int, required=True, metavar="M", help="Tokens of the whole sequence.")
@click.option("--heads-per-rank", type=int, required=True, metavar="h", help="Query heads that one rank computes.")
@click.option("--head-dim", type=int, required=True, metavar="d", help="Head dimension.")
@click.option("--ranks", type=int, required=True, metavar="N", help="Ranks that share the sequence.")
@click.option(
    "--qloop-us-per-kv-tile",
    type=float,
    metavar="s",
    help="Measured time of a Q-loop per KV tile (sigma of equation 20); estimated where not given.",
)
@json_option
def advise_attention_command(
    platform_name: str,
    seq_len: int,
    heads_per_rank: int,
    head_dim: int,
    ranks: int,
    qloop_us_per_kv_tile: float | None,
    as_json: bool,
) -> None:
    """Piggyback or serial for one Ulysses attention layer."""
    platform = load_platform(platform_name)
    workload = AttentionWorkload(seq_len, heads_per_rank, head_dim, ranks)
    decision = advise_attention(platform, workload, qloop_us_per_kv_tile=qloop_us_per_kv_tile)
    if as_json:
        report.print_json(report.attention_document(decision))
    else:
        report.print_attention(platform, workload, decision)


@cli.command("model")
@platform_option
@click.option("--producers", type=int, required=True, metavar="K", help="Concurrent producers (CTAs that store).")
@click.option("--burst-kib", type=float, required=True, metavar="B", help="KiB that each producer stores in a burst.")
@click.option("--gap-us", type=float, default=0.0, show_default=True, metavar="G", help="Microseconds without stores.")
@json_option
def model_command(platform_name: str, producers: int, burst_kib: float, gap_us: float, as_json: bool) -> None:
    """Evaluate the Burst-Gap model at one point (equations 1 to 7, 10)."""
    platform = load_platform(platform_name)
    positive_int("producers", producers)
    burst_bytes = positive("burst in KiB", burst_kib) * KIB
    not_negative("gap in us", gap_us)
    document = report.model_document(platform, producers, burst_bytes, gap_us)
    if as_json:
        report.print_json(document)
    else:
        report.print_model(platform, document)


@cli.command()
@click.argument("samples", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE.toml", help="Platform file to write.")
@click.option("--device", metavar="GPU", help="Bundled GPU (h100, h200, b200); default: what the samples name.")
@click.option("--store", type=click.Choice(STORES), help="How the samples stored; default: what they say, else st.v4.")
@click.option("--description", help="One line for the platform file; default: what the samples say.")
@json_option
def fit(samples: Path, out: Path, device: str | None, store: str | None, description: str | None, as_json: bool) -> None:
    """Fit a platform model to measured samples.

    SAMPLES is JSON. The model is judged by the gap sweep, which the fit does not see.

    The samples are copied beside the model, where `xstage plot platform` finds them.
    """
    from xstage_plugin.burst_gap.fit_file import fit_samples_file

    result = fit_samples_file(samples, out, device=device, store=store, description=description)
    if as_json:
        report.print_json(report.fit_document(result, out))
    else:
        report.print_fit(result, out)


@cli.command()
@click.option("--devices", metavar="0,1", help="CUDA devices, the first one stores; default: all.")
@click.option("--quick", "mode", flag_value="quick", default="quick", help="Under 20 seconds (default).")
@click.option("--full", "mode", flag_value="full", help="More points, four rounds; under 3 minutes.")
@click.option("--store", type=click.Choice(STORES), default="st.v4", show_default=True, help="How the producers store.")
@click.option(
    "--topology", type=click.Choice(TOPOLOGIES), default="one-way", show_default=True, help="Who stores to whom in the model."
)
@click.option("--threads", type=int, default=256, show_default=True, help="Threads of a producer: whole warps, at most 512.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE.toml", help="Platform file to write.")
@click.option("--description", help="One line for the platform file.")
@json_option
def calibrate(
    devices: str | None,
    mode: str,
    store: str,
    topology: str,
    threads: int,
    out: Path,
    description: str | None,
    as_json: bool,
) -> None:
    """Measure this node's platform model on its GPUs.

    Writes the model to FILE.toml and the raw samples beside it. Runs as one process, or under torchrun with one process a
    GPU. A run that something else disturbed writes no model.
    """
    from xstage_plugin.burst_gap.calibrate_file import calibrate_to_file

    command = f"xstage calibrate --{mode} --store {store} --topology {topology} --threads {threads}"
    command += f" --devices {devices}" if devices else ""
    with report.progress_bar() as progress:
        result = calibrate_to_file(
            out,
            devices=None if devices is None else _device_list(devices),
            mode=mode,
            store=store,
            topology=topology,
            command=command,
            progress=progress,
            description=description,
            num_threads=threads,
            say=lambda line: click.echo(line, err=as_json),
        )
    if result is None:  # another rank of torchrun
        return
    if as_json:
        report.print_json(report.calibration_document(result))
    else:
        report.print_calibration(result)


@cli.group(invoke_without_command=True)
@click.pass_context
def overlay(context: click.Context) -> None:
    """The change to DeepGEMM that carries the schedules and the shared pulls.

    An overlay is a folder of links to the installed headers, with ours in place of some and lines of ours in others. The
    installed library stays as it is; `xstage_plugin.register()` points it at the overlay for one process.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@overlay.command("status")
@json_option
def overlay_status(as_json: bool) -> None:
    """What is installed, whether it is what we pinned, and which overlays are built."""
    from xstage_plugin.upstream.report import status_document

    document = status_document()
    if as_json:
        report.print_json(document)
    else:
        report.print_overlay_status(document)


@overlay.command("build")
@json_option
def overlay_build(as_json: bool) -> None:
    """Check the installed library against its pin and build its overlay in the user's cache."""
    from xstage_plugin.upstream.activate import prepare
    from xstage_plugin.upstream.check import unrun_note
    from xstage_plugin.upstream.pins import Status

    prepared = prepare()
    root = str(prepared.overlay.root) if prepared.overlay else None
    built = prepared.overlay is not None and prepared.overlay.built_now
    if as_json:
        status = prepared.pin.status.value
        report.print_json({"target": prepared.pin.name, "status": status, "overlay": root, "built_now": built})
    else:
        what = "built" if built else "there already:"
        click.echo(f"{prepared.pin.name}: {what} {root or '(the tree carries the change itself)'}")
        if prepared.pin.status is Status.UNRUN:
            click.echo(unrun_note(prepared.pin))


@overlay.command("clean")
@json_option
def overlay_clean(as_json: bool) -> None:
    """Remove the overlays from the user's cache, and nothing else there."""
    from xstage_plugin.upstream.overlay import clean

    cleaned = clean()
    if as_json:
        report.print_json({"removed": [str(path) for path in cleaned.removed], "kept": [str(path) for path in cleaned.kept]})
    else:
        click.echo(f"removed {len(cleaned.removed)} overlays" + (f", kept {len(cleaned.kept)}" if cleaned.kept else ""))


@cli.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this machine has, and whether it can be calibrated.

    GPUs, peer access, NVLink, driver, packages, upstream libraries.
    """
    from xstage_plugin.doctor import diagnose, diagnosis_document

    diagnosis = diagnose()
    if as_json:
        report.print_json(diagnosis_document(diagnosis))
    else:
        report.print_diagnosis(diagnosis)


@cli.command()
@json_option
def platforms(as_json: bool) -> None:
    """List the bundled platform models."""
    models = [load_platform(name) for name in bundled_platforms()]
    if as_json:
        report.print_json([report.platform_summary(model) for model in models])
    else:
        report.print_platforms(models)


@cli.command()
@json_option
def models(as_json: bool) -> None:
    """List the bundled expert shapes."""
    shapes = bundled_shapes()
    if as_json:
        report.print_json([report.shape_document(shape) for shape in shapes])
    else:
        report.print_shapes(shapes)


@cli.group(invoke_without_command=True)
@click.pass_context
def plot(context: click.Context) -> None:
    """Draw a platform or the advice (PNG, SVG, PDF)."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@plot.command("platform")
@click.argument("platform_name", metavar="P")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Picture to write.")
@json_option
def plot_platform(platform_name: str, out: Path, as_json: bool) -> None:
    """The four panels of the paper's Figure 3 for platform P; samples as points, model as line."""
    from xstage_plugin.burst_gap.catalog import load_samples_of
    from xstage_plugin.plots import platform_figure, save_figure

    model, samples = load_platform(platform_name), load_samples_of(platform_name)
    save_figure(lambda: platform_figure(model, samples), out)
    _say_written(out, as_json, {"platform": model.name, "with_samples": samples is not None})


@plot.command("advice")
@platform_option
@click.option("--ranks", type=int, default=OVERVIEW_RANKS, show_default=True, help="GPUs that share the layer.")
@click.option(
    "--tokens-per-rank", type=int, default=OVERVIEW_TOKENS_PER_RANK, show_default=True, help="Tokens that each rank brings."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Picture to write.")
@json_option
def plot_advice(platform_name: str, ranks: int, tokens_per_rank: int, out: Path, as_json: bool) -> None:
    """What `xstage advise` says, as a picture: stall per tile under both schedules, attention's residual over length."""
    from xstage_plugin.plots import advice_figure, save_figure

    platform = load_platform(platform_name)
    moe = _overview_moe(platform, positive_int("ranks", ranks), tokens_per_rank, "balanced", 0.0)
    attention = _overview_attention(platform, ranks)
    setting = f"{ranks} ranks, {tokens_per_rank} tokens a rank"
    save_figure(lambda: advice_figure(platform, moe, attention, setting), out)
    _say_written(out, as_json, {"platform": platform.name, "ranks": ranks, "tokens_per_rank": tokens_per_rank})


def _device_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"devices is {text!r}; expected whole numbers with commas, as 0,1") from None


def _say_written(out: Path, as_json: bool, facts: dict[str, Any]) -> None:
    if as_json:
        report.print_json({"out": str(out), **facts})
    else:
        click.echo(f"wrote {out}")


def _overview_moe(
    platform: PlatformModel, ranks: int, tokens_per_rank: int, routing: str, skew: float
) -> list[tuple[str, ScheduleDecision]]:
    """Every bundled shape that so many ranks can share."""
    shapes = [shape for shape in bundled_shapes() if shape.experts % ranks == 0]
    if not shapes:
        raise InvalidInputError(f"ranks is {ranks}; expected a number that divides the experts of a bundled shape")
    return [(shape.key, advise_moe(platform, _workload(shape, ranks, tokens_per_rank, routing, skew))) for shape in shapes]


def _overview_attention(platform: PlatformModel, ranks: int) -> list[tuple[int, AttentionDecision]]:
    return [
        (m, advise_attention(platform, AttentionWorkload(m, OVERVIEW_HEADS, OVERVIEW_HEAD_DIM, ranks)))
        for m in OVERVIEW_SEQ_LENS
    ]


def _workload(shape: ExpertShape, ranks: int, tokens_per_rank: int, routing: str, skew: float) -> MoeWorkload:
    spread = _routing(routing, shape.experts, shape.topk, skew)
    return MoeWorkload(
        shape.hidden,
        shape.intermediate,
        shape.experts,
        shape.topk,
        ranks,
        positive_int("tokens per rank", tokens_per_rank),
        spread,
        shape.key if shape.bundled else None,
    )


def _routing(routing: str, experts: int, topk: int, skew: float) -> Routing:
    not_negative("skew", skew)
    if routing == "balanced":
        return balanced_routing(experts)
    if routing == "skewed":
        return skewed_routing(experts, topk, skew)
    if not looks_like_file(routing):
        raise InvalidInputError(f"routing is {shown(routing)}; expected balanced, skewed, or a file of counts or topk ids")
    return read_routing(Path(routing), experts, topk)
