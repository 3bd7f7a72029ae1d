"""Networks of transformers, with ordinary masks: benchmarks/zoo.py."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmac_cli import ball, clipped_grad
from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.clipping.per_sample import constant_draws

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
zoo: Any = pytest.importorskip("zoo", reason="needs transformers and timm", exc_type=ImportError)

RECORDS, RADIUS = 4, 0.05

pytestmark = [pytest.mark.long, pytest.mark.privacy, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name.startswith("transformers")])
def test_sums_are_those_of_each_record_alone(name: str) -> None:
    """By vmap, against autograd in float64."""
    torch.manual_seed(0)
    kind = zoo.ZOO[name]
    network = kind.build().double()
    batch = {key: t[:RECORDS] for key, t in kind.records().items()}
    batch = {key: t.double() if t.is_floating_point() else t for key, t in batch.items()}
    alone = copy.deepcopy(network).train()
    clipped = clipped_grad(network, kind.loss, ball(RADIUS), batch_size=RECORDS)
    clipped.prepare(batch)
    assert clipped.notes == ()
    with constant_draws():
        found = clipped.by_parameter(clipped(batch))
        expected = {key: torch.zeros_like(part) for key, part in found.items()}
        parameters = [dict(alone.named_parameters())[key] for key in found]
        for row in range(RECORDS):
            loss = kind.loss(alone, {key: t[row : row + 1] for key, t in batch.items()}).sum()
            g: Any = torch.autograd.grad(loss, parameters, materialize_grads=True)
            norm = torch.cat([part.flatten() for part in g]).norm()
            factor = min(1.0, RADIUS * clip_limit(RECORDS) / float(norm))
            for key, part in zip(found, g, strict=True):
                expected[key] += factor * part
    for key, part in expected.items():
        torch.testing.assert_close(found[key], part, rtol=1e-6, atol=1e-9)
