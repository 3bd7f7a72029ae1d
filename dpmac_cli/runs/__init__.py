"""One training run: train, resume and fork; its folder, checkpoints and ledger."""
