"""How a rank keeps and steps its optimizer states: whole, or split over the replicas of a stage by DeepSpeed.

Importing the package loads neither torch nor DeepSpeed, so that a launcher may ask it about a plan.
"""
