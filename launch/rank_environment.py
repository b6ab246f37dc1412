"""What the environment of every process of a job has beside the job's own variables."""

import os
from pathlib import Path

from .cpu_ranks import CPU_RANKS

RUN_VARIABLE = "ARACHNE_RUN"
"""In the environment of every process of a run: tells them from all others."""


def search_path() -> dict[str, str]:
    """PYTHONPATH by which a source tree that is not installed is found, where that is needed."""
    root = Path(__file__).parents[1]
    search = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root.name in ("site-packages", "dist-packages") or str(root) in search:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, search)])}


def on_cpus() -> dict[str, str]:
    """Variables of ranks on CPUs, but for those that the user has set."""
    return {name: value for name, value in CPU_RANKS.items() if name not in os.environ}
