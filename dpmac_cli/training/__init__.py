"""Training state, one step, the loop, evaluation and several processes."""
