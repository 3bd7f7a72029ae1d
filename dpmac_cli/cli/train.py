"""dpmac train: start, resume or fork a run."""

import contextlib
import os
from typing import TYPE_CHECKING, Any

from dpmac_cli.cli import console
from dpmac_cli.cli.failures import stop, stop_request
from dpmac_cli.cli.options import with_options
from dpmac_cli.config.given import parse
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.errors import BUDGET, INTERRUPTED, DpmacError, InputError, RunError
from dpmac_cli.runs.folder import check_run_folder, fork_command, resume_command
from dpmac_cli.runs.memory import keep_freed_memory
from dpmac_cli.storage.files import to_json

if TYPE_CHECKING:
    from dpmac_cli.training.distributed import Ranks


@with_options("train", settings=SETTINGS)
def train(**flags: Any) -> None:
    """Run the command; ``flags`` are settings, ``config``, ``resume`` and ``fork``."""
    keep_freed_memory()
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        _train(flags, None)
        return
    # If a process dies, torch would show the others' stacks. Read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from dpmac_cli.training.distributed import join  # noqa: PLC0415  (loads torch)

    ranks = join()
    try:
        (_train if ranks.leads else _assist)(flags, ranks)
    finally:
        ranks.leave()
    if not ranks.leads:
        os._exit(0)  # a gloo thread may abort a process that exits normally


def _train(flags: dict[str, Any], ranks: "Ranks | None") -> None:
    file, resumed, forked = (flags.pop(name) for name in ("config", "resume", "fork"))
    quiet, json = flags["quiet"], flags["json"]
    resolved = None
    if resumed and forked:
        raise InputError("--resume and --fork contradict each other: give one.")
    if resumed or forked:
        way = "--resume" if resumed else "--fork"
        if file:
            raise InputError(f"{way} uses the settings of the run: leave out --config.")
        check_run_folder(resumed or forked, way)
        parse(flags)
    else:
        with console.waiting(quiet, "settings"):
            resolved = resolve(flags, file)
        quiet, json = resolved.plan.quiet, resolved.plan.json
        if not quiet:
            console.print_notes(resolved.notes)
    # Importing torch takes seconds, so wait until there is something to train.
    with console.waiting(quiet, "loading torch"):
        from dpmac_cli.cli.display import Display, follow  # noqa: PLC0415  (loads torch)
        from dpmac_cli.runs.train import fork, resume, train  # noqa: PLC0415  (loads torch)

    display = Display(console.for_display(quiet, json))
    with stop_request() as asked, contextlib.closing(display), console.kept_clear(json):
        if resolved:
            events = train(resolved.plan, asked, ranks=ranks)
        elif resumed:
            events = resume(resumed, flags, asked, ranks=ranks)
        else:
            events = fork(forked, flags, asked, ranks=ranks)
        finished = follow(events, display, asked)
    if json:
        console.print_result(to_json(finished.report))
    where, kept = finished.folder, f"the run so far is in {finished.folder}."
    if finished.state == "interrupted":
        stop(f"interrupted; {kept} To resume: {resume_command(where)}", INTERRUPTED)
    if finished.state == "budget-spent":
        more = fork_command(where, ["--max-epsilon MORE"])
        stop(f"epsilon would exceed --max-epsilon; {kept} To train longer: {more}", BUDGET)


def _assist(flags: dict[str, Any], ranks: "Ranks") -> None:
    """Run as a rank other than 0. Only rank 0 handles stop requests and prints."""
    from dpmac_cli.runs.assist import assist  # noqa: PLC0415  (loads torch)

    with stop_request():
        try:
            assist(ranks, {name: flags[name] for name in ("data_dir", "device")})
        except DpmacError as failure:
            raise RunError(f"Rank {ranks.rank}: {failure}") from failure
