"""One training run: its folder, checkpoints, ledger, report and published model."""
