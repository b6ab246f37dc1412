"""A local folder of safetensors files, of which only the tensors that are asked for are read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...errors import InvalidFileError, ModelError, Problem, UsageError
from .library import optional
from .names import Piece, pieces_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_TOLD = 8
"""Missing tensors that an error lists."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A parameter of the model, to be found in files."""

    names: tuple[str, ...]
    """Its names in the original model: several where it is tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where each tensor of a folder is; nothing of it is read yet."""

    folder: Path
    files: Mapping[str, str]
    """Name of a tensor → name of its file."""
    model_type: str
    prefix: str
    """Of the decoder's names in the model (``"model."``), which files of a bare decoder leave out."""

    @classmethod
    def open(cls, folder: Path, *, model_type: str, prefix: str) -> "Checkpoint":
        """Read the index of a folder, or the header of its one file.

        Raises:
            UsageError: No safetensors files.
            InvalidFileError: An index that is none.

        """
        if (folder / INDEX).is_file():
            return cls(folder, _read_index(folder / INDEX), model_type, prefix)
        if (folder / SINGLE).is_file():
            with optional("safetensors").safe_open(folder / SINGLE, framework="pt") as file:
                return cls(folder, dict.fromkeys(file.keys(), SINGLE), model_type, prefix)
        raise UsageError(
            f"{folder} has neither {SINGLE} nor {INDEX}; save the model there with "
            "save_pretrained (safetensors), or leave the weights out to start from random ones"
        )

    def refuse_missing(self, wanted: Sequence[Wanted]) -> None:
        """ModelError that names parameters which no file holds."""
        missing = [parameter.names[0] for parameter in wanted if self._pieces(parameter) is None]
        if missing:
            more = f" and {len(missing) - MOST_TOLD} more" if len(missing) > MOST_TOLD else ""
            raise ModelError(
                f"{self.folder} does not hold {', '.join(missing[:MOST_TOLD])}{more}; it holds "
                f"{len(self.files)} tensors of another model, or of a part of this one"
            )

    def read(self, wanted: Mapping[str, Wanted]) -> dict[str, Tensor]:
        """The values of some parameters by key; each file is opened once, no other tensor is read.

        Raises:
            ModelError: A tensor has another shape than the parameter.

        """
        self.refuse_missing(list(wanted.values()))
        values: dict[str, Tensor] = {}
        by_file: dict[str, list[tuple[str, Piece]]] = {}
        for key, parameter in wanted.items():
            for piece in self._pieces(parameter) or ():
                by_file.setdefault(self.files[piece.name], []).append((key, piece))
        for name in sorted(by_file):
            with optional("safetensors").safe_open(self.folder / name, framework="pt") as file:
                for key, piece in by_file[name]:
                    self._put(file.get_tensor(piece.name), piece, wanted[key], values, key)
        return values

    def _put(
        self, found: Tensor, piece: Piece, parameter: Wanted, values: dict[str, Tensor], key: str
    ) -> None:
        place = torch.empty(parameter.shape, device="meta")[piece.where].shape
        if found.shape != place:
            raise ModelError(
                f"{self.folder / self.files[piece.name]}: {piece.name} has shape {tuple(found.shape)}, and "
                f"{tuple(place)} by the config of the model; config.json and weights belong to two models"
            )
        if not piece.where:
            values[key] = found.to(parameter.dtype)
            return
        if key not in values:
            values[key] = torch.empty(parameter.shape, dtype=parameter.dtype)
        values[key][piece.where] = found

    def _pieces(self, parameter: Wanted) -> tuple[Piece, ...] | None:
        """The tensors that together are a parameter, under the first form of its name that the files know."""
        for pieces in self._forms(parameter):
            if all(piece.name in self.files for piece in pieces):
                return pieces
        return None

    def _forms(self, parameter: Wanted) -> Iterator[tuple[Piece, ...]]:
        for name in parameter.names:
            for form in ((Piece(name, ()),), pieces_of(self.model_type, name, parameter.shape)):
                yield form
                yield tuple(Piece(piece.name.removeprefix(self.prefix), piece.where) for piece in form)


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        found: Any = msgspec.json.decode(path.read_bytes())
        return msgspec.convert(found["weight_map"], dict[str, str])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        fault = Problem("$.weight_map", f"must say of each tensor in which file it is ({error})")
        raise InvalidFileError(str(path), [fault]) from error
