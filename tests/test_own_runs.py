"""A person's own data and network, from the command line to the last score."""

import json
import pickle
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_wine
from torch import Tensor

from dpmac_cli import resume
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.places import overflow_of
from dpmac_cli.errors import InputError
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import RunEvent, finish, train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.session import Started
from tests.digits_runs import after, report_of
from tests.typed import dpmac

SHORT = ("--steps", "4", "--batch-size", "64", "--sigma", "4", "--device", "cpu")

#: A network as an outsider would write it.
RECURRENT = """
import math
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.inner = nn.Linear(inputs, 2 * hidden)
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        value, gate = self.inner(x).chunk(2, -1)
        return self.scale * value * gate.sigmoid()

def make(shape, classes):
    pixels = math.prod(shape)
    return nn.Sequential(nn.Flatten(), Gate(pixels, 24), nn.Dropout(0.1), Gate(24, 24),
                         nn.Linear(24, classes))
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = set(sys.modules)
    yield
    for name in set(sys.modules) - names:
        if name.startswith(("dpmac_model_", "net_")):
            del sys.modules[name]


def done(*args: str) -> str:
    """Type a command that must succeed."""
    result = dpmac(*args)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*args: str, code: int = 2) -> str:
    """Type a command that must be refused, and read why."""
    result = dpmac(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def photos(root: str, *, split: bool = True, records: int = 300) -> str:
    """Digits as pictures in folders."""
    bunch = load_digits()
    for i, (image, digit) in enumerate(zip(bunch.images[:records], bunch.target, strict=False)):
        part = ("test" if i % 5 == 0 else "train") if split else "."
        where = Path(root) / part / f"digit-{digit}"
        where.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(where / f"{i}.png")
    return root


def wine(file: str) -> str:
    bunch = load_wine()
    low, high = np.floor(bunch.data.min(0) - 0.1), np.ceil(bunch.data.max(0))
    np.savez(file, x=bunch.data, y=bunch.target, low=low, high=high, classes=bunch.target_names)
    return file


@pytest.mark.promise("facts")
def test_a_folder_of_pictures(tmp_path: Path) -> None:
    data = photos(str(tmp_path / "photos"))
    done("train", "--dataset", data, "--model", "mlp-small", "--out", "run", *SHORT)
    report = report_of("run")
    told = {name: report["data"][name] for name in report["data"] if name != "records"}
    assert told == {
        "name": "photos",
        "train_size": 240,
        "test_size": 60,
        "sha256": None,
        "user_supplied": True,
        "held_out": False,
        "unit": None,
        "taken_from_records": ["channels", "image size", "classes"],
        "classes": [f"digit-{i}" for i in range(10)],
        "target": None,
        "schema": None,
        "ranges": None,
    }
    assert report["sentences"]["public_records"] == (
        "The numbers of training records and test records are public. Its channels, image size "
        "and classes were not declared but taken from the records, and are treated as public. "
        "One record can change them, which epsilon does not cover."
    )
    assert not {"test_records", "texts"} & report["sentences"].keys()
    assert report["sentences"]["public_records"] in Path("run/model-card.md").read_text()
    assert report["events"][0]["sampling_rate"] == 64 / 240
    for path in ("run", "run/model.safetensors"):
        scored = json.loads(done("eval", path, "--json"))
        assert scored["accuracy"] == report["scores"]["accuracy"]["value"]
        assert scored["dataset"] == "photos"
    for name in ("report.json", "model-card.md", "model.safetensors"):
        assert str(tmp_path).encode() not in Path("run", name).read_bytes()


@pytest.mark.promise("facts")
def test_what_is_held_out_stays_out_and_is_said_to_be_private() -> None:
    data = photos("photos", split=False)
    options = ("--test-fraction", "0.25", "--split-seed", "9", "--model", "mlp-small")
    done("train", "--dataset", data, *options, "--out", "run", *SHORT)
    report = report_of("run")
    sizes = report["data"]["train_size"], report["data"]["test_size"]
    assert sizes == (232, 68)  # about a quarter; which ones, the names and --split-seed say
    assert report["data"]["held_out"] is True
    assert "split off from the private ones" in report["sentences"]["test_records"]
    assert report["sentences"]["test_records"] in Path("run/model-card.md").read_text()
    scored = json.loads(done("eval", "run", "--json"))
    assert (scored["accuracy"], scored["samples"]) == (report["scores"]["accuracy"]["value"], 68)
    Path(data, "digit-3", "13.png").unlink()  # one that was trained on
    assert json.loads(done("eval", "run", "--json")) == scored


@pytest.mark.promise("facts")
def test_a_model_of_another_split_is_not_scored_on_what_it_was_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models of another format held out other records."""
    data = photos("photos", split=False)
    with monkeypatch.context() as older:
        older.setattr("dpmac_cli.release.publish.FORMAT", 1)
        done("train", "--dataset", data, "--model", "mlp-small", "--out", "run", *SHORT)
    refused = dpmac("eval", "run")
    assert refused.exit_code == 2
    assert "model.safetensors was written by an older version" in " ".join(refused.output.split())


#: The whole schema of photos, declared.
DECLARED = "--channels 1 --image-size 8 --classes " + ",".join(f"digit-{n}" for n in range(10))


def interrupted(data: str, *flags: str) -> Run:
    """A run that was stopped after its third step of eight."""
    named = dict(zip(flags[::2], flags[1::2], strict=True))
    settings = {"steps": "8", "batch_size": "64", "sigma": "4", "device": "cpu", "out": "run"}
    begun, third = list[RunEvent](), after(3)

    def stop() -> bool:
        """Count from the first step: what computes features asks as well."""
        return bool(begun) and third()

    def events() -> Iterator[RunEvent]:
        for event in train_plan(resolve({"dataset": data, **settings, **named}).plan, stop):
            begun.extend([event] if isinstance(event, Started) else [])
            yield event

    return finish(events())


@pytest.mark.promise("resume")
@pytest.mark.parametrize(
    "flags",
    [("--resume", "run"), ("--resume", "run", "--steps", "9", "--out", "longer")],
    ids=["here", "elsewhere"],
)
def test_a_run_goes_on_with_as_many_records_as_it_began_with(flags: tuple[str, ...]) -> None:
    arrays = dict(np.load(wine("wine.npz")))
    before = interrupted("wine.npz").report
    np.savez("wine.npz", **{**arrays, "x": arrays["x"][:-1], "y": arrays["y"][:-1]})
    assert "numbers of records are not those that the run started with" in refused("train", *flags)
    assert not Path("longer").exists()
    np.savez("wine.npz", **arrays)
    done("train", *flags)
    after = report_of("longer" if "--out" in flags else "run")
    assert after["epsilon"] > before["epsilon"]


@pytest.mark.promise("resume")
def test_data_that_has_moved_is_named_anew_and_the_run_goes_on() -> None:
    interrupted(wine("wine.npz"))
    Path("wine.npz").rename("vino.npz")
    assert "wine.npz was not found. Put it back, or set --dataset" in refused(
        "train", "--resume", "run"
    )
    said = "The run's data wine.npz was not found. Put it back, or set --dataset to its new path."
    assert refused("eval", "run") == f"error: {said}"
    assert "cannot change" in refused("train", "--resume", "run", "--dataset", "digits")
    done("train", "--resume", "run", "--dataset", "vino.npz")
    assert sum(event["steps"] for event in report_of("run")["events"]) == 8
    assert "dataset: vino.npz" in Path("run/config.yaml").read_text()
    assert "is finished" in refused("train", "--resume", "run")


@pytest.mark.promise("resume")
def test_classes_are_named_as_they_were_in_a_run_that_goes_on() -> None:
    interrupted(wine("wine.npz"))
    arrays = dict(np.load("wine.npz"))
    renamed = np.array(["other", *arrays["classes"][1:]])
    np.savez("wine.npz", **{**arrays, "classes": renamed})
    said = refused("train", "--resume", "run")
    assert "classes or ranges are not those that the run started with" in said
    np.savez("wine.npz", **arrays)
    done("train", "--resume", "run")


#: A network with a part that it draws when it is built, and does not train.
DRAWING = """
import random
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("drawn", torch.full((13, 8), self.number()))
        self.head = nn.Linear(8, 3)

    def number(self):
        return float(torch.randn(())) + np.random.normal() + random.random()

    def forward(self, x):
        return self.head(torch.cos(x.flatten(1) @ self.drawn))
"""


def buffer_of(run: str) -> Tensor:
    return safetensors.torch.load_file(Path(run) / "model.safetensors")["drawn"]


@pytest.mark.promise("facts")
def test_what_a_network_draws_and_does_not_train_stays() -> None:
    """The rest of the state was trained with it."""
    Path("net_own.py").write_text(DRAWING)
    interrupted(wine("wine.npz"), "model", "net_own.py:Net")
    shutil.copytree("run", "again")
    model = ("--model", "net_own.py:Net")
    for run in ("run", "again"):
        np.random.seed()  # as in another process
        random.seed()
        done("train", "--resume", run, *model)
    first, again = (safetensors.torch.load_file(f"{r}/model.safetensors") for r in ("run", "again"))
    assert torch.equal(first["drawn"], again["drawn"])
    done("train", "--resume", "run", *model, "--steps", "9", "--out", "longer")
    assert torch.equal(buffer_of("longer"), first["drawn"])


@pytest.mark.promise("code")
def test_no_checkpoint_has_its_network_imported() -> None:
    Path("net_own.py").write_text(RECURRENT)
    interrupted(wine("wine.npz"), "model", "net_own.py:make")
    Path("net_own.py").write_text("import pathlib\npathlib.Path('executed').touch()")
    for given in ((), ("--model", "mlp")):
        said = refused("train", "--resume", "run", *given)
        assert "If you trust it: " in said
        assert said.endswith("dpmac train --resume run --model net_own.py:make")
    assert not Path("executed").exists()


@pytest.mark.promise("code")
@pytest.mark.parametrize("command", ["train", "compare"])
def test_no_settings_file_has_its_network_imported(command: str) -> None:
    Path("net_own.py").write_text("import pathlib\npathlib.Path('executed').touch()")
    Path("mine.yaml").write_text("dataset: digits\nsigma: 6\nsteps: 2\nmodel: net_own.py:make\n")
    more = ("--optimizers", "dp-adam", "--seeds", "1") if command == "compare" else ()
    for plan in ((), ("--dry-run",)) if more else ((),):
        said = refused(command, "--config", "mine.yaml", "--out", "out", *more, *plan)
        assert "mine.yaml, line 4: model net_own.py:make is code, which" in said
        assert "add --model net_own.py:make to the command line" in said
    Path("mine.yaml").write_text("dataset: digits\nmodel: [mlp, [net_own.py:make]]\n")
    assert "is code, which" in refused(command, "--config", "mine.yaml", "--out", "out", *more)
    assert not Path("executed").exists()
    Path("net_own.py").write_text(RECURRENT)
    typed = ("--config", "mine.yaml", "--model", "net_own.py:make", "--out", "out")
    accepted = dpmac(command, *typed, *more, *["--dry-run"] * bool(more))
    assert accepted.exit_code == 0, accepted.output
    assert bool(more) or list(Path("out").rglob("config.yaml"))


# Facts are read once.


@pytest.mark.promise("facts")
def test_files_that_come_or_go_during_a_run_change_nothing_of_it() -> None:
    photos("photos", records=100)
    settings = {"steps": "40", "batch_size": "8", "sigma": "4", "device": "cpu", "out": "run"}
    events: list[RunEvent] = []
    for event in train_plan(resolve({"dataset": "photos", "model": "mlp-small", **settings}).plan):
        if isinstance(event, Started):
            for number in range(120):
                shutil.copy("photos/train/digit-1/1.png", f"photos/train/digit-1/new-{number}.png")
            shutil.rmtree("photos/train/digit-3")
        events.append(event)
    last = events[-1]
    assert isinstance(last, Run)
    assert last.report["data"]["train_size"] == 80
    assert len(last.report["data"]["classes"]) == 10
    price = last.report
    ran = TrainingEvent(0.1, 4.0, 40, "poisson", 10, overflow=overflow_of(1e-5))
    assert price["events"] == [vars(ran)]
    assert price["epsilon"] == total_epsilon((ran,), 1e-5)
    assert all(e.plan.facts.train_size == 80 for e in events if isinstance(e, Started))


@pytest.mark.promise("facts")
@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_records_that_are_read_again_are_those_that_were_priced(kind: str) -> None:
    """Those that are still at hand are used, whatever became of their files."""
    data = wine("wine.npz") if kind == "npz" else photos("photos")
    resolved = resolve(dataset=data, steps=2, batch_size=8, sigma=4, device="cpu", out="run")
    if kind == "npz":
        arrays = dict(np.load(data))
        np.savez(data, **{**arrays, "x": arrays["x"][:-1], "y": arrays["y"][:-1]})
    else:
        shutil.copy("photos/train/digit-1/1.png", "photos/train/digit-1/new.png")
    for elsewhere in (resolved.plan, pickle.loads(pickle.dumps(resolved.plan))):
        with pytest.raises(InputError, match="changed while it was being read"):
            finish(train_plan(elsewhere))
    assert not Path("run").exists()
    size = finish(train_plan(resolved)).report["data"]["train_size"]
    assert size == resolved.plan.facts.train_size


# A declared schema.


def published(run: str) -> dict[str, Any]:
    """What a run says of its records and network."""
    report = report_of(run)
    return {name: report[name] for name in ("data", "network", "events", "epsilon", "sentences")}


@pytest.mark.promise("reading")
def test_a_record_that_is_left_out_changes_no_published_byte() -> None:
    """Unreadable, no image at all, or of no class: nothing tells that it was there."""
    photos("photos", records=100)
    flags = ("--dataset", "photos", "--skip-bad", "--seed", "3", "--model", "mlp-small", *SHORT)
    done("train", *flags, *DECLARED.split(), "--out", "without")
    Path("photos/train/digit-3/bad.png").write_bytes(b"no image")
    Path("photos/train/digit-3/bad.txt").write_text("no image")
    Path("photos/train/fox").mkdir()
    shutil.copy("photos/train/digit-1/1.png", "photos/train/fox/1.png")
    output = done("train", *flags, *DECLARED.split(), "--out", "with")
    assert "3 records of photos are left out" in " ".join(output.split())
    assert published("with") == published("without")
    for name in ("model.safetensors", "config.yaml", "model-card.md"):
        assert Path("with", name).read_bytes() == Path("without", name).read_bytes()


def test_notes_on_images_that_become_square_and_on_a_split_that_is_there() -> None:
    for place in ("scans/cat", "scans/dog", "split/train/cat", "split/train/dog", "split/val/cat"):
        Path(place).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 256, (9, 8), np.uint8)
            Image.fromarray(pixels).save(Path(place, f"{number}.png"))
    (declare, *_) = resolve(dataset="scans", epsilon=3).notes
    square = "{image_size=}9 {classes=}cat,dog ({image_size} makes the 9x8 images square)"
    assert declare.endswith(square)
    notes = resolve(dataset="split", epsilon=3, test_fraction=0.25).notes
    idle = "{test_fraction} has no effect with split, which has test records of its own."
    assert idle in notes
    assert not any("no effect" in note for note in resolve(dataset="split", epsilon=3).notes)
    kept_out = resolve(dataset="scans", epsilon=3, test_fraction=0.25).notes
    assert not any("no effect" in note for note in kept_out)


@pytest.mark.promise("facts")
@pytest.mark.parametrize(
    "elsewhere", [{}, {"out": "other", "epochs": 40}], ids=["here", "elsewhere"]
)
def test_no_resume_takes_a_schema_with_other_contents(elsewhere: dict[str, Any]) -> None:
    """Records that a covered score tests would be trained on: epsilon says that none is both."""
    rng = np.random.default_rng(0)
    lines = [f"{rng.normal():.9f},{'ab'[i % 2]},{'no' if i % 3 else 'yes'}\n" for i in range(400)]
    Path("table.csv").write_text("x,fold,y\n" + "".join(lines))
    for name in "ab":
        Path(f"{name}.yaml").write_text(
            "label: {column: y, classes: ['no', 'yes']}\ncolumns: {x: {range: [-3, 3]}}\n"
            f"test: {{column: fold, values: [{name}]}}\n"
        )
    settings: dict[str, Any] = {"dataset": "table.csv", "cover_scores": True, "out": "run"}
    settings |= {"sigma": 5.0, "epochs": 30, "batch_size": 100, "device": "cpu"}
    finish(train_plan(resolve(**settings, schema="a.yaml").plan, after(30)))
    Path("a.yaml").rename("elsewhere.yaml")
    with pytest.raises(InputError, match="The contents of the schema are not those that the run"):
        resume("run", schema="b.yaml", **elsewhere)
    assert resume("run", schema="elsewhere.yaml", **elsewhere).state == "finished"
