"""Who is in the job: the commit rule, the coordinator's channel and client; torch in `watch` alone."""
