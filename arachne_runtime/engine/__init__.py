"""Plays a schedule on one rank with exact gradients."""
