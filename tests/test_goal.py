"""``--objective`` in one word."""

import pytest

from arachne_runtime.errors import UsageError
from launch.goal import Goal, goal_from
from planner.request import Objective


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("throughput", Goal(objective=Objective.THROUGHPUT)),
        ("cost", Goal(objective=Objective.COST)),
        ("throughput@40", Goal(objective=Objective.THROUGHPUT, max_price_per_hour=40.0)),
        ("@40", Goal(objective=Objective.THROUGHPUT, max_price_per_hour=40.0)),
        ("cost@2.5", Goal(objective=Objective.COST, max_price_per_hour=2.5)),
        ("2e6/24h", Goal(objective=Objective.COST, deadline_s=86400.0, deadline_samples=2_000_000)),
        (
            "2e6/24h@40",
            Goal(
                objective=Objective.COST,
                max_price_per_hour=40.0,
                deadline_s=86400.0,
                deadline_samples=2_000_000,
            ),
        ),
        ("1000/0.5h", Goal(objective=Objective.COST, deadline_s=1800.0, deadline_samples=1000)),
    ],
)
def test_what_is_meant(text, goal):
    assert goal_from(text) == goal


@pytest.mark.parametrize(
    "text",
    [
        "",
        "speed",
        "cost@",
        "cost@x",
        "throughput@1.2.3",
        "2e6/24",
        "/24h",
        "1/1..h",
        "1e999/24h",
        "@",
        "1/1h@",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(UsageError, match="is not throughput, cost"):
        goal_from(text)
