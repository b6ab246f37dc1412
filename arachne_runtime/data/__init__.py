"""One global order of samples that a plan only slices."""
