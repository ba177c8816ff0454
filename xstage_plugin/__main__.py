"""Entry of ``xstage`` and ``python -m xstage_plugin``: so small that an interrupt during the imports ends quietly too."""

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from xstage_plugin.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
