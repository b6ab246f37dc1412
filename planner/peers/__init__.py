"""Rivals as strategies over the same price."""
