"""A rank that outlives others: it leaves a generation, follows the next record, and repeats what was cut short."""
