"""ROC curves and calibration of a model on test records."""

from collections.abc import Sequence
from pathlib import Path

from dpmac_cli.plots import COLOURS, line_style, new_figure, write_figure
from dpmac_cli.training.metrics import BINS, Answers


def draw_evaluation(answers: Answers, error: float, classes: Sequence[str], path: Path) -> None:
    """Draw ROC curves, one per class against the others, beside a reliability diagram.

    The first classes are drawn, as many as there are colours; of two classes the last.

    Args:
        error: the calibration error.

    Raises:
        OSError: the file cannot be written.
    """
    from sklearn.calibration import CalibrationDisplay  # noqa: PLC0415  (a second to import)
    from sklearn.metrics import RocCurveDisplay  # noqa: PLC0415  (a second to import)

    figure, (roc, reliability) = new_figure(2)
    roc.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1)
    for number, k in enumerate(answers.ranked[: len(COLOURS)]):
        name = classes[k].replace("$", r"\$")  # which would begin a formula
        truth, scores = answers.truth[:, k], answers.scores[:, k]
        RocCurveDisplay.from_predictions(
            truth, scores, name=name, ax=roc, curve_kwargs=line_style(number)
        )
    roc.set(xlabel="1 - specificity", ylabel="sensitivity")
    confidence, hit = (part.ravel() for part in answers.judged)
    CalibrationDisplay.from_predictions(hit, confidence, n_bins=BINS, ax=reliability)
    reliability.set(xlabel="confidence", ylabel="share that is right")
    reliability.set_title(f"calibration error {error:.3f}", fontsize="small")
    if (legend := reliability.get_legend()) is not None:
        legend.remove()
    write_figure(figure, path)
