"""The report: keys that scripts rely on, and what they say."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NoReturn

import pytest

from dpmac_cli.accounting.accountants import ACCOUNTANTS, total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.guarantee import privacy
from dpmac_cli.release.report import SCHEMA_VERSION
from dpmac_cli.release.sentences import Case
from dpmac_cli.runs.ledger import Spent
from tests.digits_runs import RATE, SIGMA, train_digits

#: As the specification lists them.
KEYS: Mapping[str, set[str]] = {
    "dataset": {"name", "train_size"},
    "model": {"name", "parameters"},
    "privacy": {
        "epsilon",
        "epsilon_planned",
        "delta",
        "noise_multiplier",
        "sampler",
        "sampling_rate",
        "steps",
        "adjacency",
        "accountant",
        "statement",
    },
    "test": {"accuracy", "samples", "best_accuracy", "best_epoch"},
}


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    finished = train_digits(out=tmp_path_factory.mktemp("report") / "run", epochs=3)
    text = (finished.folder / "report.json").read_text()
    loaded = json.loads(text, parse_constant=refuse)
    assert isinstance(loaded, dict)
    return loaded


def test_every_promised_key_is_there(report: dict[str, Any]) -> None:
    assert report["schema_version"] == SCHEMA_VERSION == 1
    assert {"optimizer", "hyperparameters", "versions", "timings"} <= report.keys()
    for section, keys in KEYS.items():
        assert keys <= report[section].keys(), section


def test_facts_are_the_catalogs(report: dict[str, Any]) -> None:
    facts = DATASETS["digits"]
    assert report["optimizer"] == "dp-macadam"
    assert (report["dataset"]["name"], report["dataset"]["train_size"]) == ("digits", 1437)
    assert report["dataset"]["sha256"] == facts.sha256
    assert report["model"] == {
        "name": "mlp-small",
        "parameters": 4810,
        "fix_norm": False,
        "built_by": None,
        "independence": {
            "kind": "isolated",
            "statement": "The network saw one record at a time in training, so it could not mix "
            "records.",
        },
    }
    assert report["classes"] == list(facts.task.names)


def test_the_test_section_is_consistent(report: dict[str, Any]) -> None:
    test = report["test"]
    assert test["samples"] == 360
    assert 0 <= test["accuracy"] <= test["best_accuracy"] <= 1
    assert test["best_epoch"] in (1, 2, 3)
    assert test["accuracy"] * 360 == pytest.approx(round(test["accuracy"] * 360))


@pytest.mark.privacy
def test_the_price_is_the_accountants(report: dict[str, Any]) -> None:
    price = report["privacy"]
    event = TrainingEvent(RATE, SIGMA, 36, "poisson", 12)
    assert price["private"] is True
    assert price["epsilon"] == price["epsilon_planned"] == total_epsilon((event,), 1e-5)
    assert (price["noise_multiplier"], price["delta"], price["steps"]) == (SIGMA, 1e-5, 36)
    assert price["sampling_rate"] == RATE
    assert (price["sampler"], price["adjacency"]) == ("poisson", "add-or-remove-one")
    assert price["accountant"] == ACCOUNTANTS["pld"]
    assert "Connect-the-Dots" in price["accountant"]
    assert version("dp-accounting") in price["accountant"]
    assert "36 Poisson-sampled steps" in price["statement"]
    assert "were not saved" in price["seed_policy"]["statement"]


@pytest.mark.privacy
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_price_is_the_samplers(sampler: str) -> None:
    price = train_digits(sampler=sampler, steps=13).report["privacy"]
    event = TrainingEvent(RATE, SIGMA, 13, sampler, 12)
    assert price["epsilon"] == total_epsilon((event,), 1e-5) == price["epsilon_planned"]
    assert (price["sampler"], price["adjacency"]) == (sampler, "add-or-remove-one")
    assert price["accountant"] == ACCOUNTANTS["pld"]
    assert "under add-or-remove-one adjacency" in price["statement"]
    assert f"13 {SAMPLERS[sampler].done} steps" in price["statement"]
    assert [TrainingEvent(**event) for event in price["events"]] == [event]


def test_versions_of_everything_that_matters(report: dict[str, Any]) -> None:
    for package in ("dpmac", "torch", "torchvision", "numpy", "dp-accounting"):
        assert report["versions"][package] == version(package)
    assert "python" in report["versions"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hyperparameters_are_those_with_an_effect(optimizer: str) -> None:
    finished = train_digits(optimizer=optimizer, steps=1)
    used = finished.report["hyperparameters"]
    chosen = OPTIMIZERS[optimizer]
    assert used.keys() == {"steps", "epochs", "batch_size", *chosen.used()}
    assert used["lr"] == chosen.default_lr("digits")


def spent(steps: int, seeded: bool = False) -> Spent:
    event = TrainingEvent(0.1, 1.5, steps)
    return Spent((), event, base=0, begun=steps, seeded=seeded, secure=False)


@pytest.mark.privacy
def test_a_given_seed_is_admitted_and_not_told() -> None:
    config = resolve({"dataset": "digits", "seed": 918273645}).plan
    found = privacy(Case(config, spent(steps=1, seeded=True)))
    assert found.seed_policy.given is True
    for text in (found.seed_policy.statement, found.statement):
        assert "only against those who do not" in text
    assert "918273645" not in found.model_dump_json()


@pytest.mark.privacy
def test_a_delta_too_small_for_loss_distributions_has_an_epsilon_by_rdp() -> None:
    resolved = resolve({"dataset": "digits", "delta": "1e-300"})
    assert any("RDP accountant" in note for note in resolved.notes)
    price = privacy(Case(resolved.plan, spent(steps=3)))
    assert (price.accountant or "").startswith("rdp")
    assert price.epsilon == total_epsilon(price.training_events(), 1e-300, "rdp")
