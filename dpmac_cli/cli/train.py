"""dpmac train: start or resume a run.

A launcher such as torchrun starts one process per rank. Rank 0 validates, prints and handles
signals; the others compute their shares of each step.
"""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import command, stop, stop_request
from dpmac_cli.config.flags import SomePath, is_given
from dpmac_cli.config.settings import SETTINGS, Config, Settings
from dpmac_cli.errors import BUDGET, INTERRUPTED, DpmacError, RunError
from dpmac_cli.files import to_json
from dpmac_cli.training.memory import keep_freed_memory

if TYPE_CHECKING:
    from dpmac_cli.release.run import Run
    from dpmac_cli.training.distributed import Ranks


#: Settings that each machine of a run has for itself.
OF_MACHINE: tuple[str, ...] = ("data_dir", "device")


@command(SETTINGS, not_both={("resume", "config"): "a run has its settings"})
def train(
    *,
    config: Config = None,
    resume: Annotated[
        SomePath | None,
        Field(
            description="Resume the run in this folder with the same settings, or with --out in a "
            "new folder with other settings, such as --epochs. Add --model if it is your own "
            "network."
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Train a model under differential privacy.

    Defaults depend on the dataset. Flags take precedence over --config FILE. A run writes one
    new folder with model.safetensors, model-card.md, report.json, metrics.jsonl and
    config.yaml.

    Example: dpmac train --dataset mnist --sigma 0.8

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 3 privacy budget infeasible or
    spent, 4 the model does not fit or diverged, memory ran out or the device failed, 130
    interrupted (the run so far is written).
    """
    keep_freed_memory()
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        _train(flags, config, resume)
        return
    # If a process dies, torch would show the others' stacks. Read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    ranks = late.distributed.join()
    try:
        if ranks.leads:
            _train(flags, config, resume, ranks)
        else:
            _assist(flags, ranks)
    finally:
        ranks.leave()
    if not ranks.leads:
        os._exit(0)  # a gloo thread may abort a process that exits normally


def _train(
    flags: dict[str, Any],
    config: Path | None,
    run: Path | None,
    ranks: "Ranks | None" = None,
) -> None:
    """Start a run, or resume one, and follow it.

    Args:
        flags: settings as they were typed, by name.
        config: YAML file of settings; None for none.
        run: folder of the run to resume; None to start one.
        ranks: processes of the run; None for one.
    """
    resolved = None
    if run:
        late.folder.check_run_folder(run)
        settings = Settings.model_validate(flags)
    else:
        with console.waiting(flags["quiet"], "settings"):
            resolved = late.resolve.resolve(flags, config)
        settings = resolved.plan.settings
        if not settings.quiet:
            console.print_notes((*resolved.chosen, *resolved.notes))
    quiet, json = settings.quiet, settings.json
    # Importing torch takes seconds, so wait until there is something to train.
    with console.waiting(quiet, "loading torch"):
        display = late.display.RunDisplay(console.for_display(quiet, json))
    with stop_request() as stop_asked, contextlib.closing(display), console.kept_clear(json):
        if resolved:
            events = late.training.train_plan(resolved, stop_asked, ranks=ranks)
        elif run:
            events = late.training.resume_folder(run, settings, stop_asked, ranks=ranks)
        finished = late.display.follow(events, display, stop_asked)
    if json:
        console.print_result(to_json(finished.report))
    _end(finished)


def _end(finished: "Run") -> None:
    """Exit with the code of a run that ended before its last step, and print how to resume it.

    A run that is finished ends nothing here: the function returns.

    Raises:
        Exit: it was interrupted (130), or its budget is spent (3).
    """
    where, so_far = finished.folder, f"the run so far is in {finished.folder}."
    if finished.state == "interrupted":
        stop(f"interrupted; {so_far} To resume: {late.folder.resume_command(where)}", INTERRUPTED)
    if finished.state == "budget-spent":
        longer = late.folder.resume_elsewhere_command(where, ["--max-epsilon MORE"])
        stop(f"epsilon would exceed --max-epsilon; {so_far} To train longer: {longer}", BUDGET)


def _assist(flags: dict[str, Any], ranks: "Ranks") -> None:
    """Run as a rank other than 0. Only rank 0 handles stop requests and prints.

    Args:
        flags: settings as they were typed, of which only those of the machine count.
        ranks: processes of the run.

    Raises:
        RunError: this rank failed; the message names it.
    """
    local = {name: flags[name] for name in OF_MACHINE if is_given(flags[name])}
    with stop_request():
        try:
            late.workers.run_worker(ranks, local)
        except DpmacError as failure:
            raise RunError([f"Rank {ranks.rank}: {error}" for error in failure.errors]) from failure
