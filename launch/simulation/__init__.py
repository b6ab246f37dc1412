"""Training on devices that go and come, simulated: a trace against the planner and the price of changes.

``trace`` says who is there when, ``reading`` and ``drawn`` make one, ``availability`` follows it; ``plans``
has a plan for every set of devices, ``holders`` says which state outlives a loss, ``costs`` what all of it
takes. ``job`` is the event-driven simulation, told what to do by ``policies``; ``outcome`` is what it tells.
"""
