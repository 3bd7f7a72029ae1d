"""dpmac tune: search for the best settings, and publish the best trial only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.text import Text

from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import command, stop, stop_request
from dpmac_cli.config.flags import Fields, SomePath
from dpmac_cli.config.settings import SETTINGS, Config, DryRun, PrintJson, Quiet
from dpmac_cli.errors import INTERRUPTED
from dpmac_cli.files import to_json
from dpmac_cli.studies.search import DECIDED, RELEASED, SEARCHED, SearchFlags, plan_search

#: Settings of a training run that a search does not decide itself.
SHARED: Fields = {
    name: field for name, field in SETTINGS.items() if name not in (*DECIDED, "cover_scores", "out")
}


@command(
    SearchFlags.model_fields,
    SHARED,
    several=SEARCHED,
    not_both={("dry_run", "json"): "a plan has no report"},
)
def tune(
    *,
    dry_run: DryRun = False,
    config: Config = None,
    out: Annotated[
        SomePath | None,
        Field(description="Folder of the search, and of the published run. [default: runs/tune]"),
    ] = None,
    json: PrintJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Search for the best settings, within one epsilon for search and model together.

    Settings with several values (5,10,20) or a range of numbers (1e-4:0.1) are drawn at random for
    each of a secret random number of trials; without any, the learning rate, near its default. Only
    the trial with the best covered score is published, as an ordinary run in --out. The others,
    their scores and their number are neither shown nor kept.

    Example: dpmac tune --dataset digits --epsilon 3 --lr 1e-4:0.1 --trials 10

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 3 privacy budget infeasible, 4 no
    trial has a result, memory ran out or the device failed, 130 interrupted (nothing was
    released, and nothing spent).
    """
    try:
        _tune(settings, config, out, dry_run=dry_run, json=json, quiet=quiet)
    except KeyboardInterrupt:
        stop(f"interrupted. {RELEASED} To start it again, repeat the command.", INTERRUPTED)


def _tune(
    settings: Mapping[str, Any],
    config: Path | None,
    out: Path | None,
    *,
    dry_run: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Plan a search, carry it out and print its best trial. See :func:`tune` for the arguments.

    Raises KeyboardInterrupt if it was stopped, by one Ctrl-C after the step that it is in.
    """
    with console.waiting(quiet, "settings and noise"):
        space = plan_search(settings, config, out)
    if not quiet:
        console.print_notes(space.notes)
        console.print_private_notes(space.private_notes)
    screen = console.stdout() if dry_run else console.for_display(quiet, json)
    screen.print(*space.lines(), sep="\n")
    if dry_run:
        return
    screen.print(Text(f"writing {space.out}", style="dim"))
    with console.waiting(quiet, "searching"), stop_request() as stop_asked:
        finished = late.tune.carry_out_search(space, stop_asked)
    if json:
        console.print_result(to_json(finished.report))
    screen.print(*late.display.summary(finished, space.plans[0].settings.metric), sep="\n")
    best = finished.report["settings"]
    drawn = [f"{dimension.name} {best[dimension.name]}" for dimension in space.dimensions]
    screen.print(Text(f"settings of the best trial: {', '.join(drawn)}"))
