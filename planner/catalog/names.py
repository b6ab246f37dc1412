"""What is said of a name that the catalog does not have: the nearest ones it has, then all."""

from collections.abc import Sequence

from arachne_runtime.errors import UsageError

MOST_NEAR = 3


def unknown(what: str, name: str, listed: str, known: Sequence[str]) -> UsageError:
    """``no model named 'Llama-3-8B'; did you mean llama-3-8b? known: ...``, ``listed`` being the word."""
    near = _near(name, known)
    asked = f"did you mean {', '.join(near)}? " if near else ""
    return UsageError(f"{what} named {name!r}; {asked}{listed}: {', '.join(known)}")


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Names that go on where this one ends, else alike ones; no difference is made of capitals."""
    from difflib import get_close_matches  # only a mistake pays for it

    by_small = {each.lower(): each for each in known}
    small = name.lower()
    longer = [each for low, each in by_small.items() if small and low.startswith(small)]
    if longer:
        return longer[:MOST_NEAR]
    return [by_small[low] for low in get_close_matches(small[:80], by_small, n=MOST_NEAR, cutoff=0.75)]
