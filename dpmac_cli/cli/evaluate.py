"""dpmac eval."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dpmac_cli.catalog import DATASETS
from dpmac_cli.cli import console
from dpmac_cli.cli.failures import explained
from dpmac_cli.config import OWN_DATA, parse

HELP = """Score every test sample with a trained model.

Example: dpmac eval runs/mnist-dp-macadam-1

Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 4 the model does not fit the data.
"""


@explained
def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a model.safetensors.")
    ],
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help=f"What to score on: {', '.join(DATASETS)}; or {OWN_DATA[1]}. "
            "[default: what it was trained on]",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FILE.py:FACTORY",
            help="Where a network of your own is. What a model file names is never imported.",
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where data sets lie (or DPMAC_DATA_DIR).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Load a model, score the test set, print the result."""
    del debug
    given = parse({"dataset": dataset, "data_dir": data_dir, "device": device})
    from dpmac_cli.cli import display  # noqa: PLC0415  (loads torch)
    from dpmac_cli.folder import CARD, to_json  # noqa: PLC0415
    from dpmac_cli.scoring import score  # noqa: PLC0415

    scored = score(model, dataset, given.get("data_dir"), device, network)
    result, card = scored.result, scored.path.with_name(CARD)
    if json:
        body: dict[str, Any] = {
            "model": str(scored.path),
            "card": str(card) if card.is_file() else None,
            "dataset": scored.dataset,
            "accuracy": result.accuracy,
            "loss": result.loss if math.isfinite(result.loss) else None,
            "samples": result.samples,
            "per_class": {
                name: None if math.isnan(share) else share
                for name, share in zip(scored.classes, result.per_class, strict=True)
            },
            "confusion": result.confusion.tolist(),
        }
        console.print_result(to_json(body))
        return
    out = console.stdout()
    out.print(display.evaluation_table(result, scored.classes))
    out.print(
        f"{scored.path} on {scored.dataset}: accuracy {result.accuracy:.2%}, "
        f"loss {result.loss:.4f}, {result.samples:,} samples"
    )
    if card.is_file():
        out.print(f"what it is and what its privacy is worth: {card}")
