"""The parameters of a policy while they are trained: tensors, Adam, and both in a file that holds no code."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arachne_runtime.plan.files import write_whole

MOST_NORM = 1.0
"""Gradients are cut to this length: a rare decision must not move everything. A usual choice."""


class Learner:
    """One set of parameters and the moments of Adam."""

    def __init__(
        self, parameters: Mapping[str, NDArray[np.floating]], learning_rate: float, decay: float = 0.0
    ) -> None:
        self.tensors = {
            name: torch.tensor(np.asarray(value, np.float32), requires_grad=True)
            for name, value in sorted(parameters.items())
        }
        self.adam = torch.optim.AdamW(self.tensors.values(), lr=learning_rate, weight_decay=decay)

    @property
    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """A copy of the parameters, as the policy reads them."""
        return {name: tensor.detach().numpy().copy() for name, tensor in self.tensors.items()}

    def set_rate(self, learning_rate: float) -> None:
        """Of the steps from now on."""
        for group in self.adam.param_groups:
            group["lr"] = learning_rate

    def gradient(self, loss: Tensor) -> Tensor:
        """``[numbers]``: of all parameters, one behind the other."""
        found = torch.autograd.grad(loss, list(self.tensors.values()), allow_unused=True)
        rows = zip(found, self.tensors.values(), strict=True)
        return torch.cat([(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in rows])

    def step(self, gradient: Tensor) -> None:
        """One step of Adam along a gradient, which is cut to ``MOST_NORM``."""
        cut = gradient * torch.clamp(MOST_NORM / (gradient.norm() + 1e-12), max=1.0)
        parts = torch.split(cut, [t.numel() for t in self.tensors.values()])
        for tensor, part in zip(self.tensors.values(), parts, strict=True):
            tensor.grad = part.view_as(tensor)
        self.adam.step()

    def save(self, path: Path, **more: NDArray[np.generic]) -> None:
        """All of it, with ``more`` arrays beside it; the file is whole or not there."""
        rows: dict[str, NDArray[np.generic]] = {f"own/{name}": value for name, value in more.items()}
        for name, tensor in self.tensors.items():
            state = self.adam.state.get(tensor, {})
            rows[f"value/{name}"] = tensor.detach().numpy()
            if state:
                rows[f"first/{name}"] = state["exp_avg"].numpy()
                rows[f"second/{name}"] = state["exp_avg_sq"].numpy()
                rows[f"steps/{name}"] = state["step"].numpy()
        content = io.BytesIO()
        arrays: Mapping[str, Any] = rows
        np.savez(content, **arrays)
        write_whole(path, content.getvalue())

    def load(self, path: Path) -> dict[str, NDArray[np.generic]]:
        """Takes over what was saved; the arrays that were saved beside it."""
        with np.load(path, allow_pickle=False) as file:
            rows = {name: file[name] for name in file.files}
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(torch.from_numpy(rows[f"value/{name}"]))
                if f"first/{name}" in rows:
                    self.adam.state[tensor] = {
                        "step": torch.from_numpy(rows[f"steps/{name}"]),
                        "exp_avg": torch.from_numpy(rows[f"first/{name}"]),
                        "exp_avg_sq": torch.from_numpy(rows[f"second/{name}"]),
                    }
        return {name[4:]: value for name, value in rows.items() if name.startswith("own/")}


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one core, so that sums are added in one order: same seed, same weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
