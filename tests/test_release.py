"""The model to publish: readable without dpmac, and refused where it does not fit."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpmac_cli import ArrayData, load, make_private
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.settings import Settings
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.digest import digest
from dpmac_cli.release import scoring
from dpmac_cli.release import train as training
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import resume_folder
from dpmac_cli.runs import checkpoint
from dpmac_cli.runs.session import Update
from tests.digits_runs import train_digits
from tests.helpers import load_data
from tests.typed import dpmac

CPU = torch.device("cpu")


@pytest.fixture
def run(finished: Run) -> Path:
    return finished.folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def header(file: Path) -> Any:
    with safetensors.safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["dpmac"])


#: A network whose state_dict is not its parameters and buffers alone.
KEEPER = """
import torch
from torch import nn


class Keeper(nn.Module):
    seen = torch.tensor([13.0, 17.0])

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((64,), 2.0))
        self.register_buffer("derived", torch.ones(1), persistent=False)
        {inside}

    def forward(self, x):
        return x / self.scale

    def extra_repr(self):
        return f"statistics={{self.seen.tolist()}}"

    {method}


def build():
    return nn.Sequential(nn.Flatten(), Keeper(), nn.Linear(64, 10))
"""
WORDS = struct.pack("<2f", 13.0, 17.0)
#: Ways for statistics to get into a state_dict: a line of the constructor, and a method.
WAYS = {
    "dict": ("", "def get_extra_state(self): return {'statistics': self.seen.tolist()}"),
    "hook": (
        "self._register_state_dict_hook(lambda m, found, *_: found.update(statistics=m.seen))",
        "",
    ),
}


@pytest.mark.promise("published")
@pytest.mark.parametrize("way", WAYS)
def test_parameters_and_buffers_alone_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Even if validation misses what else a network keeps."""
    monkeypatch.setattr("dpmac_cli.models.build.check_model", lambda *_, **__: None)
    net = tmp_path / "net.py"
    inside, method = WAYS[way]
    net.write_text(KEEPER.format(inside=inside, method=method))
    finished = train_digits(model=f"{net}:build", out=tmp_path / "run")
    tensors = safetensors.torch.load_file(finished.folder / "model.safetensors")
    assert tensors.keys() == {"1.scale", "2.weight", "2.bias"}
    for name in ("model.safetensors", "model-card.md", "report.json", "config.yaml"):
        content = (finished.folder / name).read_bytes()
        assert b"statistics" not in content
        assert WORDS not in content
    scored = dpmac("eval", str(finished.folder), "--model", f"{net}:build", "--json")
    assert scored.exit_code == 0, scored.stderr
    assert json.loads(scored.stdout)["accuracy"] == finished.report["scores"]["accuracy"]["value"]


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        ("torch.ones(1).expand(2)", "cannot be saved in model.safetensors and loaded again"),
        ("torch.empty(2, device='meta')", "sparse, quantized or meta tensor. Use a dense tensor"),
    ],
    ids=["expanded", "meta"],
)
def test_what_cannot_be_published_is_refused_before_the_first_step(
    tmp_path: Path, buffer: str, said: str
) -> None:
    net = tmp_path / "net.py"
    net.write_text(KEEPER.format(inside=f"self.register_buffer('e', {buffer})", method=""))
    with pytest.raises(ModelError) as failure:
        train_digits(model=f"{net}:build", out=tmp_path / "run")
    assert str(failure.value).startswith("1.e ")
    assert said in str(failure.value)
    assert not (tmp_path / "run").exists()


def test_images_are_prepared_as_the_header_says(
    run: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(lambda t, f: f["data"]["records"].update(white=1, mean=[20.0], std=[0.02]))(run, file)
    given = header(file)["data"]["records"]
    test = load_data("digits", run, CPU).tested
    pixels = test.images.double() / given["white"]
    x = ((pixels - given["mean"][0]) / given["std"][0]).float()
    with torch.no_grad():
        logits = load_model(file).model(x)
    loss = cross_entropy(logits, test.labels).item()
    assert load(file, device="cpu").score().loss == pytest.approx(loss, rel=1e-5)
    before = load(run, device="cpu").score().loss
    assert loss != pytest.approx(before, rel=1e-2)
    # Nor does what the catalog says by then have a part in it.
    records = DATASETS["digits"].records.model_copy(update={"mean": (0.7,), "std": (0.1,)})
    other = replace(DATASETS["digits"], records=records)
    monkeypatch.setitem(DATASETS, "digits", other)
    assert load(run, device="cpu").score().loss == before


def edited(
    change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None],
) -> Callable[[Path, Path], None]:
    """Write the model again with other tensors or facts, and with a checksum that is theirs."""

    def write(run: Path, file: Path) -> None:
        tensors = safetensors.torch.load_file(run / "model.safetensors")
        facts = header(run / "model.safetensors")
        del facts["checksum"]
        change(tensors, facts)
        facts["checksum"] = digest(tensors, facts)
        safetensors.torch.save_file(tensors, file, {"dpmac": json.dumps(facts)})

    return write


def older(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    """As before the second format."""
    del tensors
    facts["schema_version"] = facts.pop("version")


NOT_OURS = r"was not written by dpmac train, or was modified \("

DAMAGED: tuple[tuple[Callable[[Path, Path], None], str], ...] = (
    (lambda run, file: safetensors.torch.save_file({"a": torch.zeros(2)}, file), NOT_OURS),
    (edited(lambda t, f: f.update(version=99)), "a newer version .*format 99.* Upgrade"),
    (edited(lambda t, f: f.update(version=1)), "an older version.* Train again"),
    (edited(older), "an older version of dpmac. Train again"),
    (edited(lambda t, f: f["data"]["records"].update(std=[float("nan")])), f"{NOT_OURS}data.rec"),
    (edited(lambda t, f: t.update({"3.bias": torch.full((10,), torch.nan)})), "contains NaN"),
    (edited(lambda t, f: f["data"].update(classes=["\x1b[31m"])), NOT_OURS),
    (edited(lambda t, f: t.__delitem__("3.bias")), "3.bias: missing in the file, expected"),
    (edited(lambda t, f: f["network"].update(name="vit")), "does not support the model 'vit'"),
)


def test_a_damaged_file_is_named(run: Path, file: Path) -> None:
    for write, said in DAMAGED:
        file.unlink(missing_ok=True)
        write(run, file)
        with pytest.raises((InputError, ModelError), match=said):
            load_model(file)


def test_a_flipped_bit_is_noticed_wherever_it_is(run: Path, file: Path) -> None:
    content, whole = (run / "model.safetensors").read_bytes(), load_model(run)
    # Cubes are dense where the header is: half of them hit the first eighth.
    for place in {int(len(content) * (k / 60) ** 3) for k in range(60)}:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            loaded = load_model(file)
        except InputError as failure:
            assert str(file) in str(failure)  # noqa: PT017
            continue
        # The last digit of a number, which reads as the same number.
        assert content[place : place + 1].isdigit()
        assert loaded.facts == whole.facts
        assert digest(loaded.model.state_dict(), {}) == digest(whole.model.state_dict(), {})


@pytest.mark.promise("published")
def test_a_private_checkpoint_is_not_a_model(run: Path) -> None:
    with pytest.raises(InputError, match=r"is a private checkpoint.* Use model.safetensors, one"):
        load_model(checkpoint.path_in(run))


# Networks that are defined in the cells of a notebook.


X, Y = np.random.default_rng(0).random((150, 6)), np.arange(150) % 2


class Net(nn.Module):
    """As in a cell: no file has it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out


DATA = ArrayData(X, Y, low=0, high=1, classes=["no", "<b>&yes"])


def test_a_network_of_a_cell_is_loaded_scored_and_predicted_with() -> None:
    private = make_private(Net(), DATA, sigma=4, steps=3, batch_size=16)
    list(private)
    private.publish("run")
    with pytest.raises(ModelError, match=r"add --model FILE\.py:FACTORY"):  # typed as a command
        load_model("run")
    scored = private.evaluate().accuracy
    for network in (Net, Net(), partial(Net), lambda shape, classes: Net()):
        model = load_model("run", network=network).model
        assert model is not network
        assert load("run", network=network).score(DATA).accuracy == scored
        assert len(load("run", network=network).predict(X[:5]).predicted) == 5


@pytest.mark.promise("said")
def test_records_are_not_held_out_again_to_score_a_file_alone(file: Path, tmp_path: Path) -> None:
    x = np.arange(60.0)[:, None]
    y: Any = (x[:, 0] % 2).astype(int)
    given: Any = {"x": x, "y": y, "low": 0, "high": 60}
    network = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    private = make_private(network, ArrayData(**given), sigma=5, steps=1, batch_size=20)
    list(private)
    private.publish(tmp_path / "run")
    file.write_bytes((tmp_path / "run" / "model.safetensors").read_bytes())
    (tmp_path / "alone").mkdir()
    alone = file.rename(tmp_path / "alone" / file.name)
    tested = ArrayData(**given, x_test=x, y_test=y)
    assert load(alone, network=network).score(tested).samples == 60
    with pytest.raises(InputError, match="has no test set"):
        scoring.score(load(alone, network=network).released, ArrayData(**given))


@pytest.mark.promise("validated")
def test_the_weights_that_are_scored_are_published() -> None:
    done = train_digits(ema=0.9, steps=12, lr=0.05)
    assert load(done.folder).score().loss == pytest.approx(done.report["scores"]["loss"], rel=1e-6)


@pytest.mark.promise("price")
def test_the_planned_epsilon_in_another_folder_includes_the_resumed_run() -> None:
    first = train_digits(out="run", steps=5)
    changed = {"steps": "60", "sigma": "8", "out": "longer"}
    *_, shown, last = resume_folder(first.folder, changed, stop=lambda: True)
    assert isinstance(shown, Update)
    assert isinstance(last, Run)
    before, part = (TrainingEvent(**event) for event in last.report["events"])
    whole = total_epsilon((before, replace(part, steps=55)), last.report["delta"])
    assert part.steps < 55
    assert shown.planned == pytest.approx(whole, rel=1e-9)


def test_keywords_of_a_program_take_precedence_over_its_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "continued_run", lambda _, given, *more: (one for one in [given]))
    monkeypatch.setattr(training, "finish", lambda events, _: next(events))
    for flags in ({"device": "cpu", "seed": 1}, Settings(device="cpu", seed=1)):
        given: Any
        given = training.resume("run", flags, device="cuda")
        assert given == {"device": "cuda", "seed": 1}
