"""The command ``arachne``: finds the verbs and maps errors to exit codes; a mistake shows no traceback."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Annotated, Any

import typer

from arachne_runtime import __version__
from arachne_runtime.errors import ArachneError, ExitCode

VERBS: tuple[str, ...] = (
    "profile",
    "plan",
    "check",
    "show",
    "run",
    "status",
    "compare",
    "simulate",
    "learn",
    "lab",
    "export",
    "demo",
)
"""Each is a module of ``launch.verbs`` with a ``command``; heavy imports belong inside that function."""


def app() -> typer.Typer:
    """The typer application with every verb."""
    application = typer.Typer(
        name="arachne",
        help="Train one PyTorch model on unequal devices, as fast as those devices allow.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help and errors: the same on a terminal and in a pipe
    )
    application.callback(help=application.info.help)(_options)
    for verb in VERBS:
        module = import_module(f".verbs.{verb}", __package__)
        settings = getattr(module, "SETTINGS", None)
        application.command(verb, context_settings=settings)(_exiting(module.command))
    return application


def main() -> None:
    """Entry point: exits with the codes of ``ExitCode``; typer itself exits with 2 on wrong usage."""
    try:
        app()(prog_name="arachne")
    except ArachneError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a folder that is missing or closed to us: the text names it
        print(f"arachne: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else its buffer fails again at exit
        sys.exit(ExitCode.ENVIRONMENT)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"arachne {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """What stands before a verb. Its presence also keeps verbs apart when there is only one."""


def _exiting(command: Callable[..., int | None]) -> Callable[..., None]:
    """A verb's returned number becomes the exit code."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        status = command(*args, **kwargs)
        sys.stdout.flush()  # here a full disk is still an error of ours
        if status:
            raise typer.Exit(status)

    return run
