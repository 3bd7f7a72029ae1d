"""Mistakes of honest people that would make a printed epsilon false, at every door."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dpmac_cli import (
    ArrayData,
    InputError,
    Poisson,
    PrivateStep,
    from_dataframe,
    from_torch,
    make_private,
    tune,
)
from dpmac_cli.config.facts import InMemoryData
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.errors import ModelError
from dpmac_cli.models.fingerprint import Fingerprint
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.studies.grid import plan as grid_of
from dpmac_cli.studies.search import plan_search
from tests.digits_runs import digits_network, refused, train_digits
from tests.helpers import declared, load
from tests.layer_cases import Do
from tests.typed import dpmac

pytestmark = pytest.mark.promise("mistakes")

CLASSES = ["no", "yes"]
#: Settings whose noise is cheap to price.
STEPS: dict[str, Any] = {"sigma": 6.0, "steps": 2}
CHEAP = {**STEPS, "device": "cpu"}


@pytest.fixture(autouse=True)
def _uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise has no part in these mistakes, and takes seconds to work out."""
    monkeypatch.setattr("dpmac_cli.studies.search.calibrate_search", lambda *_: 6.0)
    monkeypatch.setattr("dpmac_cli.config.plan.calibrate_noise", lambda *_, **__: 6.0)


def network(inputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 2))


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return cross_entropy(model(x), y, reduction="none")


def records(count: int = 60) -> TensorDataset:
    x = torch.rand(count, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(count) % 2)


#: What a command says of the records of a dataset before it trains, by door.
NOTES: dict[str, Callable[..., tuple[str, ...]]] = {
    "train": lambda data: resolve(dataset=data, **CHEAP).private_notes,
    "make_private": lambda data: make_private(network(), data, **CHEAP).private_notes,
    "tune": lambda data: (
        plan_search(
            {"dataset": data, "steps": "1", "model": "linear", "lr": "0.1,0.2"}
        ).private_notes
    ),
    "compare": lambda data: grid_of({"dataset": data, "sigma": "6"}, None).private_notes,
}


# Weights that were trained on the same records.


def trained_on(dataset: str, where: str, **settings: Any) -> str:
    plan = resolve(dataset=dataset, model="mlp-small", out=where, steps=1, device="cpu", **settings)
    finish(train_plan(plan.plan))
    return f"{where}/model.safetensors"


@pytest.mark.parametrize("private", [False, True], ids=["without privacy", "private"])
def test_weights_of_ones_own_run_are_not_public_whatever_the_dataset_is_called(
    tmp_path: Path, private: bool
) -> None:
    x = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    for name in ("first", "second"):
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(60) % 10)
    how: dict[str, Any] = {"sigma": 6} if private else {"no_dp": True}
    file = trained_on(str(tmp_path / "first.npz"), "before", batch_size=20, **how)
    second = str(tmp_path / "second.npz")
    again: dict[str, Any] = {"dataset": second, "model": "mlp-small", "pretrained": file}
    again |= {"steps": "1", "batch_size": "20", "device": "cpu"}
    plans = [
        resolve(again, sigma=6).plan,
        grid_of({**again, "sigma": "6"}, None).runs[0].plan,
        plan_search({**again, "lr": "0.1,0.2"}).trial(),
    ]
    for plan in plans:
        with pytest.raises(
            InputError, match=r"trained on first by dpmac, so .* train --resume RUN --out NEW"
        ):
            finish(train_plan(plan))
    trained_on(second, "claims-nothing", pretrained=file, batch_size=20, no_dp=True)
    public = tmp_path / "public.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file), public)
    trained_on(second, "of-others", pretrained=str(public), batch_size=20, sigma=6)


def test_weights_of_a_public_dataset_are_public_unless_they_began_at_others(
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(60) % 10)
    own = str(tmp_path / "own.npz")
    public = trained_on("digits", "public", no_dp=True)
    trained_on(own, "run", pretrained=public, batch_size=20, sigma=6)
    private = trained_on(own, "private", batch_size=20, no_dp=True)
    through = trained_on("digits", "through", pretrained=private, no_dp=True)
    with pytest.raises(InputError, match="trained on digits by dpmac, so its weights are not"):
        trained_on(own, "again", pretrained=through, batch_size=20, sigma=6)


def test_a_network_file_that_loads_a_trained_model_is_refused() -> None:
    run = train_digits(model="mlp-small", no_dp=True).folder
    Path("net.py").write_text(
        "import dpmac_cli\n"
        f"def net(shape, classes):\n    return dpmac_cli.load({str(run)!r}).model.train()\n"
    )
    assert "was trained by dpmac before" in refused("--model", "net.py:net", code=4)
    with pytest.raises(ModelError, match="trained without privacy before"):
        make_private(load_model(run).model, "digits", **CHEAP)
    with pytest.raises(ModelError, match="trained without privacy before"):
        PrivateStep(load_model(run).model, loss, sampling=Poisson(n=60, batch_size=6), **STEPS)


# Records that are there several times.


class Transformed(Dataset[Any]):
    """Records of another dataset, changed one by one, as programs write it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return 1 - x, y


REPEATED: dict[str, Callable[[Any], Any]] = {
    "three times": lambda whole: ConcatDataset([whole] * 3),
    "a rare class": lambda whole: Subset(whole, [*range(60), *[1] * 20]),
    "added": lambda whole: whole + whole + whole,
    "beside a subset": lambda whole: ConcatDataset([whole, Subset(whole, [1] * 20)]),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_dataset_that_repeats_records_is_refused(kind: str) -> None:
    dataset = REPEATED[kind](records())
    facts: dict[str, Any] = {"low": 0, "high": 1, "classes": CLASSES}
    with pytest.raises(InputError, match="60 different records, and"):
        from_torch(dataset, **facts)  # which train, tune, compare and make_private take
    step = PrivateStep(network(), loss, sampling=Poisson(n=len(dataset), batch_size=6), **STEPS)
    with pytest.raises(InputError, match="60 different records, and"):
        step.loader(dataset)
    fine = PrivateStep(network(), loss, sampling=Poisson(n=60, batch_size=6), **STEPS)
    assert next(fine.loader(Transformed(Subset(records(), range(60)))))


@pytest.mark.parametrize("door", NOTES)
@pytest.mark.parametrize("units", [False, True])
def test_records_that_are_trained_and_tested_on_are_counted(door: str, units: bool) -> None:
    x, y = (part.numpy() for part in records().tensors)
    named: dict[str, Any] = {}
    if units:
        named = {"unit": np.arange(60), "unit_test": np.arange(60, 80)}
    both = np.r_[55:60]
    test = np.concatenate([np.random.default_rng(1).random((15, 3), np.float32), x[both]])
    data = ArrayData(
        x, y, test, np.r_[np.arange(15) % 2, y[both]], low=-1, high=2, classes=CLASSES, **named
    )
    if door == "tune" and not units:  # it covers scores
        with pytest.raises(InputError, match=r"cover.scores: 5 test records of <arrays> are exact"):
            NOTES[door](data)
        return
    (said,) = [note for note in NOTES[door](data) if "test records of" in note]
    assert "5 test records of <arrays> are exact copies of training records, such as" in said
    assert "test record 16" in said


def typed(data: ArrayData) -> None:
    """The command, on a file of the arrays; raises what it prints."""
    assert data.arrays is not None
    plain = {name: of.astype(str) if of.dtype == object else of for name, of in data.arrays.items()}
    np.savez("both.npz", **plain)
    flags = ["--dataset", "both.npz", "--cover-scores", "--steps", "2", "--sigma", "6"]
    done = dpmac("train", *flags, "--device", "cpu", "--out", "out")
    if done.exit_code:
        assert done.exit_code == 2
        raise InputError(" ".join(done.output.split()))


#: How scores are covered, by door.
COVERED: dict[str, Callable[[Any], object]] = {
    "keyword": lambda data: resolve(dataset=data, cover_scores=True, **CHEAP),
    "train": typed,
    "tune": lambda data: tune(dataset=data, model="linear", steps=1, lr="0.1,0.2", out="out"),
}


@pytest.mark.parametrize("door", COVERED)
@pytest.mark.parametrize("held_out", [False, True])
def test_scores_of_records_that_are_trained_on_are_not_covered(door: str, held_out: bool) -> None:
    """Epsilon would be that of training or of testing, for records that are in both."""
    x, y = (part.numpy() for part in records().tensors)
    known: dict[str, Any] = {"low": -1, "high": 2, "classes": CLASSES}
    if held_out:  # more equal records than are kept on one side
        data = ArrayData(x.repeat(10, 0), y.repeat(10, 0), **known)
    else:
        data = ArrayData(x[:50], y[:50], x[40:], y[40:], **known)
    with pytest.raises(InputError, match=r"cover.scores.*test records of .* are exact copies of"):
        COVERED[door](data)
    assert not Path("out").exists()


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_scores_are_covered_where_copies_are_on_one_side(copies: int) -> None:
    x, y = (part.numpy().repeat(copies, 0) for part in records().tensors)
    known: dict[str, Any] = {"low": -1, "high": 2, "classes": CLASSES}
    COVERED["keyword"](ArrayData(x, y, **known))
    many = ArrayData(x.repeat(10, 0), y.repeat(10, 0), unit=range(len(x) * 10), **known)
    COVERED["keyword"](many)  # each row is declared to be another person


# Several processes.


def doors(run: str) -> dict[str, Callable[[], object]]:
    plan = resolve(dataset="digits", model="linear", out=run, **CHEAP).plan
    return {
        "PrivateStep": lambda: PrivateStep(
            network(), loss, sampling=Poisson(n=60, batch_size=6), **STEPS
        ),
        "make_private": lambda: make_private(digits_network(), "digits", **CHEAP),
        "train": lambda: finish(train_plan(plan)),
        "tune": lambda: tune(dataset="digits", model="linear", steps=1, out=run),
    }


def test_copies_that_a_split_would_separate_are_counted() -> None:
    x, y = (part.numpy().repeat(10, 0) for part in records().tensors)
    data = ArrayData(x, y, low=-1, high=2, classes=CLASSES)
    (said,) = [note for note in NOTES["train"](data) if "copies" in note]
    assert "of training records among test records" in said


@pytest.mark.parametrize("door", ["PrivateStep", "make_private", "train", "tune"])
def test_one_training_in_each_of_several_processes_is_refused(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match=r"one of 4 processes.*-m dpmac_cli train"):
        doors("out")[door]()


def test_a_group_that_is_formed_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    private = make_private(digits_network(), "digits", **CHEAP)
    step = PrivateStep(network(), loss, sampling=Poisson(n=60, batch_size=6), **STEPS)
    batch = next(iter(step.loader(records())))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for take in (private.step, lambda: step(batch)):
        with pytest.raises(InputError, match="one of 2 processes"):
            take()
    assert private.epsilon == step.epsilon == 0


# Ranges that are values of records.


def ranged(x: Any, **ends: Any) -> ArrayData:
    return ArrayData(x, np.arange(len(x)) % 2, classes=CLASSES, **ends)


@pytest.mark.parametrize("door", NOTES)
def test_a_range_that_ends_at_values_of_records_is_noted(door: str) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3))
    one = x[:, 1]
    for low, high in (
        (x.min(0), x.max(0)),
        (x.min(), x.max()),
        ([-9, one.min(), -9], [9, one.max(), 9]),
    ):
        (said,) = [n for n in NOTES[door](ranged(x, low=low, high=high)) if "smallest" in n]
        assert "Ranges are published" in said
    y = x[:, 0]
    target = ArrayData(x, y, low=-9, high=9, target_low=y.min(), target_high=y.max())
    if door != "make_private":  # its network has two outputs
        assert any("The range of y ends at" in note for note in NOTES[door](target))


def test_a_range_of_common_values_is_not_noted() -> None:
    rng = np.random.default_rng(0)
    for x, low, high in (
        (rng.integers(0, 2, (60, 3)).astype(float), 0, 1),
        (rng.normal(size=(60, 3)), -9, 9),
        (rng.normal(size=(60, 3)).clip(-1, 1), -1, 1),
    ):
        assert not NOTES["train"](ranged(x, low=low, high=high))


# What nothing can see is said in the sentence that people read.


def test_the_statement_names_what_was_computed_from_the_records_before() -> None:
    step = PrivateStep(network(), loss, sampling=Poisson(n=60, batch_size=6), **STEPS)
    for what in ("loaded weights", "outputs of a teacher", "means to normalise by"):
        assert what in step.statement


# Losses and networks that need the batch, and such as only look so.


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    h = model(batch[0])
    return cross_entropy(h @ h.T, torch.arange(len(h)), reduction="none")


def ranking(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])[:, 0]
    return torch.relu(1 + scores[:, None] - scores[None]).mean(1)


def hardest(model: nn.Module, batch: Any) -> Tensor:
    each = loss(model, batch)
    return each * (each >= each.median())


def mixed_up(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, ((batch[0] + batch[0].flip(0)) / 2, batch[1]))


def weighed(model: nn.Module, batch: Any) -> Tensor:
    each = loss(model, batch)
    return each / each.detach().sum()


def by_class(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) * torch.tensor([1.0, 3.0])[batch[1]]


#: What a network does to what its first layer computes, or a loss; and whether it needs the batch.
NEEDS: dict[str, tuple[Any, bool]] = {
    "InfoNCE": (contrastive, True),
    "ranking": (ranking, True),
    "hard examples": (hardest, True),
    "mixup": (mixed_up, True),
    "weights of a batch": (weighed, True),
    "batch norm": (lambda h: nn.functional.batch_norm(h, None, None, training=True), True),
    "centred": (lambda h: h - h.mean(0), True),
    "softmax over records": (lambda h: h.softmax(0), True),
    "spread": (lambda h: h / (1 + h.std(0)), True),
    "neighbours": (lambda h: h + h.roll(1, 0), True),
    "layer norm": (nn.LayerNorm(4), False),
    "group norm": (nn.GroupNorm(2, 4), False),
    "softmax": (lambda h: h.softmax(1), False),
    "dropout": (nn.Dropout(0.5), False),
    "centred in a record": (lambda h: h - h.mean(1, keepdim=True), False),
    "sorted": (lambda h: h.sort(1).values, False),
    "sums": (lambda h: h.cumsum(1), False),
    "largest": (lambda h: h * (h >= h.amax(1, keepdim=True)), False),
    "products": (lambda h: h + torch.einsum("nc,nd->nc", h, h), False),
    "weights of classes": (by_class, False),
}
LOSSES = (contrastive, ranking, hardest, mixed_up, weighed, by_class)


@pytest.mark.parametrize("name", NEEDS)
def test_what_needs_the_batch_is_refused_and_what_only_looks_so_is_not(name: str) -> None:
    of, needs = NEEDS[name]
    between, own = (nn.Identity(), of) if of in LOSSES else (of, loss)
    parts = {"first": nn.Linear(3, 4), "between": between, "last": nn.Linear(4, 2)}
    model = Do(lambda s, x: s.last(s.between(s.first(x))), **parts)
    given: dict[str, Any] = {"sampling": Poisson(n=60, batch_size=6), **STEPS}
    said = r"for a batch than for one|including one"
    with pytest.raises(ModelError, match=said) if needs else nullcontext():
        PrivateStep(model, own, example=records(8).tensors, **given)
    if needs and own is loss:
        with pytest.raises(ModelError, match=said):
            make_private(model, ranged(np.zeros((60, 3)), low=-1, high=1), **CHEAP)


def test_a_network_file_that_needs_the_batch_is_refused() -> None:
    """By the command, whose runs are those of compare and tune, too."""
    Path("net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__(64, classes)\n"
        "    def forward(self, x):\n"
        "        h = super().forward(x.flatten(1))\n"
        "        return h - h.mean(0)\n"
    )
    assert "computes something else for a batch" in refused("--model", "net.py:Net", code=4)


# What a record of a table is read as.


def dated(last: str) -> InMemoryData:
    import pyarrow as pa  # noqa: PLC0415

    days = [f"2020-01-{1 + row % 28:02}" for row in range(39)]
    columns = {"day": [*days, last], "sick": ["no", "yes"] * 20}
    day = {"type": "date", "range": ["2019-01-01", "2024-12-31"]}
    schema = {"label": {"column": "sick", "classes": CLASSES}, "columns": {"day": day}}
    return from_dataframe(pa.table(columns), schema)


def of_frame(data: InMemoryData) -> Declaration:
    return declared(in_memory=data, schema=data.schema)


def test_the_newest_date_decides_no_age_of_other_records() -> None:
    """Years count until the last day of the declared range."""
    before, after = (
        Counter(x for side in load(of_frame(dated(last))) for x in side[0].ravel().tolist())
        for last in ("2020-02-01", "2024-06-01")
    )
    assert (before - after).total() == (after - before).total() == 1


# Values that a schema does not fit.


def test_a_column_outside_its_range_and_a_category_without_a_record_are_noted() -> None:
    import pyarrow as pa  # noqa: PLC0415

    columns = {
        "height": [165.5 + row for row in range(40)],
        "sex": ["f", "m"] * 20,
        "sick": ["no", "yes"] * 20,
    }
    schema = {
        "label": {"column": "sick", "classes": CLASSES},
        "columns": {"height": {"range": [1.0, 2.2]}, "sex": {"categories": ["f", "w"]}},
    }
    notes = NOTES["train"](from_dataframe(pa.table(columns), schema))
    assert any("Nearly all values are outside the range of height (1 to 2.2)" in n for n in notes)
    assert any("No record has the category w of sex: check the spelling" in n for n in notes)
    assert not any("of f" in note for note in notes)


def test_all_words_for_a_missing_value_are_told_at_once() -> None:
    import pyarrow as pa  # noqa: PLC0415

    columns = {"crp": ["1", "k.A.", "<0.6", "unknown", "k.A."] * 8, "sick": ["no", "yes"] * 20}
    schema = {
        "label": {"column": "sick", "classes": CLASSES},
        "columns": {"crp": {"range": [0, 9]}},
    }
    words = r"'k\.A\.', '<0.6', 'unknown' \(.*missing_words or categories"
    with pytest.raises(InputError, match=words):
        resolve(dataset=from_dataframe(pa.table(columns), schema), **CHEAP)


# What a program sees.


def test_a_rate_of_zero_is_where_schedules_end() -> None:
    step = PrivateStep(network(), loss, sampling=Poisson(n=60, batch_size=6), **STEPS)
    private = make_private(digits_network(), "digits", **CHEAP)
    for training in (step, private):
        training.lr = 0.0
        assert training.lr == 0
        for bad in (-1.0, float("nan"), float("inf")):
            with pytest.raises(InputError):
                training.lr = bad
    before = private.model[1].weight.detach().clone()  # type: ignore[index]
    private.step()
    assert torch.equal(private.model[1].weight, before)  # type: ignore[index]


class Output:
    """What networks of transformers return."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class OfTransformers(nn.Module):
    """A network that returns its logits in an object, and has a configuration."""

    config = object()

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Output:
        return Output(self.head(self.body(x.flatten(1)).tanh()))


def test_logits_in_an_object_are_taken_and_what_is_frozen_is_said() -> None:
    private = make_private(OfTransformers(), "digits", **CHEAP)
    private.step()
    said = "520 parameters are trained: body.weight, body.bias; 90 parameters are frozen: head."
    assert any(said in note for note in private.notes)
    assert repr(private).startswith("PrivateTraining(1 of 2 steps; 520 parameters are trained")
    assert repr(private.evaluate()).startswith("Evaluation(accuracy ")
    inputs = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inputs[0].requires_grad_(False)
    sampling = Poisson(n=60, batch_size=6)
    step = PrivateStep(inputs, loss, sampling=sampling, example=records(8).tensors, **STEPS)
    said = "10 parameters are trained: 1.weight, 1.bias; 16 parameters are frozen: 0.weight, 0.bias"
    assert step.notes == (f"{said}.",)
    assert repr(step) == f"PrivateStep(0 of 2 steps; {said})"


def test_a_number_of_numpy_that_is_set_again_is_no_change() -> None:
    network: Any = nn.Linear(2, 1)
    network.rate = np.float64(0.5)
    kept = Fingerprint(network, [id(p) for p in network.parameters()])
    network.rate = np.float64(0.5)
    kept.check()
    network.rate = np.float64(0.6)
    with pytest.raises(ModelError, match="rate changed"):
        kept.check()
