"""Settings of a search itself, which flags, settings files and programs have. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictBool

from dpmac_cli.accounting.selection import LONGEST
from dpmac_cli.config.fields import Choice, Flag, Option, SomePath, options
from dpmac_cli.config.flags import Flags
from dpmac_cli.config.settings import OUTPUT, OWN_DATA, Count, MeanTrials
from dpmac_cli.data.registry import DATASETS

#: Group of the flags in the help.
SEARCH = "Search"
#: Mean number of trials: of a search over given settings, and of one near the default.
MEAN, MEAN_NEAR = 20, 4
DATASET = Choice(tuple(DATASETS), OWN_DATA, noun="dataset")


class SearchFlags(Flags, frozen=True):
    """Settings of a search itself."""

    trials: Annotated[
        MeanTrials,
        Field(description="Mean number of trials. The number itself is random and secret."),
        Flag(SEARCH, otherwise=f"{MEAN}; without --search {MEAN_NEAR}"),
    ] = MEAN
    most_trials: Annotated[
        Count | None,
        Field(description="Largest number of trials. More cost less privacy, but take longer."),
        Flag(SEARCH, otherwise=f"{LONGEST} times the mean"),
    ] = None
    stop_early: Annotated[
        StrictBool,
        Field(
            description="End with the last trial, for a time that nobody observes: it tells how "
            "many there were."
        ),
        Flag(SEARCH),
    ] = False
    on: Annotated[
        str | None,
        DATASET,
        Field(
            description="Search on this public data instead, and train once on the private records "
            "with the best settings and the whole epsilon."
        ),
        Flag(SEARCH),
    ] = None
    score_on: Annotated[
        str | None,
        DATASET,
        Field(
            description="Choose by exact scores on this public data of the same shape and classes, "
            "instead of covered ones."
        ),
        Flag(SEARCH),
    ] = None
    out: Annotated[
        SomePath, Field(description="Folder of the search, and of the published run."), Flag(OUTPUT)
    ] = Path("runs/tune")


#: Settings of a search by name.
SEARCH_FLAGS: Mapping[str, Option] = options(SearchFlags)
#: Settings to draw: a flag that may be repeated, and a mapping in a file.
DRAWN = Option(
    name="search",
    help="Setting to draw, as a range (lr=1e-4..1e-1:log) or a list (clip-norm=0.1,1,10). Several. "
    "Without any, the learning rate is drawn, within a factor of 2 of its default.",
    default=None,
    flag=Flag(SEARCH, metavar="NAME=VALUES"),
    kind=str,
    several=True,
    limits={},
    choice=None,
    pattern=None,
)
