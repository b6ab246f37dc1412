"""The nouns both halves share: Cluster, ModelSpec, Profile, Plan, Schedule, and their arithmetic; no torch."""
