"""``python -m launch`` is ``arachne``."""

from .cli import main

main()
