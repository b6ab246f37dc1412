"""The command line, the torchrun wrapper, the lab and the reports."""
