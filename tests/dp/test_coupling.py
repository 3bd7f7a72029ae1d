"""A record that is replaced changes no bit of any other row at its place, in any network.

Together with random places, which do not depend on it, that is why a record moves the sum by its
own gradient alone (docs/rounding.md).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli.config.datasets import Signature
from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.matmul import RowProducts
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.losses import Loss, plain
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.models.architectures import cnn, perceptron, resnet18, wide_resnet
from tests.layer_cases import CASES, energy
from tests.tiers import one_in

from .test_arithmetic import ORDINARY

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]
#: Records of a chunk, and the one that is replaced.
RECORDS, REPLACED = 24, 9
Network = Callable[[], nn.Module]


def networks() -> Iterator[Any]:
    """Networks, records for them, a loss, and whether both are built in."""
    for case in CASES:
        if not case.refused:
            yield pytest.param(
                case.build, case.batch()[:RECORDS], energy, False, id=f"{case.group}: {case.name}"
            )
    for name, (inputs, build) in ORDINARY.items():
        yield pytest.param(build, torch.randn(RECORDS, inputs), energy, False, id=name)
    image = Signature((3, 16, 16), 10)
    built_in = {
        "mlp": partial(perceptron, image, 50),
        "cnn": partial(cnn, image),
        "resnet18": partial(resnet18, image),
        "wrn-10-1": partial(wide_resnet, image, 10, 1),
    }
    for name, make in built_in.items():
        yield pytest.param(make, torch.randn(RECORDS, *image.shape), plain, True, id=name)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("by_rows", [False, True], ids=["torch", "oneDNN"])
@pytest.mark.parametrize(
    ("build", "records", "loss", "built_in"), one_in(6, networks(), "mlp", "cnn", "resnet18")
)
def test_a_replaced_record_changes_no_bit_of_another(
    build: Network, records: Tensor, loss: Loss, built_in: bool, by_rows: bool
) -> None:
    torch.manual_seed(0)
    structure = Structure(records[:1], keep=not records.is_floating_point())
    per_sample = PerSample(build(), structure, loss=loss, rowwise=built_in)
    if not per_sample.vmapped:
        pytest.skip("each record runs alone")
    per_sample.by_rows = by_rows
    expected = rows_of(per_sample, records)
    assert len(expected) > 3
    others = torch.arange(RECORDS) != REPLACED
    for other in others_of(records):
        replaced = records.clone()
        replaced[REPLACED] = other
        found, changed = rows_of(per_sample, replaced), False
        for before, after in zip(expected, found, strict=True):
            assert after[others].equal(before[others])
            changed |= not after[REPLACED].equal(before[REPLACED])
        assert changed


def others_of(records: Tensor) -> list[Tensor]:
    """Records of other numbers or tokens than the one that is replaced."""
    record = records[REPLACED]
    if not record.is_floating_point():
        return [(record + 1) % (int(records.max()) + 1), torch.zeros_like(record)]
    drawn = torch.randn_like(record)
    mixed = torch.where(drawn > 0, drawn, torch.nan)
    return [*(drawn * size for size in (1e4, 1e30, torch.nan, torch.inf)), mixed]


def rows_of(per_sample: PerSample, records: Tensor) -> list[Tensor]:
    """All results of operations, and gradients or what they follow from, a row per record."""
    labels = torch.zeros(RECORDS, dtype=torch.long)
    results = list[Tensor]()
    with torch.no_grad(), full_float32():
        for run in (per_sample.observed, per_sample.__call__):
            torch.manual_seed(1)
            results += tensors_of(run(records, labels))
    return [
        tensor.detach().reshape(RECORDS, -1).contiguous().view(torch.uint8)
        for tensor in results
        if tensor.ndim and len(tensor) and len(tensor) % RECORDS == 0
    ]


def tensors_of(found: Any) -> Iterator[Tensor]:
    """The tensors of uses and gradients, in order."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Use):
        yield from (found.inputs, found.grad_output)
    else:
        for part in found or ():
            yield from tensors_of(part)


@pytest.mark.promise("alone")
def test_a_product_that_rounds_by_other_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(self: RowProducts, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        found = a @ b
        return torch.nextafter(found, found + 1) if bool(a.abs().max() > 1e3) else found

    monkeypatch.setattr(RowProducts, "_product", product)
    records = torch.randn(RECORDS, 16)
    with pytest.raises(AssertionError):
        test_a_replaced_record_changes_no_bit_of_another(
            partial(nn.Linear, 16, 8), records, energy, built_in=False, by_rows=True
        )
