"""A small model with everything that is hard to get right, trained two ways: by a plain loop, and by a plan.

Tied embeddings, several tensors across a boundary (one of whole numbers, one float without a gradient), a
context, a frozen parameter, one that no sample uses, and one that only some samples use.
"""

from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.precision import Precision
from arachne_runtime.model import ModelParts, extra_losses, pipelined
from arachne_runtime.model.parameters import Values
from arachne_runtime.plan import order
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.shards import Intervals

VOCABULARY, SEQUENCE, WIDTH, HEADS = 13, 4, 8, 2
IGNORED = -100
STEPS = 3
SCALE = 2.0**10
"""Of losses in float16: at the usual first scale some of these cases would skip a step, whole or cut."""


class Embed(nn.Module):
    """Tokens to (activations, marked samples, a float that needs no gradient)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens):
        x = self.table(tokens)
        return x, (tokens[:, :1] % 3 == 0).long(), torch.full_like(x[:, 0].detach(), 0.5)


class Layer(nn.Module):
    """Causal attention and an MLP, with a frozen, an unused and a seldom used part."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.seldom = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, marked, half, *, position):
        B, S, D = x.shape
        q, k, v = self.mix(self.norm(x) + position).view(B, S, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D)
        x = x + self.out(F.gelu(mixed)) + self.frozen(x) * half[:, None]
        if marked.any():
            x = x + self.seldom(x) * marked[..., None]
        return x, marked, half


class Head(nn.Module):
    """Activations to logits."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x, marked, half):
        return self.logits(self.norm(x))


class Decoder(nn.Module):
    """Embedding, ``layers`` and head; the head shares the table of the embedding if ``tied``."""

    def __init__(self, layers: Iterable[nn.Module], tied: bool) -> None:
        super().__init__()
        self.embed = Embed()
        self.layers = nn.ModuleList(layers)
        self.head = Head()
        if tied:
            self.head.logits.weight = self.embed.table.weight

    def context(self, batch):
        return {"position": batch["position"]}

    def forward(self, batch):
        state = self.embed(batch["tokens"])
        for layer in self.layers:
            state = layer(*state, **self.context(batch))
        return self.head(*state)


@pipelined(first="embed", blocks="layers", last="head", context="context")
class TinyGPT(Decoder):
    """A decoder of ``num_layers`` layers."""

    def __init__(self, num_layers: int, tied: bool) -> None:
        super().__init__((Layer() for _ in range(num_layers)), tied)


@dataclass(frozen=True)
class Case:
    """One way to train the model."""

    plan: Plan
    tied: bool = True
    adam: bool = False
    dtype: torch.dtype = torch.float64
    clip_norm: float | None = None
    by_items: bool = False
    scheduled: bool = False
    rows: tuple[int, ...] = ()
    """Rows of each step's batch; default: a full one, a remainder, a full one."""
    blocking: bool = False
    in_pieces: bool = False
    """Sum the gradients of every block alone, between pieces of the last backward."""
    precision: Precision | None = None
    evaluates: bool = False
    """Evaluate on all batches after the training; the loss is one more of the outcome."""
    frozen: tuple[int, ...] = ()
    """Blocks that do not train."""

    @property
    def rows_by_step(self) -> tuple[int, ...]:
        full = self.plan.global_batch
        return self.rows or (full, max(1, full - full // 3), full)

    def model(self) -> TinyGPT:
        model = TinyGPT(self.plan.num_blocks - 2, self.tied)
        blocks = (model.embed, *model.layers, model.head)
        for index in self.frozen:
            blocks[index].requires_grad_(False)
        return model

    def global_names(self, model: nn.Module) -> dict[str, str]:
        """Names in the model → names in the blocks."""
        return global_names(model)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3) if self.adam else torch.optim.SGD(parameters, lr=0.1)

    def lr_schedule(self, optimizer: torch.optim.Optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def loss(self, logits: Tensor, batch) -> Tensor:
        reduction = "sum" if self.by_items else "mean"
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction=reduction)

    def num_items(self, batch) -> int:
        return int((batch["targets"] != IGNORED).sum())

    def batch(self, step: int):
        num_rows = self.rows_by_step[step]
        random = torch.Generator().manual_seed(step)
        shape = (num_rows, SEQUENCE)
        targets = torch.randint(VOCABULARY, shape, generator=random)
        if self.by_items:
            targets[torch.rand(shape, generator=random) < 0.4] = IGNORED
            targets[0, 0] = 1
        return {
            "tokens": torch.randint(VOCABULARY, shape, generator=random),
            "targets": targets,
            "position": torch.randn(*shape, WIDTH, generator=random).to(self.dtype),
        }


@dataclass
class Outcome:
    """What training gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Of the first step, by global name; None where no sample used the parameter."""
    held: dict[str, tuple[Intervals, ...]] = field(default_factory=dict)
    """What the rank held of each; empty: everything."""


def train_by_plan(case: Case) -> Outcome:
    """Train on the ranks of the default process group; runs on each of them."""
    with reductions_of(1 if case.in_pieces else order.REDUCTION_BYTES):
        return _train_by_plan(case)


@contextmanager
def reductions_of(size: int):
    """Close a sum of gradients at this many bytes."""
    usual, order.REDUCTION_BYTES = order.REDUCTION_BYTES, size
    try:
        yield
    finally:
        order.REDUCTION_BYTES = usual


def engine_of(case: Case, values: Values | None = None) -> Engine:
    """The engine of this rank; ``values`` in place of first ones."""
    recipe = Recipe(
        optimizer=case.optimizer,
        loss=case.loss,
        inputs=lambda batch: (batch["tokens"],),
        clip_norm=case.clip_norm,
        lr_schedule=case.lr_schedule if case.scheduled else None,
        num_items=case.num_items if case.by_items else None,
        dtype=case.dtype,
        precision=case.precision,
        seed=5,
    )
    engine = Engine(case.plan, ModelParts.of(case.model), recipe, blocking=case.blocking, values=values)
    if engine.scale is not None:
        engine.scale.value = SCALE
    return engine


def _train_by_plan(case: Case) -> Outcome:
    engine, found = engine_of(case), Outcome()
    for step in range(STEPS):
        report = engine.step(case.batch(step))
        found.losses.append(report.loss)
        found.norms.append(report.grad_norm)
        if step == 0:
            found.gradients = _gradients(engine.named_parameters())
    with engine.whole_parameters():
        found.parameters = {name: p.detach().clone() for name, p in engine.named_parameters()}
    found.held = engine.held_parts()
    if case.evaluates:
        found.losses.append(engine.evaluate(case.batch(step) for step in range(STEPS)).loss)
    engine.close()
    return found


def train_plainly(case: Case) -> Outcome:
    """The plain loop of a single process over the whole model: knows no plan, no engine."""
    model = case.model().to(case.dtype)
    names = case.global_names(model)
    first = ModelParts.of(case.model).stage(
        range(case.plan.num_blocks), device=torch.device("cpu"), seed=5, dtype=case.dtype
    )
    values = {name: p for b in first.block_range for name, p in first.block_parameters(b)}
    values |= dict(first.tied_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[names[name]])
    optimizer = case.optimizer(model.parameters())
    schedule = case.lr_schedule(optimizer) if case.scheduled else None
    found, scale = Outcome(), SCALE if case.precision is Precision.FP16 else 1.0
    for step in range(STEPS):
        batch = case.batch(step)
        optimizer.zero_grad()
        with computing_in(case.precision), extra_losses() as added:
            loss = case.loss(model(batch), batch) / (case.num_items(batch) if case.by_items else 1)
        loss = loss + sum(added)
        if loss.requires_grad:
            (loss * scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm or float("inf"))
        found.losses.append(loss.item())
        found.norms.append(norm.item())
        if step == 0:
            found.gradients = _gradients((names[name], p) for name, p in model.named_parameters())
        optimizer.step()
        if schedule:
            schedule.step()
    found.parameters = {names[name]: p.detach().clone() for name, p in model.named_parameters()}
    if case.evaluates:
        found.losses.append(_evaluate_plainly(case, model))
    return found


def _evaluate_plainly(case: Case, model: nn.Module) -> float:
    """The mean over all rows (or items) of all batches."""
    total = count = 0.0
    for step in range(STEPS):
        batch = case.batch(step)
        items = case.num_items(batch) if case.by_items else case.rows_by_step[step]
        with torch.no_grad(), computing_in(case.precision):
            loss = case.loss(model.eval()(batch), batch).item()
        total += loss if case.by_items else loss * items
        count += items
    return total / count


def computing_in(precision: Precision | None):
    """Torch's autocast, or nothing."""
    return torch.autocast("cpu", dtype=precision.dtype) if precision else nullcontext()


def global_names(model: TinyGPT) -> dict[str, str]:
    """Names in the model → names in the blocks."""
    last = len(model.layers) + 1
    found = {}
    for name, _ in model.named_parameters():
        place, rest = name.split(".", 1)
        if place == "layers":
            index, rest = rest.split(".", 1)
            found[name] = f"blocks.{int(index) + 1}.{rest}"
        else:
            found[name] = f"blocks.{0 if place == 'embed' else last}.{rest}"
    return found


def _gradients(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def train_all_by_plan(cases: list[Case]) -> list[Outcome]:
    """Several cases one after the other, on the same ranks."""
    return [train_by_plan(case) for case in cases]


@dataclass(frozen=True)
class Gap:
    """Largest differences between two outcomes; infinite where one has a gradient and the other none."""

    loss: float
    norm: float
    parameter: float
    gradient: float


def gap(found: Outcome, wanted: Outcome) -> Gap:
    """How far one rank's outcome is from the plain loop's."""
    return Gap(
        loss=_largest(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)),
        norm=_largest(abs(a - b) for a, b in zip(found.norms, wanted.norms, strict=True)),
        parameter=_largest(
            _difference(p, _part(wanted.parameters[n], found.held.get(n)))
            for n, p in found.parameters.items()
        ),
        gradient=_largest(
            _difference(g, _part(wanted.gradients[n], found.held.get(n))) for n, g in found.gradients.items()
        ),
    )


def _part(whole: Tensor | None, held: tuple[Intervals, ...] | None) -> Tensor | None:
    """The rows that a rank held of each dim."""
    if whole is None or held is None:
        return whole
    for dim, runs in enumerate(held):
        whole = whole.index_select(dim, torch.tensor([i for run in runs for i in run]))
    return whole


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return (a - b).abs().max().item()


def _largest(differences: Iterable[float]) -> float:
    found = [d if d == d else float("inf") for d in differences]
    return max(found, default=0.0)
