"""The thread that breaks groups outlives one that cannot be broken."""

import queue

from arachne_runtime.membership import watch as watch_module
from arachne_runtime.membership.messages import Freeze
from arachne_runtime.membership.watch import Watch


def test_a_group_that_is_gone_keeps_no_other_from_being_broken(monkeypatch):
    broken = queue.Queue()

    def break_group(group):
        if group == "gone":
            raise KeyError(group)
        broken.put(group)

    monkeypatch.setattr(watch_module, "break_group", break_group)
    with Watch() as watch:
        for generation in (1, 2):
            watch.guard(generation, ["gone", f"group of {generation}"])
            watch.on_stop(Freeze(generation=generation, why="a:1 is dead"))
            assert broken.get(timeout=10) == f"group of {generation}"
        watch.guard(3, ["gone"])
        watch.break_all()  # in the thread of the rank
