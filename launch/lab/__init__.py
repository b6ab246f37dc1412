"""Unequal devices on one Linux machine, for people without a mixed cluster."""
