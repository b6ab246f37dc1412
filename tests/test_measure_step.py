"""What a step costs beside its blocks."""

import itertools

import torch

from arachne_runtime.measure.step import measure_step
from arachne_runtime.measure.timing import Effort
from arachne_runtime.measure.together import Together
from arachne_runtime.model import Workload
from arachne_runtime.testing import run_ranks
from tests.models import GPT, next_token_loss

QUICK = Effort(batch_s=0.02, rounds=3)


def workload(batch):
    return Workload(
        name="gpt",
        model=GPT,
        loss=next_token_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        batch=batch,
        sequence=8,
    )


def tokens(num_rows):
    return torch.randint(31, (num_rows, 8))


def measured(samples, batch=tokens):
    together = Together.of_default_group()
    found = measure_step(
        workload(batch),
        devices=[f"n:{index}" for index in range(together.size)],
        device=torch.device("cpu"),
        device_type="cpu",
        samples=samples,
        together=together,
        effort=QUICK,
    )
    assert found.device == "cpu"
    return found.step_s


def test_a_step_that_computes_nothing_still_takes_a_while_on_every_rank():
    for step_s in run_ranks(2, measured, 2):
        assert 1e-5 < step_s < 0.2


def test_more_rows_take_longer_to_read():
    few, many = measured(1), measured(1000)
    assert many > 3 * few


def test_a_batch_that_cannot_be_told_apart_by_samples_is_given_whole():
    made = itertools.count()

    def batch(num_rows):
        next(made)
        return {"inputs": tokens(num_rows), "nothing": None}

    assert measured(2, batch) > 0
    assert next(made) == 1
