"""Every option once; flags, environment and file are generated from it."""
