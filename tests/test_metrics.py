"""Metrics of test records: scikit-learn's, worked by hand, imbalanced, with NaN, with one class."""

import math
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
