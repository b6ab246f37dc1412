"""Who is in the job: the commit rule, the coordinator's channel and messages, and the client; no torch."""
