"""Metrics of test records: scikit-learn's, worked by hand, imbalanced, with NaN, with one class."""

import math
import time
import warnings

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn import metrics as sklearn
from torch import Tensor
from torch.nn.functional import one_hot

from dpmac_cli.tasks.classification import Classification, SeveralLabels
from dpmac_cli.tasks.metrics import (
    Answers,
    all_metrics,
    as_values,
    intervals,
    sensitivity_and_specificity,
)
from dpmac_cli.training.evaluation import Evaluation
from tests.helpers import answers_of, class_task

CHOSEN = [metric.name for metric in Classification.metrics if metric.chosen]
LABELS = SeveralLabels(("a", "b", "c"))


def scored(labels: Tensor, logits: Tensor) -> Answers:
    return answers_of(Evaluation(0.0, logits, labels, class_task(logits.shape[1])))


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
    found = all_metrics(scored(labels, logits))
    truth, guess, shares = labels.numpy(), logits.argmax(1).numpy(), logits.softmax(1).numpy()
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
    sensitivity, specificity = sensitivity_and_specificity(scored(labels, logits))
    assert sensitivity == pytest.approx(sklearn.recall_score(truth, guess, average=None).tolist())
    matrix = sklearn.multilabel_confusion_matrix(truth, guess)
    assert specificity == pytest.approx((matrix[:, 0, 0] / matrix[:, 0].sum(1)).tolist())


def test_every_metric_that_can_be_shown_is_computed() -> None:
    names = {metric.name for metric in Classification.metrics}
    assert names == all_metrics(scored(*drawn(3))).keys()


def test_a_case_worked_by_hand() -> None:
    """Probabilities of class 1: 0.9, 0.8, 0.4 and 0.3, of which the first and third have it."""
    shares = torch.tensor([0.9, 0.8, 0.4, 0.3])
    logits = torch.stack([1 - shares, shares], 1).log()
    found = all_metrics(scored(torch.tensor([1, 0, 1, 0]), logits))
    assert found["accuracy"] == found["balanced-accuracy"] == found["f1"] == 0.5
    assert found["auroc"] == pytest.approx(3 / 4)
    assert found["average-precision"] == pytest.approx((1 + 2 / 3) / 2)
    # Bins of confidence 0.9, 0.8, 0.6 and 0.7, of which the first and last are right.
    assert found["calibration-error"] == pytest.approx((0.1 + 0.8 + 0.6 + 0.3) / 4)


def test_two_percent_of_positives_that_are_never_found() -> None:
    labels = (torch.arange(1000) % 50 == 0).long()
    logits = torch.zeros(1000, 2)
    logits[:, 0] = 3.0
    found = all_metrics(scored(labels, logits))
    assert found["accuracy"] == 0.98
    assert found["balanced-accuracy"] == found["auroc"] == 0.5
    assert found["average-precision"] == pytest.approx(0.02)
    assert found["f1"] == pytest.approx(0.98 / 1.98)
    assert sensitivity_and_specificity(scored(labels, logits)) == [[1, 0], [0, 1]]


def test_an_output_that_is_no_number_is_wrong_in_every_metric() -> None:
    labels, logits = drawn(3)
    spoiled = logits.clone()
    spoiled[::5] = torch.nan
    whole, found = (scored(labels, some) for some in (logits, spoiled))
    before, after = all_metrics(whole), all_metrics(found)
    for name in CHOSEN:
        assert after[name] < before[name], name
    lost = torch.arange(len(labels)) % 5 == 0
    right = (logits.argmax(1) == labels) & ~lost
    assert after["accuracy"] == pytest.approx(right.double().mean().item())
    nothing = all_metrics(scored(labels, torch.full_like(logits, torch.nan)))
    assert nothing.pop("average-precision") == pytest.approx(1 / 3, abs=0.05)  # all rank last
    assert {nothing[name] for name in CHOSEN if name in nothing} == {0.0}
    assert nothing["calibration-error"] == 1.0


def test_infinite_outputs_are_answers() -> None:
    logits = torch.tensor([[torch.inf, 0.0], [-torch.inf, torch.inf], [0.0, -torch.inf]])
    found = all_metrics(scored(torch.tensor([0, 1, 0]), logits))
    assert found == pytest.approx(dict.fromkeys(found, 1.0) | {"calibration-error": 0.0})


def test_test_records_of_one_class_have_no_ranking() -> None:
    answers = scored(torch.zeros(20, dtype=torch.int64), drawn(2, 20)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, ends = (
            as_values(answers, all_metrics(answers)),
            intervals(answers, all_metrics(answers), 50),
        )
    assert found["auroc"] is found["average_precision"] is None
    assert found["specificity"][0] is found["sensitivity"][1] is None
    assert found["balanced_accuracy"] == found["accuracy"] == found["sensitivity"][0]
    assert all(map(math.isnan, ends["auroc"]))


def test_a_class_without_records_is_left_out_of_means() -> None:
    labels, logits = drawn(3)
    logits = torch.cat([logits, torch.full((len(logits), 1), -9.0)], 1)
    three, four = (all_metrics(scored(labels, some)) for some in (logits[:, :3], logits))
    assert three == pytest.approx(four, abs=1e-3)


def labelled() -> tuple[NDArray[np.uint8], Tensor]:
    source = torch.Generator().manual_seed(4)
    labels = (torch.rand(300, 3, generator=source) < torch.tensor([0.5, 0.2, 0.05])).byte()
    return labels.numpy(), torch.randn(300, 3, generator=source) + 2 * labels - 1


def test_several_labels_a_record_are_columns_of_their_own() -> None:
    truth, logits = labelled()
    result = Evaluation(0.0, logits, torch.from_numpy(truth), LABELS)
    found, guess = all_metrics(answers_of(result)), (logits > 0).numpy()
    shares = logits.sigmoid().numpy()
    assert result.accuracy == found["accuracy"] == pytest.approx((truth == guess).mean())
    assert found["f1"] == pytest.approx(sklearn.f1_score(truth, guess, average="macro"))
    assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(truth, shares))
    assert found["average-precision"] == pytest.approx(
        sklearn.average_precision_score(truth, shares)
    )
    balanced = [sklearn.balanced_accuracy_score(truth[:, k], guess[:, k]) for k in range(3)]
    assert found["balanced-accuracy"] == pytest.approx(np.mean(balanced))
    matrices = sklearn.multilabel_confusion_matrix(truth, guess)
    assert (result.confusion.numpy() == matrices).all()


def test_a_lost_record_is_wrong_in_all_of_its_labels() -> None:
    truth, logits = labelled()
    spoiled = logits.clone()
    spoiled[::2, 0] = torch.nan
    result = Evaluation(0.0, spoiled, torch.from_numpy(truth), LABELS)
    right = (truth == (logits > 0).numpy())[1::2].sum() / truth.size
    assert result.accuracy == pytest.approx(right)
    assert result.unanswered == 150


@pytest.mark.parametrize("classes", [2, 3])
def test_intervals_are_those_of_scikit_learn_on_resamples(classes: int) -> None:
    labels, logits = drawn(classes)
    answers = scored(labels, logits)
    points = all_metrics(answers)
    found = intervals(answers, points, 1000)
    assert found == intervals(answers, points, 1000)
    assert found.keys() == points.keys()
    generator, slow = np.random.default_rng(7), []
    for _ in range(100):
        rows = torch.from_numpy(generator.integers(len(labels), size=len(labels)))
        slow.append(all_metrics(scored(labels[rows], logits[rows])))
    for name, (low, high) in found.items():
        values = np.array([some[name] for some in slow])
        centred = np.percentile(values, [2.5, 97.5]) - values.mean() + points[name]
        assert (low, high) == pytest.approx(tuple(centred), abs=0.3 * np.ptp(centred)), name
        assert low < points[name] < high


def test_intervals_cover_what_they_are_for() -> None:
    """The accuracy of the population is 0.8; of 100 test sets, 95% have it in the interval."""
    source = torch.Generator().manual_seed(1)
    inside = 0
    for _ in range(100):
        labels = torch.randint(2, (200,), generator=source)
        wrong = torch.rand(200, generator=source) < 0.2
        logits = one_hot(labels ^ wrong.long(), 2).float()
        answers = scored(labels, logits)
        low, high = intervals(answers, all_metrics(answers), 100)["accuracy"]
        inside += low <= 0.8 <= high
    assert 87 <= inside <= 99


@pytest.mark.long
def test_ten_thousand_records_take_seconds() -> None:
    answers = scored(*drawn(10, 10_000))
    began = time.process_time()
    intervals(answers, all_metrics(answers), 1000)
    assert time.process_time() - began < 15  # 2 on a free core
