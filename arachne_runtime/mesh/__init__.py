"""From a plan to process groups and messages: the same on every rank, chosen by device."""

from .mesh import Mesh, default_device
from .transport import GlooTransport, NcclTransport, Transport

__all__ = ["GlooTransport", "Mesh", "NcclTransport", "Transport", "default_device"]
