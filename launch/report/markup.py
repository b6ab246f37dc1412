"""HTML as text, escaped: what is not ``Markup`` is told, never interpreted."""

from collections.abc import Iterable
from html import escape

VOID = ("rect", "meta", "br", "col")
"""Elements that are written without an end tag."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *inside: str | Iterable[str], **attributes: object) -> Markup:
    """An element; ``class_`` is ``class``, ``data_x`` is ``data-x``; None is left out."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{named}/>" if name == "rect" else f"<{name}{named}>")
    return Markup(f"<{name}{named}>{joined(*inside)}</{name}>")


def joined(*parts: str | Iterable[str]) -> Markup:
    """Several pieces after one another; texts are escaped."""
    flat: list[str] = []
    for part in parts:
        if isinstance(part, Markup):
            flat.append(part)
        elif isinstance(part, str):
            flat.append(escape(part))
        else:
            flat.append(joined(*part))
    return Markup("".join(flat))
