"""Every code block of README.md works as it is written: its commands, its files and its Python."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import arachne_runtime
from arachne_runtime.plan.files import read_cluster
from launch.cli import VERBS
from launch.hosts import read_hosts
from launch.lab import read_lab

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
READERS: dict[str, Callable[[Path], Any]] = {"cluster": read_cluster, "lab": read_lab, "hosts": read_hosts}
ARACHNE = [sys.executable, "-m", "launch"]
SAMPLES = ("--samples", "1")
"""Beside each profile: what a short test can measure."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """The indented lines, with their continuations, without their comments."""
    joined = re.sub(r"\\\n\s+", "", README)
    return [line.split("#")[0].strip() for line in re.findall(r"^    (\w+ .*)$", joined, re.MULTILINE)]


def arachne_commands() -> Iterator[list[str]]:
    for line in commands():
        if line.startswith("arachne "):
            yield shlex.split(line)


def documents() -> dict[str, str]:
    """The text of each TOML block by the noun of its format."""
    named = [(re.match(r'format = "arachne\.(\w+)/1"', text), text) for text in blocks("toml")]
    return {match[1]: text for match, text in named if match}


def run(words: list[str], folder: Path) -> str:
    """What a command prints; each ``arachne`` in it, also behind ``--``, is the one of this tree."""
    line = [part for word in words for part in (ARACHNE if word == "arachne" else [word])]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader of the README stands: its files beside the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for noun, text in documents().items():
        (tmp_path / f"{noun}.toml").write_text(text)
    return tmp_path


def test_every_toml_block_is_read_by_its_reader(folder: Path) -> None:
    assert len(documents()) == len(blocks("toml"))
    assert set(documents()) == set(READERS)
    for noun, read in READERS.items():
        assert read(folder / f"{noun}.toml").format == f"arachne.{noun}/1"


def test_the_hosts_are_those_of_the_cluster(folder: Path) -> None:
    nodes = {node.name for node in read_cluster(folder / "cluster.toml").nodes}
    assert set(read_hosts(folder / "hosts.toml").node) == nodes


def test_python_blocks_compile_and_use_public_names() -> None:
    used = set()
    for source in blocks("python"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.add((node.value.id, node.attr))
    assert {name for owner, name in used if owner == "arachne"} <= set(arachne_runtime.__all__)
    for owner, cls in (
        ("session", arachne_runtime.Session),
        ("engine", arachne_runtime.Engine),
    ):
        assert {name for variable, name in used if variable == owner} <= set(dir(cls))
    report = {name for variable, name in used if variable == "report"}
    assert report <= set(arachne_runtime.StepReport.__dataclass_fields__)
    assert {owner for owner, _ in used} >= {"arachne", "session", "engine", "report"}


def test_every_command_names_a_verb_and_its_options() -> None:
    found = list(arachne_commands())
    assert len(found) >= 8
    used: dict[str, set[str]] = {}
    for verb, options in (call for words in found for call in _calls(words)):
        used.setdefault(verb, set()).update(options)
    assert set(used) <= set(VERBS)
    for verb, options in used.items():
        told = set(re.findall(r"--[a-z-]+", run(["arachne", verb, "--help"], ROOT)))
        assert set(options) <= told, verb


def _calls(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each ``arachne VERB`` of a line with its own options."""
    for start, word in enumerate(words):
        if word == "arachne":
            rest = words[start + 1 :]
            own = rest[: rest.index("--")] if "--" in rest else rest
            yield rest[0], [option for option in own if option.startswith("--")]


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [line.split()[1] for line in commands() if line.startswith("make ")]
    assert targets == ["demo", "test"]
    assert all(f"\n{target}:" in makefile for target in targets)


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)#]+)\)", README)
    assert links
    assert [path for path in links if "://" not in path and not (ROOT / path).exists()] == []


def test_the_catalog_is_planned_checked_and_shown(folder: Path) -> None:
    catalog = next(words for words in arachne_commands() if "opt-350m" in words)
    run([*catalog, "--out", "plan.json", "--time-budget", "0.5"], folder)
    simple = [words for words in arachne_commands() if words[1] in ("check", "show")]
    assert [words[1] for words in simple] == ["check", "show"]
    for words in simple:
        assert run(words, folder)


def test_the_lab_measures_plans_and_trains_the_example(folder: Path) -> None:
    """The README's lines, with a small model, few samples, no network (it needs root), two steps."""
    gpt = folder / "examples" / "gpt.py"
    gpt.write_text(re.sub(r"(sequence|width|heads|layers): int = \d+", r"\1: int = 2", gpt.read_text()))
    text, _, _ = documents()["lab"].partition("[network]")
    (folder / "lab.toml").write_text(
        text.replace("share = 0.8", "share = 1.0").replace("share = 0.2", "share = 0.99")
    )
    lines = list(arachne_commands())
    profile, plan, train = lines[-3:]
    assert [words[1] for words in (profile, plan, train)] == ["lab", "plan", "lab"]
    run([*profile, *SAMPLES], folder)
    run([*plan, "--time-budget", "1"], folder)
    assert "step    1" in run([*train, "--steps", "2"], folder)
