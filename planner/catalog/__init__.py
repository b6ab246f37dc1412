"""Device types and models by name, with the source of every figure."""
