"""Curves of a classifier: ROC and reliability."""

from collections.abc import Sequence
from pathlib import Path

from dpmac_cli.plots import COLOURS, new_figure, write_figure
from dpmac_cli.tasks.metrics import BINS, Answers


def draw_curves(answers: Answers, error: float, names: Sequence[str], path: Path) -> None:
    """Draw one ROC curve per class against the others, and a reliability diagram.

    Only as many classes as there are colours are drawn; of two classes only the last. ``error`` is
    the calibration error. Raises OSError if the file cannot be written.
    """
    from sklearn.calibration import CalibrationDisplay  # noqa: PLC0415  (a second to import)
    from sklearn.metrics import RocCurveDisplay  # noqa: PLC0415  (a second to import)

    figure, (roc, reliability) = new_figure(2)
    roc.plot([0, 1], [0, 1], "-", color="#bbbbbb", linewidth=1)
    for k in answers.ranked[: len(COLOURS)]:
        name = names[k].replace("$", r"\$")  # it would begin a formula
        truth, scores = answers.truth[:, k], answers.scores[:, k]
        RocCurveDisplay.from_predictions(truth, scores, name=name, ax=roc)
    roc.set(xlabel="1 - specificity", ylabel="sensitivity")
    confidence, hit = (part.ravel() for part in answers.judged)
    CalibrationDisplay.from_predictions(hit, confidence, n_bins=BINS, ax=reliability)
    reliability.set(xlabel="confidence", ylabel="accuracy")
    reliability.set_title(f"calibration error {error:.3f}", fontsize="small")
    if (legend := reliability.get_legend()) is not None:
        legend.remove()
    write_figure(figure, path)
