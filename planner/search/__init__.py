"""The search for a plan: propose templates, complete, pack and refine them; prove small problems.

``find`` puts it together, ``judge`` is the only place that prices, ``score`` says what is better, ``found``
is the answer. What a cluster offers: ``supply``.
Propose: ``sources`` (who is asked: ``running``, ``uniform``, the enumeration in ``propose``; the policy
stands above, in ``planner.sources``),
``batch`` (templates as arrays), ``shapes`` (templates without numbers, and how they get them), ``moves``.
Complete: ``columns`` with ``min_max`` (cuts), ``closed_form``, ``rows`` and ``held`` (seconds and
memory of every run of blocks), ``network``; several runs in each stage: ``interleave``. Pack: ``pack``.
To plans: ``assemble``, ``place``, ``template``, ``tidy``. All of it: ``broad``.
Single devices of small clusters: ``refine``, ``complete``, ``deal``, ``stage_tables``; the proof:
``exact`` with ``counts``. Beside it: ``migrate`` and ``realign`` (changes of
plan), ``missing`` with ``leanest`` (why nothing fits), ``enlarge``.
"""

from .enlarge import enlarged
from .find import Step, find_plan
from .found import Found, Rival, Runner, signed
from .judge import Priced, Progress
from .leanest import Leanest
from .missing import Change, ChangeKind, Missing, what_is_missing
from .propose import Enumeration, Source
from .running import Running
from .uniform import Uniform

__all__ = [
    "Change",
    "ChangeKind",
    "Enumeration",
    "Found",
    "Leanest",
    "Missing",
    "Priced",
    "Progress",
    "Rival",
    "Runner",
    "Running",
    "Source",
    "Step",
    "Uniform",
    "enlarged",
    "find_plan",
    "signed",
    "what_is_missing",
]
