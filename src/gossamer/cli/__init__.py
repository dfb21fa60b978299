"""The command line. `pip install 'gossamer[cli]'` brings what it needs."""

import sys


def main() -> None:
    """The entry point: says how to install what is missing, and turns our errors into one line and exit code 2."""
    try:
        import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import typer  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        sys.exit(f"the command line needs {error.name}: pip install 'gossamer[cli]'")
    from gossamer.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
