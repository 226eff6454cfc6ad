"""The routes, one file for each thing a client may want."""
