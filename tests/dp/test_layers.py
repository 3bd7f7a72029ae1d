"""Clipped sums of every layer of torch and of typical networks, against autograd by record."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.clipping.per_sample import constant_draws
from dpmac_cli.dp.mechanism import ball, ellipsoid
from dpmac_cli.errors import ModelError
from dpmac_cli.step import clipped_grad
from tests.layer_cases import CASES, Case
from tests.tiers import one_in

from .reference import clip

RECORDS, RADIUS = 6, 0.05
#: Networks of usual size are for benchmarks.
SMALL = [case for case in CASES if case.group != "usual sizes"]
#: Networks that vmap cannot run.
LOOPED = {
    "LSTM, packed sequence",
    "checkpointed block",
    "custom autograd.Function",
    "if x.max() > 1",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


def built(case: Case) -> nn.Module:
    """The network of a case in float64, without dropout in layers that draw by themselves."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = case.build()
    for module in network.modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return network


def named(cases: list[Case]) -> Any:
    return [pytest.param(case, id=f"{case.group}: {case.name}") for case in cases]


@pytest.mark.privacy
@pytest.mark.parametrize("case", one_in(8, named([case for case in SMALL if not case.refused])))
def test_sums_are_those_of_each_record_alone(case: Case) -> None:
    """Clipped to a ball, and to an ellipsoid about another centre."""
    network, x = built(case).double(), case.batch()[:RECORDS]
    x = x.double() if x.is_floating_point() else x
    alone = copy.deepcopy(network).train()
    clipped = clipped_grad(network, case.loss, ball(RADIUS), batch_size=RECORDS)
    sums = clipped.prepare(x)
    assert sums.per_sample.vmapped == (case.name not in LOOPED), sums.notes
    g = torch.zeros(RECORDS, len(clipped.theta), dtype=torch.float64)
    with constant_draws():
        for row, out in zip(torch.split(x, 1), g, strict=True):
            parts = clipped.by_parameter(out)
            parameters = [dict(alone.named_parameters())[name] for name in parts]
            loss: Any = case.loss(alone, row).sum()
            found = torch.autograd.grad(loss, parameters, materialize_grads=True)
            for part, gradient in zip(parts.values(), found, strict=True):
                part.copy_(gradient.to_dense())
        spread = torch.exp(torch.randn_like(clipped.theta))
        centre = 0.1 * RADIUS * torch.randn_like(clipped.theta)
        for region in (ball(RADIUS, clipped.theta), ellipsoid(centre, RADIUS * spread)):
            clipped.region = region
            expected = clip(g, region, clip_limit(RECORDS)).sum(0)
            torch.testing.assert_close(clipped(x).double(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.privacy
@pytest.mark.parametrize("case", named([case for case in SMALL if case.refused]))
def test_layers_that_cannot_be_clipped_are_refused(case: Case) -> None:
    clipped = clipped_grad(built(case), case.loss, ball(RADIUS), batch_size=RECORDS)
    with pytest.raises(ModelError, match=case.refused):
        clipped(case.batch()[:RECORDS])
