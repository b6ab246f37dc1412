"""The frame of every page: styles, and what stands in head and body, in one file that needs nothing else."""

from importlib import resources

from ..markup import Markup, joined, tag


def whole_page(title: str, *body: str, style: str = "", script: str = "") -> str:
    """A document with the style that all pages share, and what a page adds to it."""
    head = joined(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(file_text("style.css") + style)),
    )
    inside = joined(*body, tag("script", Markup(script))) if script else joined(*body)
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', inside), lang='en')}\n"


def file_text(name: str) -> str:
    """A file beside this one."""
    return (resources.files(__package__) / name).read_text()


def section(title: str, *inside: str) -> Markup:
    """A card of the page."""
    return tag("section", tag("h2", title), *inside)
