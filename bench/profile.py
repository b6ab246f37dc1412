"""How far a profile agrees with itself: the demonstration's lab is profiled twice and compared.

What is compared is the time of one block of each kind, forward and backward, on each device type at each
share. A machine that is busy with other work answers for itself: run it on an idle one.
"""

from collections.abc import Iterator

from arachne_runtime.plan.profile import Profile
from launch.demo.run import LAB, examples_folder
from launch.lab import active
from launch.profiling.merge import merge
from launch.profiling.run import measure as measure_profile

from .report import Options, Result, at_most, run_bench

SAMPLES = (1, 4, 16, 32)
QUICK_SAMPLES = (8,)


def measure(options: Options) -> Iterator[Result]:
    """Two profiles, one behind the other."""
    samples = QUICK_SAMPLES if options.quick else SAMPLES
    first, second = (profile(samples) for _ in range(2))
    differences = {
        f"{device} x {count}": model_s(second, device, count) / model_s(first, device, count) - 1
        for device in sorted({t.device for t in first.timings})
        for count in samples
    }
    for what, difference in differences.items():
        print(f"{what}: {difference:+.1%}")
    worst = max(abs(difference) for difference in differences.values())
    yield at_most("profile-repeat", worst, "of 1, the worst", bound=0.05, differences=differences)


def profile(samples: tuple[int, ...]) -> Profile:
    """The example's model on the four devices of the demonstration."""
    with active(LAB):
        workload = f"{examples_folder() / 'gpt.py'}:workload"
        results = measure_profile(workload, LAB.cluster(), None, samples, show=False)
    return merge(results).profile


def model_s(found: Profile, device: str, samples: int) -> float:
    """Seconds of one forward and backward through one block of each kind."""
    costs = [found.block(kind, device, 1, samples) for kind in dict.fromkeys(t.kind for t in found.timings)]
    return sum(cost.forward_s + cost.backward_s for cost in costs)


if __name__ == "__main__":
    raise SystemExit(run_bench("profile", measure))
