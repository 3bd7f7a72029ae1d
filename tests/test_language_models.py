"""A small causal language model, trained whole and with LoRA: benchmarks/language_model.py."""

import argparse
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli import ball, clipped_grad
from tests.helpers import without
from tests.tiers import rest_long

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from language_model import Gpt, Texts, run, text_loss, with_lora

PAGE = Path(__file__).parents[1] / "docs" / "language-models.md"
WORDS, LENGTH, COUNT, RADIUS = 20, 7, 6, 0.05


def model(*, lora: bool) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = Gpt(WORDS, LENGTH, 2, 8)
    if lora:
        made = with_lora(made, 2)
        for name, p in made.named_parameters():
            if p.requires_grad and name.endswith("up.weight"):
                nn.init.normal_(p, std=0.1)
    return made


def texts(count: int = COUNT) -> dict[str, Tensor]:
    records = Texts(count, WORDS, LENGTH, seed=1)
    assert len({int(mask.sum()) for mask in records.mask}) > 1, "of unequal length"
    return {"input_ids": records.ids, "attention_mask": records.mask}


def assert_mapped(notes: tuple[str, ...]) -> None:
    """Whatever this machine's products need, no network runs in a loop."""
    assert not any("one record after the other" in note for note in notes)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("lora", "physical"), rest_long(itertools.product([False, True], [2, 256]))
)
def test_a_document_moves_the_sum_by_at_most_the_radius(lora: bool, physical: int) -> None:
    net, batch = model(lora=lora), texts()
    clipped = clipped_grad(net, text_loss, ball(RADIUS), batch_size=COUNT, physical_batch=physical)
    total = clipped(batch).clone()
    assert_mapped(clipped.notes)
    moved = [float((total - clipped(without(batch, i))).double().norm()) for i in range(COUNT)]
    assert 0.99 * RADIUS < max(moved) <= RADIUS


@pytest.mark.long
@pytest.mark.parametrize("lora", [True, False])
def test_perplexity_falls_under_epsilon_8(lora: bool) -> None:
    small: dict[str, Any] = {"words": 40, "length": 8, "layers": 1, "width": 16, "records": 2000}
    small |= {"batch": 128, "steps": 60, "public": 60, "lr": 0.01, "lora_lr": 0.01, "changed": 0.5}
    small |= {"physical_batch": 64, "device": "cpu"}
    found = run(argparse.Namespace(**small), lora=lora)
    assert found["perplexity after"] < 0.95 * found["perplexity before"]
    assert found["epsilon"] <= 8
    assert len(found["notes"]) == lora
    assert all("parameters are frozen: " in note for note in found["notes"])


@pytest.mark.filterwarnings("ignore")  # of other packages
def test_the_program_for_hugging_face_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Trainer that takes private steps, of which only LoRA's layers are trained."""
    for package in ("transformers", "peft", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not a dependency of dpmac")
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(program, "language-models.md", "exec"), names)
    step = names["step"]
    assert step.taken == len(step) > 4
    assert step.epsilon <= 8
    assert_mapped(step.notes)
    assert any("parameters are frozen" in note for note in step.notes)
    assert "Poisson-sampled" in capsys.readouterr().out
    sums = step._sums.clipped_sum
    assert all("lora_" in layer.name or "classifier" in layer.name for layer in sums.layers)
