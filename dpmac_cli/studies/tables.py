"""A comparison as JSON values, CSV, Markdown and LaTeX."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.storage.files import to_csv
from dpmac_cli.studies.results import Cell, Comparison

SCHEMA_VERSION = 1
MISSING = "–"


def as_values(comparison: Comparison) -> dict[str, Any]:
    """What compare.json holds: ``rows`` for programs, and the words that belong to them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "dataset": comparison.dataset,
        "delta": comparison.delta,
        "axes": list(comparison.axes),
        "column": comparison.column,
        "rows": [_row(cell) for cell in comparison.cells],
        "epsilon_of_the_study": _finite(comparison.bill),
        "study": comparison.study,
        "runs_beside": comparison.beside,
        "runs_beside_without_privacy": comparison.beside_plain,
        "epsilon_with_runs_beside": _finite(comparison.bill_beside),
        "remarks": [*comparison.remarks, *warnings(comparison)],
    }


def _row(cell: Cell) -> dict[str, Any]:
    return {
        **dict(cell.labels),
        "sigma": cell.sigma,
        "epsilon": _finite(cell.epsilon),
        "mean": _finite(cell.mean),
        "std": cell.std,
        "seeds": len(cell.accuracies),
        "accuracies": {str(seed): value for seed, value in cell.accuracies.items()},
        "failures": {str(seed): why for seed, why in cell.failures.items()},
        "standing": cell.standing,
        "training_seconds": _finite(cell.seconds),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def warnings(comparison: Comparison) -> list[str]:
    """What an epsilon in a table is worth, and what publishing its winner costs."""
    beside = list(_beside(comparison))
    if not math.isfinite(comparison.bill) or comparison.bill == 0:
        return beside
    seeds = (
        "Runs are drawn with the seeds named, to be repeatable: their epsilons hold only against "
        "those who do not know the seeds. Train what is to be published without one."
    )
    shared = (
        "That is for runs drawn independently. Runs of the same seed share batches and noise: from "
        "two of their models the noise can be subtracted, so publish no two of them."
    )
    runs = sum(len(cell.accuracies) + len(cell.failures) for cell in comparison.cells)
    open_ends = sum(len(cell.failures) for cell in comparison.cells)
    counted = f", {open_ends} of them not finished and counted in full," if open_ends else ""
    bill = (
        []
        if runs < 2 and comparison.bill <= comparison.cells[0].epsilon
        else [
            "An epsilon above is the price of one run fixed in advance. "
            f"The {runs} runs{counted} are on the same records: publishing what was learnt from "
            "all of them, such as which is best, costs epsilon "
            f"{format_epsilon(comparison.bill)} at delta {comparison.delta:g} in all. That covers "
            "attempts at these runs that were begun again from scratch, but no deleted runs, nor "
            "runs replaced by dpmac train --force."
        ]
    )
    alone = len(comparison.cells) == 1 and not beside
    return [seeds, *bill, *beside, *([] if alone else [shared])]


def _beside(comparison: Comparison) -> Iterator[str]:
    """What is to be said of runs that are no part of the study, and of the same records."""
    if not comparison.beside:
        return
    several = comparison.beside > 1
    said = (
        f"Its folder holds {comparison.beside} more run{'s' if several else ''} on data of the "
        f"same name, which cost{'' if several else 's'} privacy, too"
    )
    if comparison.beside_plain:
        yield f"{said}, {comparison.beside_plain} of them without any: no epsilon holds for all."
    elif math.isfinite(comparison.bill_beside):
        yield f"{said}: epsilon {format_epsilon(comparison.bill_beside)} in all, with the study's."
    else:
        yield (
            f"{said}: how much cannot be worked out, for files cannot be read, or they were "
            "sampled under another adjacency."
        )


def accuracy_text(cell: Cell | None, plus_minus: str = "±") -> str:
    """Mean and spread in percent."""
    if cell is None or not cell.accuracies:
        return MISSING
    spread = "" if cell.std is None else f" {plus_minus} {100 * cell.std:.2f}"
    return f"{100 * cell.mean:.2f}{spread}"


def column_title(comparison: Comparison, column: float) -> str:
    """Such as "sigma 0.5"."""
    return f"{comparison.column} {column:g}"


def epsilons(comparison: Comparison) -> list[str]:
    """Epsilon of each column, rounded up."""
    return [
        "no privacy" if math.isinf(e) else format_epsilon(e)
        for e in map(comparison.epsilon_of, comparison.columns)
    ]


def run_times(comparison: Comparison) -> list[str]:
    """How long a run of each row trained, on average over its columns."""
    means = [
        [cell.seconds for cell in cells if cell and math.isfinite(cell.seconds)]
        for _, cells in comparison.rows
    ]
    return [clock(fmean(seconds)) if seconds else MISSING for seconds in means]


def clock(seconds: float) -> str:
    """Such as 1:05:09, 0:12 or <0:01."""
    if 0 < seconds < 0.5:
        return "<0:01"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def as_csv(comparison: Comparison) -> str:
    """A line a cell."""
    rows = [_row(cell) for cell in comparison.cells]
    left_out = ("accuracies", "failures")
    columns = [name for name in rows[0] if name not in left_out]
    return to_csv(columns, rows)


def as_markdown(comparison: Comparison) -> str:
    """A table with the epsilons under the columns' titles, and the remarks below."""

    def show(cell: Cell | None) -> str:
        text = accuracy_text(cell)
        standing = None if cell is None else cell.standing
        return {"best": f"**{text}**", "tied": f"{text} ~"}.get(standing or "", text)

    columns = (column_title(comparison, column) for column in comparison.columns)
    titles = ["", *columns, "a run takes"]
    prices = ["epsilon", *epsilons(comparison), ""]
    lines = [_bars(titles), _bars(["---"] * len(titles)), _bars(prices)]
    lines += [
        _bars([name.replace("|", "\\|"), *map(show, cells), time])
        for (name, cells), time in zip(comparison.rows, run_times(comparison), strict=True)
    ]
    remarks = [*comparison.remarks, *warnings(comparison)]
    return "\n".join(lines) + "\n\n" + "\n\n".join(remarks) + "\n"


def _bars(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_latex(comparison: Comparison) -> str:
    """A booktabs table, to be pasted."""

    def show(cell: Cell | None) -> str:
        if cell is None or not cell.accuracies:
            return "--"
        text = accuracy_text(cell, r"\pm")
        body = rf"\mathbf{{{text}}}" if cell.standing == "best" else text
        return f"${body}$" + (r"\,$\sim$" if cell.standing == "tied" else "")

    columns = comparison.columns
    symbol = r"\sigma =" if comparison.column == "sigma" else r"\varepsilon \le"
    titles = " & ".join(["", *(f"${symbol} {value:g}$" for value in columns)])
    prices = " & ".join([r"$\varepsilon$", *map(_escaped, epsilons(comparison))])
    lines = [
        "% needs \\usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'c' * len(columns)}}}",
        r"\toprule",
        rf"{titles} \\",
        rf"{prices} \\",
        r"\midrule",
        *(
            rf"{' & '.join([_escaped(name), *map(show, cells)])} \\"
            for name, cells in comparison.rows
        ),
        r"\bottomrule",
        r"\end{tabular}",
        *(f"% {remark}" for remark in (*comparison.remarks, *warnings(comparison))),
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "&%$#_{}" else letter for letter in text)
