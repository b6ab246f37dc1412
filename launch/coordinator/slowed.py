"""Devices that compute slower or faster than others of their type, as types of their own with own figures."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from msgspec.structs import replace

from arachne_runtime.plan.cluster import Cluster, NodeEntry
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import LinkTiming, Profile, UpdateTiming
from arachne_runtime.units import GIB
from planner.catalog.devices import CPU, device, is_cpu
from planner.cost.fleet import Fleet
from planner.cost.tables import Tables


@dataclass(frozen=True, slots=True)
class Slowed:
    """A cluster's types and a profile, with devices that are so many times slower."""

    cluster: Cluster
    slower: Mapping[str, float]

    def type_of(self, name: str) -> str:
        """The type that a device counts as."""
        base = self.cluster.device_type(name)
        return slowed_type(base, self.slower[name]) if name in self.slower else base

    def described(self, entry: NodeEntry, type_: str) -> NodeEntry:
        """``entry`` as one of another type, with what the catalog says of its own."""
        if type_ == entry.device or is_cpu(type_):
            return replace(entry, device=type_)
        known = device(entry.device)
        memory = known.memory_bytes / GIB if entry.memory_GiB is None else entry.memory_GiB
        intra = entry.intra_GBps or known.intra_GBps
        price = known.price_per_hour if entry.price_per_hour is None else entry.price_per_hour
        return replace(entry, device=type_, memory_GiB=memory, intra_GBps=intra, price_per_hour=price)

    def profile(self, profile: Profile, model: ModelSpec) -> Profile:
        """With rows of every slowed type: those of its own, times its factor; links as they are."""
        known = {d: f for d, f in self.slower.items() if d in self.cluster.devices}
        kinds = {(self.cluster.device_type(d), f): None for d, f in known.items()}
        tables = Tables(model, profile, Fleet(self.cluster, profile))
        found = profile
        for base, factor in kinds:
            found = _with_type(found, tables, base, factor)
        return replace(found, links=(*profile.links, *_links(profile, list(kinds))))


def slowed_type(base: str, factor: float) -> str:
    """Its name; a core that is slower is a smaller part of one, as the catalog knows them."""
    if is_cpu(base):
        share = 1.0 if base == CPU else float(base.removeprefix(f"{CPU}-"))
        return f"{CPU}-{share / factor:.9g}"
    return f"{base}*{factor:g}"


def _with_type(profile: Profile, tables: Tables, base: str, factor: float) -> Profile:
    name = slowed_type(base, factor)
    timings = tuple(
        replace(row, device=name, forward_s=row.forward_s * factor, backward_s=row.backward_s * factor)
        for row in profile.timings
        if row.device == base
    )
    steps = tuple(
        replace(r, device=name, step_s=r.step_s * factor) for r in profile.steps if r.device == base
    )
    return replace(
        profile,
        timings=(*profile.timings, *timings),
        steps=(*profile.steps, *steps),
        updates=(*profile.updates, *_updates(profile, tables, base, factor)),
    )


def _updates(profile: Profile, tables: Tables, base: str, factor: float) -> Iterator[UpdateTiming]:
    """Measured ones, and those that the price has from the memory of the type."""
    name, have = slowed_type(base, factor), set()
    for row in profile.updates:
        if row.device == base:
            have.add((row.kind, row.tp))
            yield replace(row, device=name, update_s=row.update_s * factor)
    first = {block.kind: i for i, block in reversed(list(enumerate(tables.model.blocks)))}
    for (kind, block), tp in product(first.items(), tables.tp_degrees(base)):
        if (kind, tp) not in have:
            seconds = tables.update_seconds(block, block + 1, base, tp)
            yield UpdateTiming(kind=kind, device=name, tp=tp, update_s=seconds * factor)


def _links(profile: Profile, kinds: list[tuple[str, float]]) -> Iterator[LinkTiming]:
    """Each measured link between every two types that its ends may count as."""
    for row in profile.links:
        a, b = ([end, *(slowed_type(end, f) for base, f in kinds if base == end)] for end in row.between)
        seen = {tuple(sorted(row.between))}
        for ends in product(a, b):
            if (key := tuple(sorted(ends))) not in seen:
                seen.add(key)
                yield replace(row, between=ends)
