"""The state of a training job in a form that no plan changes."""
