"""Studies: grids of runs, executors, and tables of results."""
