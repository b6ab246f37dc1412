"""HeteroDDP with random shares trains like one process on the whole batch."""

import pytest

from arachne_runtime.testing import run_ranks
from tests.unequal import Case, by_item, gap, train_alone, train_on_ranks

CASES = {
    "mean loss with a penalty of parameters": (2, Case()),
    "momentum-like states and clipping": (3, Case(adam=True, clip=0.3, seed=1)),
    "a mean over items": (3, Case(loss=by_item, by_items=True, seed=2)),
    "gradients added up without messages": (4, Case(accumulate=3, seed=3)),
    "gradients added up with messages": (3, Case(accumulate=2, keep=True, seed=4)),
    "gradients zeroed in place": (2, Case(set_to_none=False, seed=5)),
    "added up in items, zeroed in place": (
        4,
        Case(loss=by_item, by_items=True, accumulate=2, set_to_none=False, seed=6),
    ),
    "many buckets": (3, Case(tiny=True, adam=True, seed=9)),
    "batch norm": (3, Case(net={"normed": True}, global_batch=6, seed=10)),
    "batch norm, with ranks that have no rows": (4, Case(net={"normed": True}, global_batch=4, seed=11)),
    "rounds that fit into memory": (3, Case(in_steps=True, caps=(1, 2, 1), clip=0.3, adam=True, seed=12)),
    "rounds, in items": (2, Case(in_steps=True, caps=(1, 1), loss=by_item, by_items=True, seed=13)),
    "fewer rows than ranks": (4, Case(global_batch=3, seed=7)),
    "a part that few batches use": (3, Case(net={"sometimes": True}, seed=8)),
}


@pytest.mark.parametrize("name", CASES)
def test_any_shares_train_like_one_process(name):
    num_ranks, case = CASES[name]
    wanted = train_alone(case)
    for found in run_ranks(num_ranks, train_on_ranks, case):
        assert gap(found, wanted) < 1e-9
