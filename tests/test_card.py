"""The model card: true, complete, and with a code block that works as it stands."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.dataset import Split, standardisation
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.models.build import build_model
from dpmac_cli.models.registry import MODELS, BuiltIn
from dpmac_cli.release import run
from dpmac_cli.release.card import model_card
from dpmac_cli.release.model_file import load_model, save_model
from dpmac_cli.release.publish import Finished, public_facts
from dpmac_cli.release.report import Report
from dpmac_cli.runs import folder
from dpmac_cli.runs.prepare import PreparedRun
from tests.digits_runs import SEED, digits_config, train_digits, train_events
from tests.test_report import spent

CPU = torch.device("cpu")


def card(where: Path) -> str:
    return (where / "model-card.md").read_text(encoding="utf-8")


def code(text: str) -> str:
    """The one code block of a card."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)


def cells(text: str) -> dict[str, str]:
    """The rows of its tables of two columns."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in reversed(rows) if len(row) == 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train_digits(out=tmp_path_factory.mktemp("card") / "run", epochs=2)


# The code block


@pytest.mark.long
def test_the_code_block_gives_the_reports_accuracy_without_dpmac(finished: Finished) -> None:
    test = load_data("digits", finished.folder, CPU).test
    torch.save({"images": test.images, "labels": test.labels}, finished.folder / "test.pt")
    script = code(card(finished.folder)) + (
        "\nimport sys\n"
        "test = torch.load('test.pt')\n"
        "right = classify(test['images']) == test['labels']\n"
        "assert not [name for name in sys.modules if name.startswith('dpmac')]\n"
        "print(int(right.sum()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=finished.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    (finished.folder / "test.pt").unlink()
    assert done.stderr == ""
    assert int(done.stdout) / 360 == finished.report["test"]["accuracy"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "dataset"), [*((name, "cifar10") for name in MODELS), ("cnn", "mnist")]
)
def test_the_code_block_of_every_network_computes_what_the_network_does(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, dataset: str
) -> None:
    config = resolve({"dataset": dataset, "model": model, "sigma": 6}).plan
    torch.manual_seed(0)
    data = load_data("digits", tmp_path, CPU)
    network = build_model(BuiltIn(model), config.data.facts.signature, seed=1).eval()
    like = Split(torch.zeros(1, *config.data.facts.shape), torch.zeros(1, dtype=torch.int64))
    task = PreparedRun(model=network, trained=network, data=replace(data, train=like))
    facts = public_facts(config, spent(steps=1), task, trained=1)
    pixels = torch.randint(0, 256, (20, *config.data.facts.shape), dtype=torch.uint8)
    given = facts.input
    gain, offset = standardisation(given.levels, given.mean, given.std, CPU)
    x = replace(data, gain=gain, offset=offset).standardised(pixels)
    with torch.no_grad():  # untrained, it would call everything the same
        list(network.parameters())[-1].sub_(network(x).mean(0))
    wanted: Tensor = network(x).argmax(1)
    assert len(set(wanted.tolist())) > 3
    save_model(tmp_path / folder.MODEL, network, facts.values())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    report = Report.model_validate({**finished.report, **facts.values()})
    exec(code(model_card(report, network)), names)
    assert torch.equal(names["classify"](pixels), wanted)
    assert torch.equal(load_model(tmp_path, None, CPU).model(x).argmax(1), wanted)


# What it says


@pytest.mark.privacy
def test_it_says_what_the_report_says(finished: Finished) -> None:
    text, report = card(finished.folder), finished.report
    written = Report.model_validate(report)
    assert text == model_card(written, load_model(finished.folder, None, CPU).model)
    price = report["privacy"]
    epsilon = format_epsilon(price["epsilon"])
    assert text.startswith(f"# mlp-small on digits, epsilon {epsilon} at delta 1e-05\n")
    assert price["statement"] in text
    said = cells(text)
    assert said["network"] == "mlp-small, 4,810 parameters"
    assert said["trained on"] == "digits, 1,437 records"
    assert said["its checksum"] == f"SHA-256 `{DATASETS['digits'].sha256}`"
    assert said["training"] == "dp-macadam, steps: 24 (epochs: 2), expected batch 128, finished"
    accuracy = report["test"]["accuracy"]
    low, high = report["test"]["accuracy_interval"]
    assert said["test accuracy"] == (
        f"{accuracy:.2%} of 360 test records (95% interval for records like these: "
        f"{low:.2%} to {high:.2%})"
    )
    assert said["classes"] == "`0`, `1`, `2`, `3`, `4`, `5`, `6`, `7`, `8`, `9`"
    assert (said["epsilon"], said["delta"]) == (epsilon, "1e-05")
    assert said["adjacency"].startswith("add-or-remove-one: adding or removing any one")
    assert said["accountant"] == price["accountant"]
    assert "were not saved" in said["seeds"]
    assert "| this model | 24 | poisson | 0.0890745 | 6 |" in text


@pytest.mark.privacy
def test_it_says_what_is_not_covered(finished: Finished) -> None:
    rest = card(finished.folder).split("## Not covered")[1]
    for said in (
        "Other runs on the same records: a hyperparameter search",
        "The test records. The accuracy was measured on them without noise. If settings, steps",
        "Times in `report.json` and `metrics.jsonl`: they are measured, without noise.",
        "the folder `checkpoint/`, which must never be published",
    ):
        assert said in rest
    rows = finished.report["privacy"]["computed_from_records"]
    status = {row["what"]: row["status"] for row in rows}
    assert status["number of training records"] == "declared public"
    assert status["scores of the test records"] == "not covered"
    for row in rows:
        assert f"| {row['what']} | {row['status']} |" in card(finished.folder)


@pytest.mark.privacy
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_it_names_the_samplers_own_adjacency(sampler: str) -> None:
    finished = train_digits(sampler=sampler, steps=1)
    adjacency = "add-or-remove-one"
    text = card(finished.folder)
    assert f"under {adjacency} adjacency" in text
    assert cells(text)["adjacency"].startswith(f"{adjacency}: ")
    assert f"| this model | 1 | {sampler} |" in text


@pytest.mark.privacy
def test_a_seed_is_admitted_in_card_report_and_header() -> None:
    finished = train_digits(seed=SEED)
    said = "There is no guarantee against anyone who knows or guesses the seed"
    text = card(finished.folder)
    title, _, lead, *_ = text.splitlines()
    assert title.endswith("at delta 1e-05 only against those who do not know its seed")
    assert said in lead
    assert said in cells(text)["seeds"]
    header = load_model(finished.folder, None, CPU).facts
    for facts in (finished.report, header):
        assert facts["privacy"]["statement"].count(said) == 1
        assert said in facts["privacy"]["seed_policy"]["statement"]


@pytest.mark.privacy
def test_a_fork_of_a_seeded_run_is_seeded() -> None:
    first = train_digits(seed=SEED, out="run")
    *_, last = run.fork(first.folder, {"steps": "5", "out": "forked"})
    assert isinstance(last, Finished)
    assert "only against those who do not know its seed" in card(last.folder).splitlines()[0]


@pytest.mark.privacy
def test_without_a_seed_it_claims_no_less() -> None:
    assert "There is no guarantee" not in card(train_digits().folder)


@pytest.mark.privacy
def test_a_baseline_says_so_in_its_first_line() -> None:
    text = card(train_digits(no_dp=True, seed=SEED).folder)
    title, _, lead, *_ = text.splitlines()
    assert title == "# mlp-small on digits, trained without privacy"
    assert lead.startswith("**No privacy: no noise was added.")
    assert "Everything: this is a baseline." in text.split("## Not covered")[1]
    assert "differential privacy" not in text
    assert "epsilon" not in text


@pytest.mark.privacy
def test_a_delta_too_small_for_loss_distributions_names_the_accountant() -> None:
    finished = train_digits(delta="1e-300")
    epsilon = finished.report["privacy"]["epsilon"]
    found = cells(card(finished.folder))
    assert found["epsilon"] == format_epsilon(epsilon)
    assert found["accountant"].startswith("rdp")


@pytest.mark.privacy
@pytest.mark.privacy
def test_every_ancestor_of_a_fork_is_listed() -> None:
    first = train_digits(out="run", steps=5)
    before = card(first.folder)
    *_, last = run.fork(first.folder, {"steps": "9", "sigma": "8", "out": "forked"})
    assert isinstance(last, Finished)
    text = card(last.folder)
    assert "| before 1 | 5 | poisson | 0.0890745 | 6 |" in text
    assert "| this model | 4 | poisson | 0.0890745 | 8 |" in text
    assert cells(text)["epsilon"] == format_epsilon(last.report["privacy"]["epsilon"])
    assert card(first.folder) == before


def test_a_run_that_ended_early_says_so() -> None:
    _, stopped = train_events(digits_config(), lambda: True)
    said = cells(card(stopped.folder))["training"]
    assert said == "dp-macadam, steps: 1 (epochs: 0.08333), expected batch 128, interrupted"
    spent = train_digits(epochs=2, max_epsilon=0.2)
    assert cells(card(spent.folder))["training"].endswith("budget-spent")


def test_a_data_set_without_a_checksum_has_none(finished: Finished) -> None:
    report = json.loads(json.dumps(finished.report))
    report["dataset"]["sha256"] = None
    text = model_card(
        Report.model_validate(report),
        build_model(BuiltIn("mlp-small"), DATASETS["digits"].signature, seed=0),
    )
    assert cells(text)["its checksum"] == "not recorded for this dataset"


def test_the_interval_is_clopper_and_pearsons(finished: Finished) -> None:
    test = finished.report["test"]
    wanted = binomtest(round(test["accuracy"] * 360), 360).proportion_ci()
    assert test["accuracy_interval"] == pytest.approx([wanted.low, wanted.high])
    shown = f"{wanted.low:.2%} to {wanted.high:.2%}"
    assert shown in cells(card(finished.folder))["test accuracy"]
