"""Train one PyTorch model on unequal devices: the runtime, and the nouns it shares with the planner."""

__version__ = "0.1.0"
