"""Variables that every rank on a CPU starts with, unless the user has set them."""

CPU_RANKS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
}
"""One thread, since ranks share a machine; and memory that a step has freed stays with its rank.

glibc gives it back to the system and takes it anew, page by page, in every step: with 400 MiB of activations
a step of the demonstration's plan took 1.76 to 2.02 s instead of 1.60 to 1.62 (arachne run in the demo's lab,
a busy machine, 2026-11-29, AMD EPYC). 32 MiB is the most that glibc takes for the second; larger tensors are
still mapped one by one."""
