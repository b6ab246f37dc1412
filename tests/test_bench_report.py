"""What every benchmark prints, writes and exits with."""

import json

import pytest

from bench.report import at_least, at_most, interval, run_bench


def test_a_benchmark_prints_and_writes_its_results(tmp_path, capsys):
    def measure(options):
        assert options.quick
        yield at_most("overhead", 1.0312, "ratio", bound=1.05, pairs=21)
        yield at_least("plans", 40, "plans", bound=40)

    assert run_bench("demo", measure, ["--quick", "--out", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "result: overhead 1.031 ratio (wanted <= 1.05)",
        "result: plans 40 plans (wanted >= 40)",
    ]
    written = json.loads((tmp_path / "new" / "demo.json").read_text())
    assert written["results"][0]["detail"] == {"pairs": 21}
    assert set(written) == {"bench", "date", "commit", "machine", "quick", "results"}


@pytest.mark.parametrize("figure", [1.06, float("nan")])
def test_a_result_out_of_bounds_fails_the_benchmark(figure):
    assert run_bench("demo", lambda _: [at_most("overhead", figure, "ratio", bound=1.05)], []) == 1


def test_a_benchmark_that_shows_nothing_fails():
    assert run_bench("demo", lambda _: [], []) == 1


def test_the_interval_of_a_median_is_by_order_statistics():
    found = interval([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])  # n = 9: the 2nd and 8th value
    assert (found.median, found.low, found.high) == (5.0, 2.0, 8.0)
    few = interval([3.0, 1.0, 2.0])
    assert (few.low, few.high) == (1.0, 3.0)
