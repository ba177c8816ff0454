"""``python -m build_tools deep-gemm|flash-attention init|status|check|apply|revert``: our change in a submodule."""

from __future__ import annotations

import sys
from pathlib import Path

import click

try:
    from build_tools.submodule_tree import SUBMODULES, SubmoduleTree, submodule_pin
except ModuleNotFoundError as missing:
    package = "GitPython" if missing.name == "git" else missing.name
    sys.exit(f"build_tools: {package} is not installed; in the checkout: pip install '.[test]'")
from xstage_plugin.errors import XStageError

REPOSITORY = Path(__file__).resolve().parent.parent
PROGRAM = "python -m build_tools"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--repository", type=click.Path(path_type=Path), default=REPOSITORY, help="Root of the checkout.")
@click.pass_context
def main(context: click.Context, repository: Path) -> None:
    """Bring a submodule to its pin, and put our change into it or take it out. Builds nothing."""
    context.obj = repository


def submodule_group(submodule: str) -> click.Group:
    """The commands of one submodule."""

    @click.option("--target", default=None, help="Name of the pin; by default the only one of this submodule.")
    @click.pass_context
    def group(context: click.Context, target: str | None) -> None:
        context.obj = SubmoduleTree(context.obj, submodule_pin(submodule, target), f"{PROGRAM} {submodule}")

    made = click.group(submodule, help=f"The submodule {SUBMODULES[submodule]}.")(group)
    for command in (init, status, check, apply, revert):
        made.add_command(command)
    return made


@click.command()
@click.option("--recursive", is_flag=True, help="Also CUTLASS and what else it brings, which compiling needs.")
@click.pass_obj
def init(tree: SubmoduleTree, recursive: bool) -> None:
    """Fetch the submodule at the pinned commit."""
    tree.init(recursive)
    click.echo(tree.status())


@click.command()
@click.pass_obj
def status(tree: SubmoduleTree) -> None:
    """What the working tree is at."""
    click.echo(tree.status())


@click.command()
@click.pass_obj
def check(tree: SubmoduleTree) -> None:
    """Stop unless the tree is at the pin and every pinned file is as pinned, or carries our change."""
    click.echo(tree.check())


@click.command()
@click.pass_obj
def apply(tree: SubmoduleTree) -> None:
    """Place our change. Twice is once."""
    click.echo("\n".join([*(f"wrote {path}" for path in tree.apply()), str(tree.status())]))


@click.command()
@click.pass_obj
def revert(tree: SubmoduleTree) -> None:
    """Take our change out and put the originals back. Twice is once."""
    click.echo("\n".join([*(f"restored {path}" for path in tree.revert()), str(tree.status())]))


for name in SUBMODULES:
    main.add_command(submodule_group(name))


if __name__ == "__main__":
    try:
        sys.exit(main.main(prog_name=PROGRAM, standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        sys.exit(130)
    except (click.ClickException, XStageError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"Error: {' '.join(message.split())}", err=True)
        sys.exit(2)
