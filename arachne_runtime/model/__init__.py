"""From a user's model to blocks that a rank can build alone."""
