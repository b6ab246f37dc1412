"""Options that several verbs have, with the same words."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")]

ProfileOfModel = Annotated[
    str | None, typer.Option(help="A profile.json, or a name of the catalog (default: the model's).")
]

MODEL = "A name of the catalog, a folder of `arachne profile`, or a config.json."
"""Help of ``--model``, required or not."""
MODEL_OF_PLAN = f"Its model: {MODEL[0].lower()}{MODEL[1:]}"
"""The same where a plan is given."""
