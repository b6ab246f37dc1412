"""The nouns of both halves (Cluster, ModelSpec, Profile, Plan, Schedule) and their arithmetic; no torch."""
