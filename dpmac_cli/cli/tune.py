"""dpmac tune: search for the best settings, and publish the best trial only."""

from typing import Any

from rich.text import Text

from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import command, option, stop, stop_request, take
from dpmac_cli.config.checks import private_notes
from dpmac_cli.config.flags import Flags, SomePath
from dpmac_cli.config.settings import SETTINGS, Config, DisplayFlags, DryRun
from dpmac_cli.errors import INTERRUPTED, InputError
from dpmac_cli.files import to_json
from dpmac_cli.studies.search import (
    DECIDED,
    RELEASED,
    SEARCHED,
    SearchFlags,
    plan_search,
)

#: Settings of a training run that a search does not decide itself; several values are drawn from.
SHARED = [
    option(name, field, several=name in SEARCHED)
    for name, field in SETTINGS.items()
    if name not in DECIDED and name not in ("cover_scores", "out")
]


class TuneFlags(Flags, frozen=True):
    """Flags of the command besides the settings of its trials."""

    dry_run: DryRun = False
    config: Config = None
    out: SomePath | None = None
    """Folder of the search, and of the published run. [default: runs/tune]"""


@command(TuneFlags, SearchFlags.model_fields, *SHARED)
def tune(flags: TuneFlags, **given: Any) -> None:
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
    shown, json = take(DisplayFlags, dict(given)), bool(given.pop("json", False))
    if flags.dry_run and json:
        raise InputError("--dry-run and --json contradict each other. Give one.")
    with console.waiting(shown.quiet, "settings and noise"):
        space = plan_search(given, flags.config, flags.out)
    if not shown.quiet:
        console.print_notes(space.notes)
        console.print_private_notes(private_notes(space.plans[0]))
    screen = console.stdout() if flags.dry_run else console.for_display(shown.quiet, json)
    screen.print(*space.lines(), sep="\n")
    if flags.dry_run:
        return
    screen.print(Text(f"writing {space.out}", style="dim"))
    with console.waiting(shown.quiet, "searching"), stop_request() as asked:
        try:
            [finished] = late.tune.carry_out_search(space, asked)
        except KeyboardInterrupt:
            stop(f"interrupted. {RELEASED} To start it again, repeat the command.", INTERRUPTED)
    if json:
        console.print_result(to_json(finished.report))
    chosen = (f"{n} {v:g}" for n, v in finished.report["hyperparameters"].items())
    screen.print(*late.display.summary(finished, space.plans[0].settings.metric), sep="\n")
    screen.print(Text(f"settings of the best trial: {', '.join(chosen)}"))
