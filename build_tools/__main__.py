"""``python -m build_tools init|status|check|apply|revert``: our headers in the DeepGEMM submodule's working tree."""

from __future__ import annotations

import sys
from pathlib import Path

import click

try:
    from build_tools.deep_gemm_tree import DeepGemmTree, submodule_pin
except ModuleNotFoundError as missing:
    package = "GitPython" if missing.name == "git" else missing.name
    sys.exit(f"build_tools: {package} is not installed; in the checkout: pip install '.[test]'")
from xstage_plugin.errors import XStageError

REPOSITORY = Path(__file__).resolve().parent.parent


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--repository", type=click.Path(path_type=Path), default=REPOSITORY, help="Root of the checkout.")
@click.option("--target", default=None, help="Name of the pin; by default the only submodule of DeepGEMM.")
@click.pass_context
def main(context: click.Context, repository: Path, target: str | None) -> None:
    """Bring the DeepGEMM submodule to its pin, and put our headers into it or take them out. Builds nothing."""
    context.obj = DeepGemmTree(repository, submodule_pin(target))


@main.command()
@click.option("--recursive", is_flag=True, help="Also CUTLASS and what else it brings, which compiling needs.")
@click.pass_obj
def init(tree: DeepGemmTree, recursive: bool) -> None:
    """Fetch the submodule at the pinned commit."""
    tree.init(recursive)
    click.echo(tree.status())


@main.command()
@click.pass_obj
def status(tree: DeepGemmTree) -> None:
    """What the working tree is at."""
    click.echo(tree.status())


@main.command()
@click.pass_obj
def check(tree: DeepGemmTree) -> None:
    """Stop unless the tree is at the pin and every pinned file is as pinned, or carries our change."""
    click.echo(tree.check())


@main.command()
@click.pass_obj
def apply(tree: DeepGemmTree) -> None:
    """Place our headers; the original stands beside its shadow. Twice is once."""
    click.echo("\n".join([*(f"wrote {path}" for path in tree.apply()), str(tree.status())]))


@main.command()
@click.pass_obj
def revert(tree: DeepGemmTree) -> None:
    """Take our headers out and put the original back. Twice is once."""
    click.echo("\n".join([*(f"restored {path}" for path in tree.revert()), str(tree.status())]))


if __name__ == "__main__":
    try:
        sys.exit(main.main(prog_name="python -m build_tools", standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        sys.exit(130)
    except (click.ClickException, XStageError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"Error: {' '.join(message.split())}", err=True)
        sys.exit(2)
