"""Training the policy, offline: random problems, their labels, and what learns from them.

Problems: ``draw`` with ``clusters`` (devices, nodes, links), ``models`` and ``behaviour`` (profiles);
``variants`` of what was measured; ``problem`` (one with all that training asks of it).
Labels: ``labels`` (records and files), ``labelling`` (the long search that makes them) with ``every`` (all
templates of a tiny cluster) and ``sequences`` (plans as the policy says them), ``store`` (a growing folder).
Learning: ``learner`` and ``network`` (tensors), ``record`` and ``examples`` (decisions as arrays),
``imitation``; ``group_relative`` with ``explore``, ``reward``, ``advantage`` and ``buffer``, whose weights
``improve`` keeps where they win.
Runs: ``run`` and ``fine_tune`` with ``recipe``, ``context``, ``curves``, ``validate``, ``evaluation``, and
``card``.
Nothing is imported here, so that drawing and labelling need no torch.
"""
