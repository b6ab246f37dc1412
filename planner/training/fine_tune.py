"""Fine-tuning: the shipped weights learn what pays on the costs that were measured in runs of one model."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import Profile

from ..feedback import Correction, Run
from ..policy.policy import Policy
from .context import Context, OnProgress, Stage
from .draw import Drawn
from .labelling import label
from .labels import ProblemSet, line_of, load
from .problem import Problem
from .recipe import Recipe
from .run import LEAST_PROBLEMS, Trained, learn
from .store import whole_lines
from .variants import variants


def fine_tune(
    recipe: Recipe,
    correction: Correction,
    runs: Sequence[Run],
    folder: Path,
    on_progress: OnProgress | None = None,
    *,
    start: Policy | None = None,
) -> Trained:
    """Weights for problems like those of the runs: parts of their clusters, their model, corrected costs.

    Begins with the shipped weights, or with ``start``. What was learned before is lost in part, so the result
    is for this model and these devices. Raises UsageError where the runs are of several models, their
    clusters hold the model too seldom, or the folder holds a run on others; PolicyMissingError and
    PolicyStaleError without weights to begin with.
    """
    profile = correction.profile
    own = [run for run in runs if run.model.name == profile.model]
    models = {run.model for run in own}
    if len(models) != 1:
        raise UsageError(
            f"{len(models)} models named {profile.model!r} are in the runs; fine-tune on runs of one model"
        )
    first = Policy.load() if start is None else start
    clusters = list(dict.fromkeys(run.cluster for run in own))
    inputs = _inputs(profile, own[0].model, clusters, first)
    context = Context.at(recipe, folder, on_progress, inputs=inputs)
    sets: list[list[Problem]] = []
    for problems, number in (
        (ProblemSet.TUNING, recipe.problems),
        (ProblemSet.TUNING_VALIDATION, recipe.validation),
    ):
        drawn = variants(own[0].model, profile, clusters, problems, number)
        sets.append(list(_labelled(context, problems, number, drawn)))
        if len(sets[-1]) < LEAST_PROBLEMS:
            raise UsageError(f"the runs' clusters hold {profile.model} too seldom to draw problems from them")
    said = (
        f"{len(sets[0])} problems of {profile.model} on parts of the runs' clusters, at costs they measured"
    )
    return learn(context, first, sets[0], sets[1], f"{first.meta.trained}; then {said}")


def _inputs(profile: Profile, model: ModelSpec, clusters: Sequence[Cluster], first: Policy) -> str:
    """A line with the digest of each: labels, weights and figures in the folder are of these alone."""
    weights = sha256(b"".join(first.parameters[name].tobytes() for name in sorted(first.parameters)))
    rows = [f"profile {digest(profile)}", f"model {digest(model)}"]
    rows += [f"cluster {digest(cluster)}" for cluster in clusters]
    return "".join(f"{row}\n" for row in (*rows, f"weights sha256:{weights.hexdigest()}"))


def _labelled(
    context: Context, problems: ProblemSet, number: int, drawn: Iterator[Drawn]
) -> Iterator[Problem]:
    """Each with what a long search finds, kept in the run's folder."""
    folder = context.folder / "labels"
    folder.mkdir(exist_ok=True)
    path = folder / f"{problems}.jsonl"
    whole_lines(path)
    known = {labels.seed: labels for labels in load(folder, problems)}
    with path.open("ab") as file:
        for each in drawn:
            labels = known.get(each.seed)
            if labels is None:
                labels = label(each, context.recipe.effort)
                file.write(line_of(labels))
                file.flush()
            if labels.sequences:
                yield Problem.labelled(each.request, labels)
            context.tell(
                Stage.LABELS, each.seed + 1, number, f"{problems} problem {each.seed + 1} of {number}"
            )
