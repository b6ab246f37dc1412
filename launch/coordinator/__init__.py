"""The coordinator of an elastic job: decides who is in it, and publishes what makes a generation."""
