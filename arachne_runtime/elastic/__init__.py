"""A rank that outlives others: it follows the next record, and repeats what was cut short."""
