"""Jobs that outlive their ranks: the command, its islands, its coordinator's and its store's processes."""
