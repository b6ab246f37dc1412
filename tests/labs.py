"""Labs that tests make, and what this machine must have for them."""

import os
from pathlib import Path

import pytest

from launch.lab import Lab, LabDevice, cgroup

REPOSITORY = Path(__file__).parents[1]


def has_quotas() -> bool:
    try:
        groups = cgroup.create(cgroup.own_hierarchy(), f"arachne-lab-{os.getpid()}-probe", [0.5])
    except Exception:
        return False
    cgroup.remove([*groups, groups[0].parent])
    return True


needs_quotas = pytest.mark.skipif(not has_quotas(), reason="needs a CPU controller that this user may write")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

LAB = """
format = "arachne.lab/1"
[[device]]
name = "big"
share = 0.8
[[device]]
name = "left"
node = "small"
share = 0.2
[[device]]
name = "right"
node = "small"
share = 0.2
"""


def two_shares(low: float, high: float) -> Lab:
    return Lab(device=(LabDevice(name="low", share=low), LabDevice(name="high", share=high)))


def write_lab(folder: Path, text: str = LAB) -> Path:
    file = folder / "lab.toml"
    file.write_text(text)
    return file
