"""Grids of runs, who carries them out, and tables of results."""
