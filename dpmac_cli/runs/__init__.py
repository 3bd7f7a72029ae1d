"""One training run: train and resume; its folder, checkpoints and ledger."""
