"""A checksum that changes with whatever it covers, and with nothing else."""

import pytest
import torch
from torch import Tensor

from dpmac_cli.storage.digest import digest

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1)}
RECORD = {"step": 3, "rate": 0.1}


def test_order_and_memory_layout_do_not_matter() -> None:
    backwards = {"b": TENSORS["b"], "a": TENSORS["a"].t().contiguous().t()}
    assert digest(backwards, {"rate": 0.1, "step": 3}) == digest(TENSORS, RECORD)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": TENSORS["a"]},
        {"c": TENSORS["a"], "b": TENSORS["b"]},
        {**TENSORS, "a": TENSORS["a"].view(3, 2)},
        {**TENSORS, "b": torch.tensor(1.0)},
        {**TENSORS, "b": torch.tensor(2)},
        {**TENSORS, "b": torch.tensor(True)},
        {**TENSORS, "b": torch.tensor(1.0).bfloat16()},
        {**TENSORS, "c": torch.zeros(0)},
    ],
    ids=["missing", "renamed", "reshaped", "float", "changed", "bool", "bfloat16", "more"],
)
def test_every_change_of_a_tensor_matters(tensors: dict[str, Tensor]) -> None:
    assert digest(tensors, RECORD) != digest(TENSORS, RECORD)


def test_every_change_of_the_record_matters() -> None:
    assert digest(TENSORS, {**RECORD, "rate": 0.2}) != digest(TENSORS, RECORD)
