"""Training the policy, offline: random problems, their labels, and what learns from them.

Problems: ``draw`` with ``clusters`` (devices, nodes, links), ``models`` and ``behaviour`` (profiles).
Labels: ``labels`` (records and files), ``labelling`` (the long search that makes them).
Nothing is imported here, so that drawing and labelling need no torch.
"""
