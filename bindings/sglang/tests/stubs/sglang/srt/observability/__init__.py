"""A stub: see the folder above."""
