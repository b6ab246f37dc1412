"""Plans: prices, cuts, searches. Knows the nouns, never torch, never a running job."""
