"""The card that lies beside weights: how, when and on what they were trained, what they reach, limits."""

from collections.abc import Iterator
from datetime import UTC, datetime

from arachne_runtime import __version__

from ..policy.features import FEATURES_VERSION
from .clusters import HELD_OUT_TYPES
from .context import Context
from .evaluation import Evaluation
from .labels import VERSION
from .models import HELD_OUT_FAMILY
from .validate import MOST_PRICED

LIMITS = """\
- The policy proposes templates; the search completes, packs, prices and refines them, beside the plain
  enumeration. Weak weights cost time, not quality.
- Trained for throughput under 1F1B, without a plan that runs. Under other schedules and objectives its
  proposals are those for throughput.
- Problems are random: devices from a continuous space and from the catalog, with analytic efficiency curves.
  Templates have up to 64 stages, at most three unlike ones stand side by side, widths come from a ladder.
- The best known plan is that of a search of seconds, not a proven optimum. The policy gradient is rewarded by
  the closed form of the search, which is too low where links bind.
"""


def card_of(context: Context, evaluation: Evaluation, trained_on: str, *, improved: bool) -> str:
    """Markdown, all figures from the run itself."""
    recipe = context.recipe
    lines = [
        "# The learned policy",
        "",
        f"Made by `arachne learn` of version {__version__} on {datetime.now(UTC):%Y-%m-%d}; features version "
        f"{FEATURES_VERSION}, labels version {VERSION}.",
        "",
        f"**Trained on** {trained_on}. Random problems have 1 to 5 device types, 2 to "
        f"{recipe.most_devices:,} devices, dense and mixture-of-experts models; never device types "
        f"{' and '.join(HELD_OUT_TYPES)}, nor models of the family {HELD_OUT_FAMILY}.",
        "",
        f"**How.** Imitation of the best plans of long searches, {recipe.passes} passes; "
        f"{_gradient(recipe.updates, improved)}.",
        "",
        f"**What they reach** on {evaluation.num_problems} validation problems that chose nothing: seconds "
        "of an iteration over those of the best known plan (mean: of logarithms), after so many proposals "
        f"(shapes, each with its best numbers; the {MOST_PRICED} best by the closed form are priced).",
        "",
        *_table(evaluation),
        "",
        "**Limits**",
        "",
        LIMITS,
    ]
    return "\n".join(lines)


def _gradient(updates: int, improved: bool) -> str:
    if not updates:
        return "no policy gradient"
    said = f"then {updates} updates of a group-relative policy gradient, which "
    if improved:
        return f"{said}won on validation problems and is in these weights"
    return f"{said}did not win on validation problems: these weights are imitation's"


def _table(evaluation: Evaluation) -> Iterator[str]:
    heads = [f"{what} at {n}" for n in evaluation.evaluations for what in ("mean", "median", "within 2 %")]
    yield f"| proposals by | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 1) + "|"
    for row in evaluation.rows:
        cells = [
            cell
            for lost, ratio, near in zip(row.mean_lost, row.median_ratio, row.within_2_percent, strict=True)
            for cell in (f"{100 * lost:+.1f} %", f"{ratio:.3f}×", f"{100 * near:.0f} %")
        ]
        yield f"| {row.source} | {' | '.join(cells)} |"
