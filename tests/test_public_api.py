"""The public names of the package: a run from settings to predictions, and names of version 0.3."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import dpmac_cli
from dpmac_cli import (
    ArrayData,
    InputError,
    Poisson,
    PrivateStep,
    Run,
    before_0_4,
    compare,
    from_dataframe,
    load,
    make_private,
    resume,
    train,
)
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.config import settings
from dpmac_cli.config.facts import in_memory
from dpmac_cli.release.report import Report
from tests.typed import dpmac

SETTINGS: dict[str, Any] = {"dataset": "digits", "sigma": 4, "epochs": 2, "device": "cpu"}
ROOT = Path(__file__).parent.parent
IMAGES = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8) % 17


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A short run, with the updates that it sent."""
    return train(SETTINGS, out=tmp_path_factory.mktemp("public") / "run")


def test_a_run_is_trained_scored_and_asked(run: Run) -> None:
    report = json.loads((run.folder / "report.json").read_text())
    assert run.report == report
    assert run.epsilon == report["epsilon"] == total_epsilon(run.events, report["delta"])
    assert run.score().accuracy == report["scores"]["accuracy"]["value"]
    assert len(run.predict(IMAGES).predicted) == 3
    assert not run.model.training
    assert run.state == "finished"


@pytest.mark.parametrize("part", ["", "model.safetensors"])
def test_a_run_is_loaded_from_its_folder_or_its_model_file(run: Run, part: str) -> None:
    loaded = load(run.folder / part)
    assert (loaded.epsilon, loaded.events) == (run.epsilon, run.events)
    assert np.array_equal(loaded.predict(IMAGES).outputs, run.predict(IMAGES).outputs)
    assert ("scores" in loaded.report) == (part == "")


def test_updates_of_a_run_have_its_epsilon_and_a_result_after_each_epoch(tmp_path: Path) -> None:
    results = []

    def note(update: Any) -> None:
        if update.result is not None:
            results.append((update.step, update.epsilon, update.result.accuracy))

    run = train(SETTINGS, out=tmp_path / "run", on_event=note)
    steps, epsilons, accuracies = zip(*results, strict=True)
    assert steps[-1] == run.events[0].steps == 2 * steps[0]
    assert epsilons[0] < epsilons[1] == run.epsilon
    assert accuracies[-1] == run.score().accuracy


def test_a_run_that_was_stopped_is_resumed_by_itself(tmp_path: Path) -> None:
    stopped = train(SETTINGS, out=tmp_path / "run", stop=lambda: True)
    assert stopped.state == "interrupted"
    whole = resume(stopped)
    assert (whole.state, whole.folder) == ("finished", stopped.folder)
    assert whole.epsilon is not None
    assert stopped.epsilon is not None
    assert whole.epsilon > stopped.epsilon
    longer = resume(whole, epochs=3, out=tmp_path / "longer")
    assert len(longer.events) == 3  # before and after the stop, and the third epoch


@pytest.mark.promise("again")
def test_a_run_never_tells_the_epsilon_of_another_model(tmp_path: Path) -> None:
    """A network of epsilon 8 is not used as one of epsilon 1, and a resumed one not as before."""
    where = tmp_path / "run"
    settings: dict[str, Any] = {"dataset": "digits", "model": "linear", "device": "cpu"}
    settings |= {"steps": 4, "force": True, "out": where}
    small, large = (train(settings, sigma=sigma) for sigma in (8, 1))
    with pytest.raises(InputError, match="another model than the one of this report"):
        small.model  # noqa: B018
    assert large.model is not None
    stopped = train(settings, sigma=4, stop=lambda: True)
    resume(stopped)
    with pytest.raises(InputError, match="load it again"):
        stopped.predict(IMAGES)
    (where / "report.json").write_text(json.dumps(small.report))
    with pytest.raises(InputError, match="files of two runs were mixed"):
        load(where)


def test_a_run_can_be_pickled(run: Run) -> None:
    for each in (run, load(run.folder), load(run.folder / "model.safetensors")):
        copy = pickle.loads(pickle.dumps(each))
        assert np.array_equal(copy.predict(IMAGES).outputs, run.predict(IMAGES).outputs)


def test_records_in_memory_are_trained_resumed_and_scored(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((200, 4))
    data = ArrayData(x, (x[:, 0] > 0.5).astype(int), low=0, high=1, classes=["no", "yes"])
    settings: dict[str, Any] = {"sigma": 1, "steps": 6, "model": "linear", "device": "cpu"}
    stopped = train(data=data, **settings, out=tmp_path / "run", stop=lambda: True)
    run = resume(stopped, data=data)
    assert run.state == "finished"
    assert run.score(data).accuracy == run.report["scores"]["accuracy"]["value"]
    with pytest.raises(InputError, match="data= and dataset= are two ways to pass records"):
        train(data=data, dataset="digits")


def test_notes_on_settings_and_records_come_with_the_run(tmp_path: Path) -> None:
    frame = pd.DataFrame({"age": [1.0, 2.0, 30.0] * 40, "y": ["no", "yes", "no"] * 40})
    columns = {"age": {"range": [0, 10]}}
    schema = {"label": {"column": "y", "classes": ["no", "yes"]}, "columns": columns}
    data = from_dataframe(frame, schema)
    run = train(data=data, sigma=4, steps=2, out=tmp_path / "run", lr=1000)
    assert any("age" in note for note in run.private_notes)
    assert not any("age" in note for note in run.notes)
    assert "age" not in repr(run)


def test_a_network_of_the_program_is_published_loaded_and_left_alone(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    private = make_private(net, "digits", sigma=4, epochs=1, device="cpu")
    list(private)
    run = private.publish(tmp_path / "run")
    assert run.score().accuracy == private.evaluate().accuracy
    assert run.model is not net
    with torch.no_grad():
        net.get_parameter("1.weight").zero_()
    assert run.score().accuracy == run.report["scores"]["accuracy"]["value"]


def test_a_comparison_is_trained_once(tmp_path: Path) -> None:
    study: dict[str, Any] = {"dataset": "digits", "optimizers": ["dp-sgd", "dp-adam"], "sigma": 4}
    study |= {"steps": 2, "seeds": 1, "device": "cpu"}
    first = compare(tmp_path / "study", **study)
    times = {f: f.stat().st_mtime_ns for f in tmp_path.glob("study/runs/*/report.json")}
    assert [cell.name for cell in first.cells] == ["dp-sgd", "dp-adam"]
    assert len(times) == 2
    assert all(0 <= cell.mean <= 1 and not cell.failures for cell in first.cells)
    again = compare(tmp_path / "study", **study)
    assert [cell.values for cell in again.cells] == [cell.values for cell in first.cells]
    assert times == {f: f.stat().st_mtime_ns for f in times}
    assert (tmp_path / "study/compare.md").is_file()


def test_a_comparison_does_not_take_records_in_memory(tmp_path: Path) -> None:
    data = in_memory(pd.DataFrame({"a": [1]}))
    with pytest.raises(InputError, match=r"Save them \(.npz, .csv or .parquet\)"):
        compare(tmp_path / "study", dataset=data)
    assert not (tmp_path / "study").exists()


def test_a_name_of_version_0_3_says_what_to_write_instead() -> None:
    for name, instead in before_0_4.NAMES.items():
        with pytest.raises(ImportError) as failure:
            getattr(dpmac_cli, name)
        assert str(failure.value).endswith(f"Use: {instead}")
        assert "\n" not in str(failure.value)
        assert name not in dpmac_cli.__all__
        if instead.startswith("from "):
            exec(instead, {})
    with pytest.raises(ImportError, match=r"Use: load\(path\)\.predict\(records\)"):
        exec("from dpmac_cli import predict", {})
    with pytest.raises(AttributeError):
        getattr(dpmac_cli, "never_a_name")  # noqa: B009


def test_the_page_on_upgrading_has_each_function_that_is_gone() -> None:
    page = (ROOT / "docs/upgrading.md").read_text(encoding="utf-8")
    for name, instead in before_0_4.NAMES.items():
        assert instead.startswith("from ") or f"`{name}" in page or f"({name}(" in page, name


def test_every_public_name_is_imported() -> None:
    assert len(dpmac_cli.__all__) <= 35
    for name in dpmac_cli.__all__:
        assert getattr(dpmac_cli, name) is not None


@pytest.mark.parametrize("setting", ["fork", "score_every", "tuned_on", "minutes"])
def test_a_setting_of_version_0_3_names_the_page(setting: str) -> None:
    page = "It is of version 0.3: docs/upgrading.md says what to write instead."
    with pytest.raises(InputError) as caught:
        train({"dataset": "digits", setting: 5})
    assert str(caught.value) == f"There is no setting '{setting}'. {page}"
    made = dpmac("train", f"--{setting.replace('_', '-')}", "5")
    assert made.exit_code == 2
    assert page in " ".join(made.stderr.split())


@pytest.mark.parametrize("flags", [("--sampler", "cyclic"), ("--metric", "nmae")])
def test_a_value_of_version_0_3_names_the_page(flags: tuple[str, str]) -> None:
    made = dpmac("train", "--dataset", "digits", *flags)
    assert made.exit_code == 2
    printed = " ".join(made.stderr.split())
    assert f"not '{flags[1]}'." in printed
    assert "docs/upgrading.md says what to write instead" in printed


def test_keys_and_methods_of_version_0_3_name_the_page() -> None:
    def mean_of(model: nn.Module, batch: Any) -> Tensor:
        return model(batch).mean(1)  # type: ignore[no-any-return]

    run = Run({"epsilon": 3.0}, Path(), lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(KeyError, match=r"'privacy'\. It is of version 0\.3: docs/upgrading\.md"):
        _ = run.report["privacy"]
    with pytest.raises(KeyError, match=r"^'epsilom'$"):
        _ = run.report["epsilom"]
    step = PrivateStep(nn.Linear(2, 2), mean_of, sampling=Poisson(n=9, batch_size=3), sigma=1)
    with pytest.raises(AttributeError, match=r"'load_parameters'\. It is of version 0\.3"):
        step.load_parameters({})  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"^PrivateStep has no attribute 'step'$"):
        step.step()  # type: ignore[attr-defined]


def test_names_of_version_0_3_are_gone() -> None:
    """A name that this version has again must not be said to be gone."""
    assert not before_0_4.SETTINGS & settings.SETTINGS.keys()
    assert not before_0_4.KEYS & Report.model_fields.keys()
    page = (ROOT / "docs" / "upgrading.md").read_text()
    for name in before_0_4.SETTINGS | before_0_4.VALUES:
        assert re.search(rf"\b{name.replace('_', '[-_]')}\b", page), name
