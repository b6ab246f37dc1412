"""Imports the optional packages when they are first needed, with an error that says how to install them."""

from importlib import import_module
from typing import Any

from ...errors import UnsupportedEnvironmentError

INSTALL = "pip install 'arachne-hetero[huggingface]'"


def optional(module: str) -> Any:
    """A module of transformers or safetensors; UnsupportedEnvironmentError where it is not installed."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UnsupportedEnvironmentError(
            f"Hugging Face models need {package}, which is not installed: {INSTALL}"
        ) from error
