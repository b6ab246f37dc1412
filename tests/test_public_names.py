"""What ``import arachne_runtime`` gives: these names, no more, and no torch."""

import subprocess
import sys

import pytest

import arachne_runtime

NAMES = """
ArachneError Cluster Engine InvalidFileError ModelError ModelParts ModelSpec NoFeasiblePlanError
NotMeasuredError Pipeline Plan Profile Replica ScheduleKind Session Stage StepBatch StepReport
UnsupportedEnvironmentError UnsupportedPlanError UsageError WorkerFailedError Workload __version__ pipelined
read_cluster read_model read_plan read_profile
"""

PROBE = "import sys; {use}; sys.exit('torch' in sys.modules)"


def loads_torch(use: str) -> bool:
    return subprocess.run([sys.executable, "-c", PROBE.format(use=use)], check=False).returncode == 1


def test_public_names_are_frozen() -> None:
    assert arachne_runtime.__all__ == NAMES.split()
    for name in arachne_runtime.__all__:
        assert getattr(arachne_runtime, name) is not None
    assert set(arachne_runtime.__all__) <= set(dir(arachne_runtime))
    with pytest.raises(AttributeError, match="'arachne_runtime' has no attribute 'Sesion'"):
        _ = arachne_runtime.Sesion


def test_importing_the_runtime_does_not_import_torch() -> None:
    assert not loads_torch("import arachne_runtime; arachne_runtime.Plan; arachne_runtime.read_plan")


def test_the_probe_can_fail() -> None:
    assert loads_torch("import arachne_runtime; arachne_runtime.pipelined")
