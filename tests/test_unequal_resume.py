"""What a loader has learnt goes on from plain values, in any format, before or after the model is made."""

import json

import pytest

import arachne_runtime as arachne
from arachne_runtime.batch import Balancer, Reading
from arachne_runtime.testing import run_ranks
from tests.unequal import Case, build, data

BATCH = 10


def taught() -> Balancer:
    """Rank 1 takes four times as long."""
    balancer = Balancer(num_replicas=2)
    for _ in range(40):
        shares = balancer.shares(BATCH)
        balancer.observe(
            [
                Reading(
                    samples=share, outside_s=0.01 * slow * share, backward_s=0.02 * slow * share,
                    ready=(1.0,), reduce_s=(0.001,),
                )
                for share, slow in zip(shares, (1, 4), strict=True)
            ]
        )  # fmt: skip
    return balancer


def resumed(is_early):
    first = arachne.HeteroLoader(data(), BATCH, sharing=taught())
    told = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    loader = arachne.HeteroLoader(data(), BATCH)
    if is_early:
        loader.load_state_dict(told)
    arachne.HeteroDDP(build(Case()), loader=loader)
    if not is_early:
        loader.load_state_dict(told)
    next(iter(loader))
    assert (
        json.loads(json.dumps(loader.link.sharing.state.learner.fits.slope))
        == told["balancer"]["learner"]["fits"]["slope"]
    )
    return loader.shares


@pytest.mark.parametrize("is_early", [True, False])
def test_learnt_shares_go_on_whenever_the_state_is_loaded(is_early):
    assert run_ranks(2, resumed, is_early) == [(8, 2)] * 2


def strict():
    """No format of numbers has infinite ones; here nothing is known of the noise yet."""
    loader = arachne.HeteroLoader(data(), BATCH, adaptive=arachne.AdaptiveBatch())
    told = json.loads(json.dumps(loader.state_dict(), allow_nan=False))
    again = arachne.HeteroLoader(data(), BATCH, adaptive=arachne.AdaptiveBatch())
    again.load_state_dict(told)
    assert again.adaptation.noise_scale == float("inf")
    assert again.state_dict() == loader.state_dict()


def test_a_state_of_an_adaptive_batch_that_knows_nothing_yet_is_plain():
    run_ranks(2, strict)
