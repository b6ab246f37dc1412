"""Device types and models by name, with the source of every figure."""

from .devices import DeviceType, device, device_names
from .entries import entry, measured_names, profile
from .models import Named, config, model, model_from_config, model_names, named_model, stated_dtype
from .packed import Entry
from .profiles import profile_for

__all__ = [
    "DeviceType",
    "Entry",
    "Named",
    "config",
    "device",
    "device_names",
    "entry",
    "measured_names",
    "model",
    "model_from_config",
    "model_names",
    "named_model",
    "profile",
    "profile_for",
    "stated_dtype",
]
