"""The page "From a torchrun script": its script trains alone and by its plan, and can go on later."""

import contextlib
import importlib.util
import io
import os
import re
from pathlib import Path

import pytest

from arachne_runtime.model import ModelParts
from arachne_runtime.plan.files import read_plan
from arachne_runtime.testing import run_ranks

PAGE = (Path(__file__).parents[1] / "docs" / "training-script.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return found


def script(folder: Path):
    """The page's script as a module."""
    (folder / "train.py").write_text(block("python"))
    spec = importlib.util.spec_from_file_location("page", folder / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(folder: Path, *stops: int) -> list[list[float]]:
    """Numbers that rank 0 printed, over as many sessions as there are stops."""
    page, told = script(folder), io.StringIO()
    kept = folder / f"{'planned' if 'ARACHNE_PLAN' in os.environ else 'alone'}-{len(stops)}"
    kept.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(told):
        for stop in stops:
            page.train(kept, stop)
    return [[float(word) for word in line.split()] for line in told.getvalue().splitlines()]


def by_plan(folder: Path) -> list[list[float]]:
    os.environ["ARACHNE_PLAN"] = str(folder / "plan.json")
    try:
        return trained(folder, 2, 4)
    finally:
        del os.environ["ARACHNE_PLAN"]


def test_the_script_trains_alike_alone_and_by_the_plan_and_goes_on_where_it_stopped(tmp_path):
    whole = trained(tmp_path, 4)
    assert [line[0] for line in whole[:-1]] == [0, 1, 2, 3]
    first, second, evaluated, *others = trained(tmp_path, 2, 4)
    assert [first, second, *others] == whole
    (tmp_path / "plan.json").write_text(block("json"))
    assert len(read_plan(tmp_path / "plan.json").devices) == 3
    planned = run_ranks(3, by_plan, tmp_path)
    assert planned[1:] == [[], []]
    for found, expected in zip(planned[0], [first, second, evaluated, *others], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_its_blocks_are_its_forward(tmp_path):
    page = script(tmp_path)
    ModelParts.of(page.LM).verify(page.workload.batch(3))
