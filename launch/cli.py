"""The command ``arachne``: finds the verbs and maps errors to exit codes; a mistake shows no traceback."""

import sys
from importlib import import_module

import click
import typer

from arachne_runtime.errors import ArachneError, ExitCode

VERBS: tuple[str, ...] = ()
"""Each is a module of ``launch.verbs`` with a ``command``; heavy imports belong inside that function."""


def app() -> typer.Typer:
    """The typer application with every verb."""
    application = typer.Typer(
        name="arachne",
        help="Train one PyTorch model on unequal devices, as fast as those devices allow.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for verb in VERBS:
        module = import_module(f".verbs.{verb}", __package__)
        settings = getattr(module, "SETTINGS", None)
        application.command(verb, context_settings=settings)(module.command)
    return application


def main() -> None:
    """Entry point: exits with the codes of ``ExitCode``."""
    try:
        status = app()(standalone_mode=False)
    except ArachneError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else ExitCode.FINE)
