"""Device types and models by name, with the source of every figure."""

from .devices import DeviceType, device, device_names
from .models import entry, model, model_names, profile
from .packed import Entry

__all__ = ["DeviceType", "Entry", "device", "device_names", "entry", "model", "model_names", "profile"]
