"""Measures blocks, links and running steps."""
