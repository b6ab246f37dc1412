"""examples/train_gpt.py trains either of its models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"


@pytest.mark.parametrize("model", ["gpt", "mixtral"])
def test_it_trains_alone(model):
    words = [sys.executable, SCRIPT, "--model", model, "--global-batch", "4", "--steps", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] < 6.5  # uniform over 256 bytes: 5.5
