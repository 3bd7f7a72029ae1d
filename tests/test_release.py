"""The model to publish: readable without dpmac, and refused where it does not fit."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from dpmac_cli.catalog import DATASETS
from dpmac_cli.data import load_data
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.release import load_model, save_model
from dpmac_cli.scoring import score
from tests.digits_runs import train_digits

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(out=tmp_path_factory.mktemp("release") / "run").folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def header(file: Path) -> Any:
    with safetensors.safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["dpmac"])


def test_weights_load_into_plain_torch(run: Path) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plain.load_state_dict(safetensors.torch.load_file(run / "model.safetensors"), strict=True)
    facts = header(run / "model.safetensors")
    data = load_data("digits", run, CPU)
    # A reader has nothing but the header to prepare the images with.
    pixels = data.test.images.double() / facts["input"]["levels"]
    mean, std = (torch.tensor(facts["input"][key]).view(-1, 1, 1) for key in ("mean", "std"))
    right = plain(((pixels - mean) / std).float()).argmax(1) == data.test.labels
    report = json.loads((run / "report.json").read_text())
    assert right.double().mean().item() == pytest.approx(report["test"]["accuracy"])


def test_header_holds_the_public_facts(run: Path) -> None:
    facts = header(run / "model.safetensors")
    report = json.loads((run / "report.json").read_text())
    assert facts == {key: report[key] for key in facts}
    assert set(facts) == {
        "schema_version",
        "optimizer",
        "dataset",
        "model",
        "input",
        "classes",
        "privacy",
    }
    assert facts["dataset"]["sha256"] == DATASETS["digits"].sha256


@pytest.mark.parametrize("name", [".", "model.safetensors"])
def test_a_run_and_its_model_file_load_alike(run: Path, name: str) -> None:
    released = load_model(run / name, None, CPU)
    assert released.path == run / "model.safetensors"
    assert not released.model.training
    assert score(run / name, None, None, "cpu").result.samples == 360


def test_weights_survive_unchanged(file: Path, run: Path) -> None:
    released = load_model(run, None, CPU)
    save_model(file, released.model, released.facts)
    assert file.read_bytes() == (run / "model.safetensors").read_bytes()


def test_a_model_for_other_images_says_what_does_not_fit(run: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(run, "mnist", CPU)
    message = str(caught.value)
    for part in (
        str(run / "model.safetensors"),
        "mlp-small, trained on digits",
        "does not fit mnist",
        "1.weight: (64, 64) in the file, (64, 784) wanted",
    ):
        assert part in message


def edited(
    change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None],
) -> Callable[[Path, Path], None]:
    """Write the model again with other tensors or facts."""

    def write(run: Path, file: Path) -> None:
        tensors = safetensors.torch.load_file(run / "model.safetensors")
        facts = header(run / "model.safetensors")
        change(tensors, facts)
        safetensors.torch.save_file(tensors, file, {"dpmac": json.dumps(facts)})

    return write


MISFITS: Mapping[str, tuple[Callable[[Path, Path], None], str]] = {
    "missing": (
        edited(lambda t, f: t.__delitem__("3.bias")),
        r"3.bias: missing in the file, \(10,\) wanted",
    ),
    "extra": (
        edited(lambda t, f: t.update(more=torch.zeros(2))),
        r"more: \(2,\) in the file, nothing wanted",
    ),
    "reshaped": (
        edited(lambda t, f: t.update({"3.bias": torch.zeros(7)})),
        r"3.bias: \(7,\) in the file, \(10,\) wanted",
    ),
    "other data": (
        edited(lambda t, f: f["dataset"].update(name="cats")),
        "trained on cats, which this version does not know",
    ),
    "other model": (
        edited(lambda t, f: f["model"].update(name="vit")),
        "model 'vit', which this version does not know",
    ),
}


@pytest.mark.parametrize(("write", "said"), MISFITS.values(), ids=MISFITS.keys())
def test_a_model_that_does_not_fit_is_refused(
    run: Path, file: Path, write: Callable[[Path, Path], None], said: str
) -> None:
    write(run, file)
    with pytest.raises(ModelError, match=said):
        load_model(file, None, CPU)


def header_text(text: str) -> Callable[[Path, Path], None]:
    def write(run: Path, file: Path) -> None:
        tensors = safetensors.torch.load_file(run / "model.safetensors")
        safetensors.torch.save_file(tensors, file, {"dpmac": text})

    return write


def cut(size: int) -> Callable[[Path, Path], None]:
    return lambda run, file: (
        file.write_bytes((run / "model.safetensors").read_bytes()[:size]),
        None,
    )[1]


def written(content: bytes) -> Callable[[Path, Path], None]:
    return lambda run, file: (file.write_bytes(content), None)[1]


DAMAGED: Mapping[str, tuple[Callable[[Path, Path], None], str]] = {
    "missing": (lambda run, file: None, "There is no model"),
    "a folder": (lambda run, file: file.mkdir(), "holds no model.safetensors|not a whole"),
    "empty": (written(b""), "not a whole safetensors file"),
    "text": (written(b"hello" * 99), "not a whole safetensors file"),
    "huge header": (written(b"\xff" * 99), "not a whole safetensors file"),
    "cut in the header": (cut(100), "not a whole safetensors file"),
    "cut in the weights": (cut(-1), "not a whole safetensors file"),
    "no header": (
        lambda run, file: safetensors.torch.save_file({"a": torch.zeros(2)}, file),
        "was not written by dpmac",
    ),
    "broken header": (header_text('{"dataset": '), "was not written by dpmac"),
    "header without facts": (header_text('{"dataset": {}}'), "was not written by dpmac"),
    "header of another kind": (header_text("[1, 2]"), "was not written by dpmac"),
    "null header": (header_text("null"), "was not written by dpmac"),
    "names that are lists": (
        header_text('{"dataset": {"name": ["digits"]}, "model": {"name": ["mlp"]}}'),
        "was not written by dpmac",
    ),
}


@pytest.mark.parametrize(("write", "said"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_named(
    run: Path, file: Path, write: Callable[[Path, Path], None], said: str
) -> None:
    write(run, file)
    with pytest.raises(InputError, match=said) as caught:
        load_model(file, None, CPU)
    assert str(file.parent) in str(caught.value)
    assert file.name in str(caught.value)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no model.safetensors"):
        load_model(tmp_path, None, CPU)
    with pytest.raises(InputError, match="There is no model"):
        load_model(tmp_path / "nowhere" / "at-all", None, CPU)
