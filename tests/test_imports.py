"""Plans and their reading load no torch; each probe is seen to fail where it should."""

import re
import subprocess
import sys

import pytest


def loads(statement: str, module: str) -> bool:
    """Whether ``statement``, alone in a fresh interpreter, has loaded ``module``."""
    code = f"import sys\n{statement}\nprint({module!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return {"True": True, "False": False}[done.stdout.split()[-1]]


@pytest.mark.parametrize(
    "statement",
    [
        "import arachne_runtime",
        "import arachne_runtime.plan",
        "import planner",
        "import planner.cost, planner.catalog",
        "from launch.cli import app; app()",
    ],
)
def test_no_torch(statement):
    assert not loads(statement, "torch")


@pytest.mark.parametrize("statement", ["import arachne_runtime.plan", "from launch.cli import app; app()"])
def test_no_numpy_before_it_is_needed(statement):
    assert not loads(statement, "numpy")


def test_the_probe_can_fail():
    assert loads("import torch", "torch")
    assert loads("import arachne_runtime.engine; import torch", "torch")
    assert loads("import numpy", "numpy")


NOUNS = """
Action BlockSpec BlockTiming Cluster Cost Document Line LinkPoint LinkScope LinkTiming MadeBy ModelSpec
Network NetworkPair Node NodeEntry ParameterBytes Pipeline Plan Predicted Profile Record RecordKind Replica
ScheduleKind Source Stage TpCommunication UpdateTiming Work
check_cluster check_model check_plan check_profile describe digest encode largest_remainder read_cluster
read_model read_plan read_profile water_fill water_fill_table write
"""


def test_the_public_names_of_the_nouns_are_frozen():
    import arachne_runtime.plan as nouns

    assert list(nouns.__all__) == list(re.findall(r"\w+", NOUNS))
    for name in nouns.__all__:
        assert getattr(nouns, name) is not None
