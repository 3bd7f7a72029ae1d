"""Language models: the command, and a causal model in a program (benchmarks/language_model.py)."""

import argparse
import csv
import itertools
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dpmac_cli import ArrayData, clipped_grad
from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.config.networks import Trained
from dpmac_cli.config.writing import WRITTEN
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import InputError
from dpmac_cli.features.texts import encoder_weights
from dpmac_cli.models.language_model import CausalModel
from dpmac_cli.models.trained_part import ALPHA
from dpmac_cli.release import prediction
from dpmac_cli.release.model_file import load_model
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.tasks.language_model import LanguageModel
from dpmac_cli.tasks.task import METRICS
from tests.helpers import without
from tests.tiers import rest_long
from tests.tiny_bert import encoder_at, notes, text_inputs, write_network
from tests.typed import dpmac

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


def texts() -> dict[str, Tensor]:
    records = Texts(COUNT, WORDS, LENGTH, seed=1)
    assert len({int(mask.sum()) for mask in records.mask}) > 1, "of unequal length"
    return {"input_ids": records.ids, "attention_mask": records.mask}


def assert_mapped(notes: tuple[str, ...]) -> None:
    """Whatever this machine's products need, no network runs in a loop."""
    assert not any("one record after the other" in note for note in notes)


@pytest.mark.promise("one")
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


@pytest.mark.long
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


FAMILIES = ("gpt2", "llama", "qwen2")
LIMIT = 12
TEXTS = ("no pain", "severe pain since days and mild fever", "x", "cough\x00 <s> chest")


def written(family: str = "gpt2") -> list[str]:
    """Write a language model, a table of notes and its schema; return the flags of a short run."""
    write_network(Path(family), family, causal=True)
    rows = [f"{text},{row % 20}" for row, (text, _) in enumerate(notes(60))]
    Path("notes.csv").write_text("\n".join(["note,person", *rows]))
    Path("notes.yaml").write_text(f"drop: [person]\ncolumns: {{note: {{text: {LIMIT}}}}}")
    flags = "--dataset notes.csv --schema notes.yaml --task language-model --sigma 1 --steps 2"
    return ["train", *flags.split(), "--backbone", f"./{family}", "--out", "run"]


def causal(family: str, limit: int = LIMIT) -> tuple[CausalModel, Tensor]:
    """Return a network with the weights of a folder, and the inputs of :data:`TEXTS`."""
    write_network(Path(family), family, causal=True)
    encoder = encoder_at(f"./{family}", (0, limit), causal=True)
    network = CausalModel(encoder)
    assert list(encoder_weights(encoder).adopted_by(network, None)) == []
    return network, text_inputs(f"./{family}", TEXTS, limit)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # of peft
@pytest.mark.parametrize(
    ("family", "part"), [("gpt2", "lora"), ("llama", "norm"), ("qwen2", "all")]
)
def test_a_folder_trains_on_the_texts_of_a_table(family: str, part: str) -> None:
    shown = dpmac(*written(family), "--train", part)
    assert shown.exit_code == 0, shown.output
    report = json.loads(Path("run/report.json").read_text())
    low, high = (report["scores"]["perplexity"][end] for end in ("low", "high"))
    assert 1 < low < report["scores"]["perplexity"]["value"] < high
    width = read_encoder(f"./{family}").config.width
    rate = 0.64 / width if part == "all" else 0.16 / math.sqrt(width)
    assert report["settings"]["lr"] == pytest.approx(rate, rel=0.05)
    assert math.log(report["scores"]["perplexity"]["value"]) == pytest.approx(
        report["scores"]["loss"]
    )
    perplexity = METRICS["perplexity"].text(report["scores"]["perplexity"]["value"])
    assert f"test perplexity {perplexity}" in shown.output
    card = Path("run/model-card.md").read_text()
    assert "can memorise" in card
    assert "Unlabelled records with 1 text" in card
    assert ("PeftModel.from_pretrained" in card) == (part == "lora")
    Path("prompts.csv").write_text("note\nno pain\nfever and\n")
    shown = dpmac("predict", "run", "prompts.csv", "--length", "5", "--temperature", "0")
    assert shown.exit_code == 0, shown.output
    rows = list(csv.DictReader(Path("predictions.csv").read_text().splitlines()))
    assert len(rows) == 2
    assert all(row["predicted"] and float(row["perplexity"]) > 1 for row in rows)
    again = dpmac("eval", "run", "--json")
    if part == "lora":
        model = pytest.importorskip("peft").PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(family), "run"
        )
        own: Any = load_model("run").model.get_submodule("frozen")
        ids = torch.tensor(read_encoder(f"./{family}").reader(LIMIT).tokens(["no pain"], LIMIT))
        tokens = ids[ids > 0][None] - 1
        assert torch.allclose(model(tokens, labels=tokens).loss, own.losses(ids), atol=1e-4)
    assert json.loads(again.stdout)["perplexity"] == pytest.approx(
        report["scores"]["perplexity"]["value"], rel=1e-4
    )


@pytest.mark.promise("published")
def test_an_adapter_does_not_tell_where_its_network_was() -> None:
    flags, place = written(), Path("home-of-somebody").resolve()
    place.mkdir()
    Path("gpt2").rename(place / "gpt2")
    flags[flags.index("./gpt2")] = f"{place}/gpt2"
    shown = dpmac(*flags)
    assert shown.exit_code == 0, shown.output
    public = [file for file in Path("run").iterdir() if file.is_file()]
    assert Path("run/adapter_config.json") in public
    adapter = json.loads(Path("run/adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (Trained.rank, ALPHA)
    telling = [file.name for file in public if place.name.encode() in file.read_bytes()]
    assert telling == ["config.yaml"]


def test_texts_in_memory_have_no_targets() -> None:
    write_network(Path("gpt2"), "gpt2", causal=True)
    data = ArrayData([text for text, _ in notes(60)])
    options: dict[str, Any] = {"dataset": data, "backbone": "./gpt2", "sigma": 1.0, "steps": 2}
    facts = resolve(options | {"task": "language-model", "tokens": LIMIT}).plan.facts
    assert facts.train_size + facts.test_size == 60
    with pytest.raises(InputError, match=r"<arrays> has no y.*task='language-model'"):
        resolve(options)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_a_text_is_the_mean_over_its_own_tokens(family: str) -> None:
    network, x = causal(family)
    known = AutoModelForCausalLM.from_pretrained(family)
    (ids,) = network.ids(x.flatten(1))
    for row, found in zip(ids, network(x).flatten(), strict=True):
        tokens = row[row > 0][None] - 1
        if tokens.numel() > 1:
            assert torch.allclose(known(tokens, labels=tokens).loss, found, atol=1e-5)
    longer, y = causal(family, 40)
    assert torch.allclose(longer(y)[:1], network(x)[:1], atol=1e-6), "padding has no loss"
    tokens = ids[:1, : int((ids[0] > 0).sum())] - 1
    expected = known.generate(tokens, max_new_tokens=20, do_sample=False)[0, tokens.shape[1] :]
    assert next(network.continued(x, 20, 0.0)) == expected.tolist()
    drawn = [tuple(next(network.continued(x, 20, 1.0))) for _ in range(9)]
    assert len(set(drawn)) > 1
    with torch.no_grad():
        assert torch.allclose(network(x), torch.cat([network(row) for row in torch.split(x, 1)]))


@pytest.mark.promise("alone")
def test_a_person_with_several_notes_is_a_unit() -> None:
    shown = dpmac(*written(), "--unit", "person")
    assert shown.exit_code == 0, shown.output
    report = json.loads(Path("run/report.json").read_text())
    assert report["data"]["unit"] == "person"
    assert report["data"]["train_size"] + report["data"]["test_size"] == 20
    assert report["settings"]["physical_batch"] == 4224 // (
        8 * (LIMIT + WRITTEN)
    )  # all texts of a unit count


def test_the_perplexity_of_a_text_is_that_of_its_loss() -> None:
    found = LanguageModel().answers(np.array([[0.0], [2.0]]))
    np.testing.assert_allclose(found, [[1.0], [math.e**2]], rtol=1e-6)


def test_a_temperature_of_0_is_not_the_default() -> None:
    given = list[tuple[int, float]]()

    def continued(x: object, length: int, temperature: float) -> list[object]:
        given.append((length, temperature))
        return []

    released: Any = SimpleNamespace(
        reader=object(),
        facts=SimpleNamespace(task=LanguageModel()),
        model=SimpleNamespace(get_submodule=lambda name: SimpleNamespace(continued=continued)),
    )
    for temperature in (0.0, None, 0.5):
        prediction._continued(released, iter([torch.zeros(1)]), None, temperature)
    assert given == [(prediction.LENGTH, t) for t in (0.0, 1.0, 0.5)]
