"""A profile as a table for a person."""

from rich.table import Table

from arachne_runtime.plan.profile import Profile
from arachne_runtime.units import format_bytes, format_seconds


def table(profile: Profile) -> Table:
    """Every kind of block on every device type, at the smallest and the largest number of samples."""
    shown = Table(title=f"{profile.model}, {profile.sequence} tokens a sample", title_justify="left")
    shown.add_column("block")
    shown.add_column("device")
    for column in ("samples", "forward", "backward", "kept", "update"):
        shown.add_column(column, justify="right")
    for kind, device in dict.fromkeys((t.kind, t.device) for t in profile.timings):
        low, high = profile.samples_range(kind, device, 1) or (1, 1)
        for samples in dict.fromkeys((low, high)):
            cost = profile.block(kind, device, 1, samples)
            update = profile.update(kind, device, 1)
            shown.add_row(
                kind,
                device,
                str(samples),
                format_seconds(cost.forward_s),
                format_seconds(cost.backward_s),
                format_bytes(cost.activation_bytes or 0),
                format_seconds(update or 0.0) if samples == low else "",
            )
    return shown
