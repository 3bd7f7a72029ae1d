"""A classifier of texts in Opacus: batches are dicts, the network takes keyword arguments."""

from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def run(net: nn.Module, texts: Any, steps: int) -> float:
    """Train; return epsilon."""
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        data_loader=DataLoader(texts, batch_size=64),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    taken = 0
    while taken < steps:
        for batch in loader:
            optimizer.zero_grad()
            labels = batch.pop("labels")
            cross_entropy(model(**batch).logits, labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            taken += 1
            if taken == steps:
                break
    epsilon: float = engine.accountant.get_epsilon(1e-5, eps_error=2e-4)
    return epsilon
