"""A plan as one HTML page that needs nothing else: no network, no library, light and dark."""

from .render import render_page

__all__ = ["render_page"]
