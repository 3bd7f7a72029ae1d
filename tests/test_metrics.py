"""Metrics of test records: scikit-learn's, worked by hand, imbalanced, with NaN, with one class."""

import importlib
import io
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from scipy.stats import binomtest
from sklearn import metrics as sklearn
from torch import Tensor, nn
from torch.nn.functional import one_hot

from dpmac_cli import ArrayData, InputError, load, register_task, train
from dpmac_cli.cli.display import in_blocks, table_by_class
from dpmac_cli.data.units import Units, units_of
from dpmac_cli.errors import ModelError
from dpmac_cli.models.dataset import Data
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.uncounted import Uncounted
from dpmac_cli.tasks.class_metrics import SPECIFICITY, rates
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.intervals import clopper_pearson, effective_size, resampled
from dpmac_cli.tasks.metrics import Compared, EvaluationMetric
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import ASKED, FUNCTIONS, LOSSES, METRICS, TASKS, Task
from dpmac_cli.training.evaluation import Evaluation, outputs
from tests.helpers import class_task


def evaluated_of(labels: Tensor, logits: Tensor) -> Evaluation:
    return Evaluation(0.0, logits, labels, class_task(logits.shape[1]))


def drawn(classes: int, records: int = 400, share: float | None = None) -> tuple[Tensor, Tensor]:
    """Labels, the last class with a share, and logits that know something of them, with ties."""
    source = torch.Generator().manual_seed(classes)
    labels = torch.randint(classes, (records,), generator=source)
    if share is not None:
        labels = (torch.rand(records, generator=source) < share).long()
    noise = torch.randn(records, classes, generator=source)
    return labels, (2 * noise + one_hot(labels, classes)).round(decimals=1)


@pytest.mark.parametrize(("classes", "share"), [(2, None), (2, 0.02), (3, None), (10, None)])
def test_metrics_are_scikit_learns(classes: int, share: float | None) -> None:
    labels, logits = drawn(classes, share=share)
    found = evaluated_of(labels, logits).metrics
    truth, guess = labels.numpy(), logits.argmax(1).numpy()
    shares = logits.double().softmax(1).float().numpy()
    hot = np.eye(classes)[truth]
    if classes == 2:
        hot, shares = hot[:, 1], shares[:, 1]
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(truth, guess))
    assert found["balanced-accuracy"] == pytest.approx(
        sklearn.balanced_accuracy_score(truth, guess)
    )
    assert found["f1"] == pytest.approx(sklearn.f1_score(truth, guess, average="macro"))
    assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(hot, shares))
    assert found["average-precision"] == pytest.approx(sklearn.average_precision_score(hot, shares))
    sensitivity, specificity = rates(evaluated_of(labels, logits).compared)
    assert sensitivity == pytest.approx(sklearn.recall_score(truth, guess, average=None))
    assert found["log-loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-6
    )
    sides = hot[:, None] if classes == 2 else hot
    best = [
        max(
            (scores[truth == 1] >= threshold).mean()
            for threshold in [*np.unique(scores), math.inf]
            if (scores[truth == 0] < threshold).mean() >= SPECIFICITY
        )
        for truth, scores in zip(sides.T, shares.reshape(len(truth), -1).T, strict=True)
    ]
    assert found["sensitivity-at-specificity"] == pytest.approx(np.mean(best))
    matrix = sklearn.multilabel_confusion_matrix(truth, guess)
    assert specificity == pytest.approx(matrix[:, 0, 0] / matrix[:, 0].sum(1))


def test_an_output_that_is_no_number_is_wrong_in_every_metric() -> None:
    labels, logits = drawn(3)
    spoiled = logits.clone()
    spoiled[::5] = torch.nan
    whole, found = (evaluated_of(labels, some) for some in (logits, spoiled))
    before, after = whole.metrics, found.metrics
    for metric in Classification.metrics:
        name = metric.name
        assert metric.better(after[name]) < metric.better(before[name]), name
    lost = torch.arange(len(labels)) % 5 == 0
    right = (logits.argmax(1) == labels) & ~lost
    assert after["accuracy"] == pytest.approx(right.double().mean().item())
    assert evaluated_of(labels, spoiled).unanswered == 80
    nothing = evaluated_of(labels, torch.full_like(logits, torch.nan)).metrics
    assert nothing.pop("average-precision") == pytest.approx(1 / 3, abs=0.05)  # all rank last
    assert nothing.pop("calibration-error") == 1.0
    assert nothing.pop("log-loss") == pytest.approx(36.04, abs=0.01)  # the least share in float64
    assert set(nothing.values()) == {0.0}


def test_test_records_of_one_class_have_no_ranking() -> None:
    answers = evaluated_of(torch.zeros(20, dtype=torch.int64), drawn(2, 20)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, ends = (
            answers.values(),
            answers.intervals(resamples=50),
        )
    assert found["auroc"] is found["average_precision"] is None
    assert found["specificity"][0] is found["sensitivity"][1] is None
    assert found["balanced_accuracy"] == found["accuracy"] == found["sensitivity"][0]
    assert all(map(math.isnan, ends["auroc"]))


@pytest.mark.parametrize("classes", [2, 3])
def test_intervals_are_those_of_scikit_learn_on_resamples(classes: int) -> None:
    labels, logits = drawn(classes)
    answers = evaluated_of(labels, logits)
    points = answers.metrics
    found = answers.intervals(resamples=150)
    assert found == answers.intervals(resamples=150)
    assert found.keys() == points.keys()
    generator, slow = np.random.default_rng(7), []
    for _ in range(100):
        rows = torch.from_numpy(generator.integers(len(labels), size=len(labels)))
        slow.append(evaluated_of(labels[rows], logits[rows]).metrics)
    for name, (low, high) in found.items():
        values = np.array([some[name] for some in slow])
        centred = np.percentile(values, [2.5, 97.5]) - values.mean() + points[name]
        assert (low, high) == pytest.approx(tuple(centred), abs=0.3 * np.ptp(centred)), name
        assert low < points[name] < high


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
simulation: Any = importlib.import_module("intervals")


def evaluated(
    right: int, wrong: int, *, classes: int = 2, units: Units | None = None
) -> Evaluation:
    labels = torch.arange(right + wrong) % classes
    answers = torch.where(torch.arange(right + wrong) < right, labels, (labels + 1) % classes)
    return Evaluation(0.0, 3.0 * one_hot(answers, classes), labels, class_task(classes), units)


@pytest.mark.parametrize(("right", "wrong"), [(65, 0), (60, 5), (1, 1), (0, 7), (990, 10)])
def test_independent_records_have_the_exact_interval(right: int, wrong: int) -> None:
    wanted = binomtest(right, right + wrong).proportion_ci()
    answers = evaluated(right, wrong)
    found = answers.intervals(resamples=100)["accuracy"]
    assert found == pytest.approx((wanted.low, wanted.high), abs=1e-9)
    assert found[0] < found[1]


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("persons", [None, 13, 1])
def test_no_interval_has_width_zero(classes: int, persons: int | None) -> None:
    """Not even of 65 of 65 right: what was never seen may still happen."""
    units = None if persons is None else units_of(np.arange(65) % persons)
    answers = evaluated(65, 0, classes=classes, units=units)
    values = answers.metrics
    found = answers.intervals(resamples=100)
    assert all(map(math.isnan, found.pop("log-loss")))  # it does not vary, and has no bound
    for name, (low, high) in found.items():
        assert low <= values[name] <= high, name
        assert high - low > 0.04, name


def test_a_constant_prediction_has_the_share_and_the_entropy_of_the_classes() -> None:
    labels, logits = drawn(3, 300)
    shares = np.bincount(labels.numpy()) / 300
    always = torch.from_numpy(np.log(shares)).expand(300, 3)
    constant, values = evaluated_of(labels, always).metrics, evaluated_of(labels, logits).values()
    assert values["constant_accuracy"] == pytest.approx(constant["accuracy"])
    assert values["constant_log_loss"] == pytest.approx(constant["log-loss"], rel=1e-6)


def test_records_of_one_person_are_not_independent() -> None:
    """Ten copies of each record say no more than one."""
    owners = np.repeat(np.arange(60), 10)
    right = np.repeat(np.arange(60) < 45, 10)
    labels = torch.from_numpy(owners % 2)
    logits = one_hot(torch.where(torch.from_numpy(right), labels, 1 - labels), 2).float()
    both = [
        Evaluation(0.0, logits, labels, class_task(2), units) for units in (None, units_of(owners))
    ]
    alone, grouped = (one.intervals(resamples=100) for one in both)
    single = clopper_pearson(0.75, 60)
    assert grouped["accuracy"] == pytest.approx(single, abs=0.02)
    for name in ("accuracy", "balanced-accuracy", "f1"):
        widths = [ends[name][1] - ends[name][0] for ends in (grouped, alone)]
        assert widths[0] > 2.5 * widths[1], name


def test_persons_who_are_as_often_right_may_differ_in_other_metrics() -> None:
    """Half of them are wrong in all records of the rare class, the others in as many others."""
    owners, place = np.repeat(np.arange(60), 40), np.tile(np.arange(40), 60)
    labels = torch.from_numpy((place < 8).astype(np.int64))
    wrong = torch.from_numpy(np.where(owners % 2, place < 8, place >= 32))
    logits = one_hot(torch.where(wrong, 1 - labels, labels), 2).float()
    widths = []
    for units in (None, units_of(owners)):
        answers = Evaluation(0.0, logits, labels, class_task(2), units)
        low, high = answers.intervals(resamples=100)["balanced-accuracy"]
        widths.append(high - low)
    assert widths[1] > 1.8 * widths[0]


@pytest.mark.parametrize(
    ("units", "share", "icc"),
    [(20, 0.99, None), (50, 0.97, 0.7), (200, 0.99, 0.3)],
)
def test_intervals_cover_the_populations_accuracy(
    units: int, share: float, icc: float | None
) -> None:
    """With normal intervals between units, 0.907 in the second case, and 0.82 in the first."""
    assert simulation.accuracy(1000, units, share, icc) >= 0.94


@pytest.mark.weekly
@pytest.mark.parametrize(("positives", "shift"), [(0.5, 0.0), (0.1, 1.0)])
def test_intervals_of_few_resamples_cover_the_populations_metrics(
    positives: float, shift: float
) -> None:
    """The least number of resamples, and units of several records."""
    shares = simulation.others(100, 50, positives, shift, resamples=20)
    for name, share in shares.items():
        assert share >= 0.88, name


def test_no_interval_is_narrow_beside_a_wide_one_of_the_accuracy() -> None:
    """Of 13 persons, of which one has most of the wrong answers."""
    owners = np.repeat(np.arange(13), 14)
    labels = torch.arange(len(owners)) % 2
    wrong = torch.from_numpy((owners == 4) & (np.arange(len(owners)) % 14 < 10))
    logits = 3.0 * one_hot(torch.where(wrong, 1 - labels, labels), 2)
    answers = Evaluation(0.0, logits, labels, class_task(2), units_of(owners))
    found = answers.intervals(resamples=100)
    low, high = found["accuracy"]
    least, most = found["balanced-accuracy"]
    assert most - least >= 0.99 * (high - low) > 0.1


SHORT = ("--dataset", "digits", "--sigma", "6", "--device", "cpu")


@pytest.mark.parametrize("width", [40, 72, 80, 400])
@pytest.mark.parametrize("classes", [2, 10, 60])
def test_no_number_of_a_table_is_cut_on_a_narrow_screen(classes: int, width: int) -> None:
    """Also not with long names of classes, which take several lines."""
    labels, logits = drawn(classes, 40 * classes)
    names = tuple(f"{'a long name of a class ' * (k % 2)}{k}" for k in range(classes))
    answers = evaluated_of(labels, logits)
    table = table_by_class(names, answers.details())
    console = Console(file=io.StringIO(), width=width)
    console.print(*in_blocks(table, width), sep="\n")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for rate in np.concatenate(rates(answers.compared)):
        assert f"{rate:.2%}" in shown
    cells = [int(cell) for cell in re.findall(r"(?<=[ │])\d+(?= *[│\n])", shown)]
    counts = answers.confusion.flatten().tolist()
    assert not Counter(counts) - Counter(cells)


def test_one_number_that_is_none_leaves_a_record_without_a_class() -> None:
    logits = np.array([[3.0, math.nan, 0.0], [3.0, 0.0, 0.0]])
    answers = class_task(3).answers(logits)
    assert np.isnan(answers[0]).all()
    assert class_task(3).columns(answers)["predicted"] == ["", class_task(3).names[0]]


def test_a_variance_of_few_units_is_worth_fewer_answers() -> None:
    few, many = (effective_size(0.8, 0.01, 1000, units, units - 1) for units in (4, 1000))
    # The quotient of the 97.5% quantiles of Student's distribution, squared.
    assert few / many == pytest.approx((1.962341 / 3.182446) ** 2, rel=1e-5)


def test_few_resamples_make_intervals_longer() -> None:
    """By the quotient of the 97.5% quantiles of Student's distribution."""
    labels, logits = drawn(2, 400)
    answers, halves = evaluated_of(labels, logits), []
    for resamples in (5, 60):
        losses = resampled(answers.compared, [METRICS["log-loss"]], resamples)["log-loss"]
        low, high = answers.intervals(["log-loss"], resamples)["log-loss"]
        halves.append((high - low) / 2 / np.std(losses, ddof=1))
    few = [stats.t.ppf(0.975, 1 / (1 / 399 + 1 / (resamples - 1))) for resamples in (5, 60)]
    assert halves == pytest.approx(np.sqrt(400 / 399) * np.array(few), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_while_records_are_scored(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 2)).train(training)
    x = torch.rand(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([*outputs(model, [x])]), model[1](x))
    assert [part.training for part in model.modules()] == [training] * 3


def test_a_model_of_a_task_that_is_not_registered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).random((200, 3))
    data = ArrayData(x, (x[:, 0] > 0.5).astype(int), low=0, high=1)

    class Own(Classification):
        asked = True

    try:
        register_task("own")(Own)
        settings: dict[str, Any] = {"sigma": 4, "steps": 2, "device": "cpu", "out": "run"}
        train(dataset=data, task="own", **settings)
    finally:
        TASKS.pop("own")
        ASKED.remove("own")
    with pytest.raises(InputError, match=r"is of the task 'own', which is not registered"):
        load("run").predict(x)


def poisson(outputs: Any, targets: Any) -> Any:
    return (outputs.exp() - targets * outputs)[:, 0]


class Counts(Regression):
    """Counts, whose mean is predicted by its logarithm."""

    losses = ("poisson",)
    functions: ClassVar[Any] = {"poisson": poisson}
    asked = True

    @property
    def code(self) -> str:
        return f"{{}}[:, 0].exp().clamp({self.low!r}, {self.high!r})"

    def encoded(self, targets: Any) -> Any:
        return targets.reshape(-1, 1).clip(self.low, self.high).astype(np.float32)

    def decoded(self, scaled: Any) -> Any:
        return np.exp(scaled.astype(np.float64)).clip(self.low, self.high)

    def compared(self, outputs: Any, targets: Any, owners: Any) -> Compared:
        guess, truth = np.nan_to_num(self.decoded(outputs))[:, 0], targets[:, 0].astype(float)
        return Compared(truth, guess, owners, np.zeros((len(truth), 0), np.float32))


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Settings of a run of a task of numbers, which is registered for one test."""
    monkeypatch.chdir(tmp_path)
    register_task("counts")(Counts)
    yield {"task": "counts", "sigma": 4, "steps": 2, "device": "cpu", "out": "run"}
    TASKS.pop("counts")
    ASKED.remove("counts")
    FUNCTIONS.pop("poisson")
    LOSSES.remove("poisson")


def test_a_task_of_a_program_predicts_numbers_in_their_range(counts: dict[str, Any]) -> None:
    draws = np.random.default_rng(0)
    x = draws.random((200, 3))
    y = draws.poisson(np.exp(3 * x[:, 0]))
    data = ArrayData(x, y, low=0, high=1, target_low=0, target_high=8)
    finished = train(dataset=data, **counts)
    target = finished.report["data"]["target"]
    assert (target["kind"], target["low"], target["high"]) == ("counts", 0, 8)
    answers = load("run").predict(x).answers
    assert ((answers >= 0) & (answers <= 8)).all()
    assert "[:, 0].exp().clamp(0.0, 8.0)" in Path("run", "model-card.md").read_text()
    TASKS.pop("counts")
    try:
        with pytest.raises(InputError, match=r"is of the task 'counts', which is not registered"):
            load("run").predict(x)
    finally:
        TASKS["counts"] = Counts


def test_a_task_of_numbers_needs_their_range(counts: dict[str, Any]) -> None:
    x = np.random.default_rng(0).random((200, 3))
    data = ArrayData(x, (x[:, 0] > 0.5).astype(int), low=0, high=1)
    with pytest.raises(InputError, match="is for numbers, but <arrays> declares no range of them"):
        resolve(dataset=data, **counts)
    lines = [f"{first},{second}" for first, second in (9 * x[:, :2]).round()]
    Path("table.csv").write_text("\n".join(["age,visits", *lines]))
    schema = "columns: {age: {range: [0, 9]}}\nlabel: {column: visits, type: number}\n"
    Path("schema.yaml").write_text(schema)
    with pytest.raises(InputError, match="needs a public range of visits"):
        resolve(dataset="table.csv", schema="schema.yaml", **counts)


@pytest.mark.promise("reading")
def test_targets_of_a_task_of_a_program_are_learned_as_it_encodes_them(
    counts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a table whose columns are counted, by default: its own range never is."""
    draws = np.random.default_rng(0)
    x = draws.random(4000).round(4)
    y = draws.poisson(np.exp(2 * x))
    lines = [f"{number},{visits}" for number, visits in zip(x, y, strict=True)]
    Path("table.csv").write_text("\n".join(["age,visits", *lines]))
    schema = "columns: {age: {range: [0, 9]}}\nlabel: {column: visits, range: [0, 1000]}\n"
    Path("schema.yaml").write_text(schema)
    learned = list[Any]()
    prepared = Uncounted.prepared

    def kept(records: Uncounted, task: Task) -> Data:
        data = prepared(records, task)
        learned.append(data.train.labels)
        return data

    monkeypatch.setattr(Uncounted, "prepared", kept)
    settings = {**counts, "sigma": None, "epsilon": 8}
    finished = train(dataset="table.csv", schema="schema.yaml", **settings)
    assert finished.report["settings"]["scale"] == "private"
    assert sum(event.histogram for event in finished.events) == 3
    target = finished.report["data"]["target"]
    assert (target["low"], target["high"]) == (0, 1000)
    [labels] = learned
    assert set(labels.flatten().tolist()) <= set(map(float, y))
    assert labels.max() > 10
    assert finished.score().metrics["mae"] == finished.report["scores"]["mae"]["value"]


@pytest.mark.promise("published")
@pytest.mark.parametrize("method", ["encoded", "untested"])
def test_what_a_task_says_of_targets_when_it_fails_is_not_repeated(method: str) -> None:
    x = np.random.default_rng(0).random((200, 3))
    data = ArrayData(x, (x[:, 0] > 0.5).astype(int), low=0, high=1)

    def failing(_: Any, targets: Any) -> Any:
        raise ValueError(f"a target of {targets[0]}")

    Own = type("Own", (Classification,), {"asked": True, method: failing})
    try:
        register_task("own")(Own)
        with pytest.raises(InputError, match="The task 'own' failed on <arrays>: ValueError") as at:
            resolve(dataset=data, task="own", sigma=4, steps=2)
    finally:
        TASKS.pop("own")
        ASKED.remove("own")
    assert "a target of" not in str(at.value)
    assert "a target of" in str(at.value.__cause__)


def test_a_metric_that_returns_text_is_named() -> None:
    labels, logits = drawn(2, 40)
    metric = EvaluationMetric("verdict", "verdict", lambda of: "good")  # type: ignore[arg-type,return-value]
    with pytest.raises(ModelError, match="'verdict' returned a str: it must return one number"):
        metric.value(evaluated_of(labels, logits).compared)
