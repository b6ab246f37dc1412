"""Writes planner/catalog/data/*.json from a folder that holds sailor/, zorse/ and aceso/."""

import argparse
import re
from pathlib import Path

import msgspec

import planner.catalog
from planner.catalog.packed import Entry

from .sailor_entries import gpt_neo, llama_3, opt_30b, opt_350m
from .zorse_entries import llamas


def write(entry: Entry, folder: Path) -> Path:
    """One file: a line for each row, so that a change shows as a change of rows."""
    text = msgspec.json.format(msgspec.json.encode(entry), indent=1).decode()
    flat = re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    rows = re.sub(r"\{[^{}]*\}", lambda found: re.sub(r"\s+", " ", found[0]), flat)
    path = folder / f"{entry.name}.json"
    path.write_text(rows + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds sailor/, zorse/ and aceso/")
    folder = parser.parse_args().folder
    sailor = (opt_350m(folder), opt_30b(folder), gpt_neo(folder), llama_3(folder))
    for entry in (*sailor, *llamas(folder)):
        path = write(entry, Path(planner.catalog.__file__).parent / "data")
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
