"""Options that several verbs have, with the same words."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")]

ProfileOfModel = Annotated[
    str | None, typer.Option(help="A profile.json, or a name of the catalog (default: the model's).")
]

MODEL_OF_PLAN = "Its model: a name of the catalog, a model.json, or a config.json."
"""Help of ``--model`` where a plan is given, required or not."""
