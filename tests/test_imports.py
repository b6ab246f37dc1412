"""Imports go one way and load no torch before it is needed; each probe is seen to fail where it should."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OFFENCES = (
    ("arachne_runtime/session.py", "import launch.torchrun"),
    ("arachne_runtime/engine/engine.py", "import planner.request"),
    ("planner/request.py", "import arachne_runtime.engine"),
    ("planner/cost/price.py", "import torch"),
    ("planner/search/find.py", "from ..training import labels"),
    ("arachne_runtime/engine/engine.py", "import deepspeed"),
    ("arachne_runtime/session.py", "import lightning"),
    ("planner/exhaustive/pools.py", "from ..search import pack"),
    ("planner/search/judge.py", "from ..explain import what_binds"),
    ("planner/search/sources.py", "from ..policy import Learned"),
    ("arachne_runtime/engine/engine.py", "import arachne_runtime.state"),
    ("arachne_runtime/state/replan.py", "import arachne_runtime.elastic"),
)
"""A module, and a line in it that breaks one contract of pyproject.toml: one for each, in their order."""


def loads(statement: str, module: str) -> bool:
    """Whether ``statement``, alone in a fresh interpreter, has loaded ``module``."""
    code = f"import sys\n{statement}\nprint({module!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    return {"True": True, "False": False}[done.stdout.split()[-1]]


@pytest.mark.parametrize(
    "statement",
    [
        "import arachne_runtime; arachne_runtime.Plan; arachne_runtime.read_plan",
        "import arachne_runtime.plan",
        "import arachne_runtime.batch",
        "import planner; planner.find_plan",
        "import planner.catalog, planner.cost, planner.exhaustive, planner.peers",
        "import planner.training.labels",
        "from launch.cli import app; app()",
        "import arachne_runtime.membership.client, launch.coordinator.server",
        "import launch.elastic.run, launch.elastic.island, launch.elastic.coordinating",
    ],
)
def test_no_torch(statement):
    assert not loads(statement, "torch")


@pytest.mark.parametrize("statement", ["import arachne_runtime.plan", "from launch.cli import app; app()"])
def test_no_numpy_before_it_is_needed(statement):
    assert not loads(statement, "numpy")


def test_the_probe_can_fail():
    assert loads("import arachne_runtime; arachne_runtime.pipelined", "torch")
    assert loads("import numpy", "numpy")


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the packages that may be broken."""
    for package in ("arachne_runtime", "planner", "launch"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def verdicts(tree: Path) -> dict[str, str]:
    """``KEPT`` or ``BROKEN`` by contract."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; lint_imports(no_cache=True)"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return dict(re.findall(r"^(.+) (KEPT|BROKEN)", done.stdout, re.MULTILINE))


def test_every_contract_of_imports_holds_and_can_be_broken(tree):
    settings = tomllib.loads((tree / "pyproject.toml").read_text())
    names = [contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]]
    assert verdicts(tree) == dict.fromkeys(names, "KEPT")
    for name, (file, line) in zip(names, OFFENCES, strict=True):
        kept = (tree / file).read_text()
        (tree / file).write_text(f"{kept}\n{line}\n")
        assert verdicts(tree)[name] == "BROKEN"
        (tree / file).write_text(kept)
