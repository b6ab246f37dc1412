"""The examples with unequal shares: two or three lines from their DDP originals, and the same loop."""

import difflib
import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from arachne_runtime.data.order import GlobalOrder
from arachne_runtime.testing import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
WORDS = {
    "gpt": ["--global-batch", "4", "--steps", "2"],
    "resnet": ["--global-batch", "24", "--steps", "2", "--width", "8"],
}


@pytest.mark.parametrize(("name", "at_most"), [("gpt", 2), ("resnet", 3)])
def test_they_are_some_lines_from_the_original(name, at_most):
    texts = [(EXAMPLES / f"train_{name}_{kind}.py").read_text().splitlines() for kind in ("ddp", "unequal")]
    changed = [line for line in difflib.ndiff(*texts) if line.startswith("+ ") and line.strip() != "+"]
    assert 2 <= len(changed) <= at_most


def run_script(script: str, words: list[str]) -> str:
    """What it prints on this rank of a process group that is there already."""
    sys.path.insert(0, str(EXAMPLES))
    printed = io.StringIO()
    try:
        with (
            mock.patch.object(sys, "argv", [script, *words]),
            mock.patch("torch.distributed.init_process_group"),
            mock.patch("torch.distributed.destroy_process_group"),
            redirect_stdout(printed),
        ):
            runpy.run_path(str(EXAMPLES / script))
    finally:
        sys.path.remove(str(EXAMPLES))
    return printed.getvalue()


def losses(name: str, kind: str) -> list[float]:
    printed, other = run_ranks(2, run_script, f"train_{name}_{kind}.py", WORDS[name])
    found = [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)", printed, re.MULTILINE)]
    assert len(found) == int(WORDS[name][3])
    assert other == ""
    return found


def test_the_transformer_trains_alike():
    even, unequal = losses("gpt", "ddp"), losses("gpt", "unequal")
    assert unequal == pytest.approx(even, abs=2e-4)  # of the same batches, printed with four digits
    assert even[-1] < even[0]


def test_the_residual_network_normalises_over_all_ranks(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from resnet18 import ResNet18
    from shapes import KINDS, Shapes

    torch.manual_seed(0)
    model, shapes = ResNet18(len(KINDS), 8), Shapes()
    order = GlobalOrder(num_samples=len(shapes), global_batch=24)
    pictures, kinds = default_collate([shapes[i] for i in order.samples(0, range(24))])
    alone = F.cross_entropy(model(pictures), kinds).item()
    assert losses("resnet", "unequal")[0] == pytest.approx(alone, abs=2e-4)
    assert losses("resnet", "ddp")[0] != pytest.approx(alone, abs=2e-3)  # over each rank's part
