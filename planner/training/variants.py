"""Problems around one measured model and cluster: what is left when nodes go, and other global batches."""

import random
from collections.abc import Iterator, Sequence

from msgspec import structs

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import Profile

from ..request import Request
from ..search.supply import Supply
from .draw import BATCHES, Drawn, has_plan
from .labels import ProblemSet, Space
from .models import log_uniform

TRIES = 40
"""Drawings for one problem: then a cluster is too small for its model, and the whole one is taken."""


def variants(
    model: ModelSpec, profile: Profile, clusters: Sequence[Cluster], problems: ProblemSet, number: int
) -> Iterator[Drawn]:
    """The same ones every time; each a random part of one of the clusters that holds the model."""
    for seed in range(number):
        rng = random.Random(f"{problems} variant {seed}")
        for tries in range(1, TRIES + 1):
            cluster = rng.choice(clusters)
            part = cluster if tries == TRIES else _part(rng, cluster)
            if part is None:
                continue
            batch = 1 << round(log_uniform(rng, *BATCHES)).bit_length() - 1
            request = Request(cluster=part, model=model, profile=profile, global_batch=batch)
            supply = Supply.of(request)
            if has_plan(request, supply):
                yield Drawn(
                    request=request,
                    problems=problems,
                    seed=seed,
                    space=Space(),
                    tries=tries,
                    supply=supply,
                )
                break


def _part(rng: random.Random, cluster: Cluster) -> Cluster | None:
    """Some of the nodes of each entry."""
    entries = [structs.replace(e, count=rng.randint(0, e.count)) for e in cluster.node]
    kept = tuple(entry for entry in entries if entry.count)
    if not kept:
        return None
    places = {name for e in kept for name in (e.name, e.zone) if name}
    pairs = tuple(p for p in cluster.network.pair if set(p.between) <= places)
    return structs.replace(cluster, node=kept, network=structs.replace(cluster.network, pair=pairs))
