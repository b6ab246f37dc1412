"""One training run: problems and labels, imitation, policy gradient, evaluation, weights with their card."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.files import write_whole

from ..policy.policy import Policy
from .buffer import weights_of
from .card import card_of
from .context import Context, OnProgress, Stage
from .curves import draw_curves
from .evaluation import Evaluation, evaluated
from .examples import Examples, Kind, examples_of, joined
from .imitation import learn_to_imitate
from .improve import improve
from .labelling import MOST_SEQUENCES
from .labels import ProblemSet, digest_of, load
from .learner import one_thread
from .problem import Problem, Problems
from .recipe import Recipe
from .store import Labelled, produce

LEAST_PROBLEMS = 4
"""Of training, and of validation: fewer say nothing."""

PANELS = (
    ("imitation", ("training_loss", "validation_loss")),
    ("imitation", tuple(f"validation_top_{head}" for head in ("depth", "pool", "tp", "width", "length"))),
    ("policy_gradient", ("lost", "mean_reward")),
)
"""Stage and figures of each panel of the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run gave."""

    weights: Path
    card: Path
    curves: Path
    evaluation: Evaluation
    improved: bool
    """Whether the weights are the policy gradient's; else imitation's, as it did not win."""


def train(
    recipe: Recipe, folder: Path, on_progress: OnProgress | None = None, *, labels: Path | None = None
) -> Trained:
    """Everything in ``folder``; a run that was killed there goes on, and ends with the same weights.

    ``labels``: a folder of labels of these problems, instead of making them. UsageError where the folder
    holds a run of another recipe or other labels, or there are too few labels.
    """
    inputs = "" if labels is None else f"labels {digest_of(labels)}\n"
    context = Context.at(recipe, folder, on_progress, inputs=inputs)
    training = labelled(context, ProblemSet.TRAINING, recipe.problems, labels)
    validation = labelled(context, ProblemSet.VALIDATION, recipe.validation, labels)
    trained_on = f"{len(training)} random problems, recipe {recipe.name}, seed {recipe.seed}"
    return learn(context, Policy.new(recipe.seed), training, validation, trained_on)


def labelled(context: Context, problems: ProblemSet, number: int, given: Path | None) -> Problems:
    """Problems of a set with their labels, which are made unless a folder of them is given."""
    recipe, seeds = context.recipe, range(number)
    folder = given or context.folder / "labels"

    def told(at: Labelled) -> None:
        context.tell(Stage.LABELS, at.done, at.total, f"{at.done} of {at.total} {problems} problems")

    if given is None:
        produce(
            folder,
            seeds,
            problems=problems,
            space=recipe.space,
            effort=recipe.effort,
            processes=recipe.processes,
            on_progress=told,
        )
    rows = [x for x in load(folder, problems) if x.seed in seeds and x.space == recipe.space and x.sequences]
    if len(rows) < LEAST_PROBLEMS:
        raise UsageError(
            f"{folder} holds {len(rows)} usable labels of {problems} problems; training needs at least "
            f"{LEAST_PROBLEMS}"
        )
    return Problems(rows)


def learn(
    context: Context,
    first: Policy,
    training: Sequence[Problem],
    validation: Sequence[Problem],
    trained_on: str,
) -> Trained:
    """From a first policy to weights with their card.

    Some of the validation problems choose between weights, the others judge the chosen ones.
    """
    choosing = min(context.recipe.choosing, len(validation) // 2)
    with one_thread():
        taught, asked = (joined(_examples(context, part)) for part in (training, validation))
        imitated = learn_to_imitate(context, first, taught, asked)
        best, improved = improve(context, imitated, training, validation[:choosing])
        policies = {"start": first, "imitation": imitated} | ({"policy gradient": best} if improved else {})
        evaluation = evaluated(context, policies, validation[choosing:])
    folder = context.folder
    trained = Trained(
        weights=folder / "policy.npz",
        card=folder / "card.md",
        curves=context.curves.path,
        evaluation=evaluation,
        improved=improved,
    )
    Policy(best.parameters, structs.replace(best.meta, trained=trained_on)).save(trained.weights)
    write_whole(trained.card, card_of(context, evaluation, trained_on, improved=improved).encode())
    draw_curves(context.curves, folder / "curves.png", PANELS)
    return trained


def _examples(context: Context, problems: Sequence[Problem]) -> Iterator[tuple[Kind, Examples]]:
    """Decisions on the way to the labels."""
    for number, problem in enumerate(problems, 1):
        lessons = problem.lessons[:MOST_SEQUENCES]
        weights = weights_of(relative for _, relative in lessons)
        yield from examples_of(problem.site, [sequence for sequence, _ in lessons], weights)
        context.tell(Stage.IMITATION, 0, 1, f"{number} of {len(problems)} problems replayed")
