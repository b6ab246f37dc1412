"""What a training script holds: the plan, the ranks, and an engine made from them."""
