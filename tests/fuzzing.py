"""Generated commands, settings files and damaged artifacts, and what must hold of each.

A case is a folder as a person may have it, a few things that happened to it, and a command typed
there. Shared by the test of a few cases and by ``benchmarks/fuzz.py``, which tries thousands.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import hypothesis
import torch
from hypothesis import strategies as st
from typer.testing import CliRunner

from dpmac_cli.cli import compare as compare_command
from dpmac_cli.cli import train as train_command
from dpmac_cli.cli.app import app
from dpmac_cli.config.account import Question
from dpmac_cli.config.fields import flag_name, options
from dpmac_cli.config.settings import Settings
from dpmac_cli.data import loaders as data
from dpmac_cli.data.dataset import Data
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.release import scoring
from dpmac_cli.runs import folder
from dpmac_cli.runs import prepare as preparation
from dpmac_cli.storage.progress import Computing
from dpmac_cli.studies import local as workers
from dpmac_cli.studies.executor import Result
from dpmac_cli.studies.grid import NOT_STUDIED
from dpmac_cli.studies.local import train_run
from tests.digits_runs import contents
from tests.helpers import limits_of

SETTINGS = options(Settings)
#: Exit codes that each command documents, but for 1, which is a bug.
CODES: Mapping[str, frozenset[int]] = {
    "train": frozenset({0, 2, 3, 4, 130}),
    "eval": frozenset({0, 2, 4}),
    "account": frozenset({0, 2, 3}),
    "compare": frozenset({0, 2, 3, 4, 130}),
}
#: Steps after which a run is asked to stop, as by Ctrl-C.
PATIENCE = 12
#: Seconds after which a command counts as hanging.
TOO_LONG = 120
#: What is said of a run that fails on its way: until then nothing may have changed.
BEGUN = "To resume from the last checkpoint"
RUN, STOPPED, STUDY = "run", "stopped", "study"
TABLES = ("compare.json", "compare.csv", "compare.md")
#: Wide enough that no message is broken into lines.
ENVIRONMENT = {"COLUMNS": "4000", "DPMAC_DATA_DIR": "empty", "OMP_NUM_THREADS": "1"}

Tree = dict[str, bytes | None]


@dataclass(frozen=True)
class Damage:
    """Something that happened to an artifact.

    Attributes:
        path: of it.
        kind: a key of :data:`DAMAGES`.
        place: where, as a share of its length.
        other: what it is swapped with or replaced by.
    """

    path: str
    kind: str
    place: float = 0.0
    other: str = ""


@dataclass(frozen=True)
class Case:
    """A command, and the folder in which it is typed.

    Attributes:
        args: after ``dpmac``.
        files: written beside those of :func:`make_world`.
        damages: done to all of them.
    """

    args: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    damages: tuple[Damage, ...] = ()

    @property
    def command(self) -> str:
        """The command's name, or "other"."""
        return next((arg for arg in self.args[:1] if arg in CODES), "other")

    @property
    def typed(self) -> str:
        """As it can be pasted."""
        return shlex.join(("dpmac", *self.args))


@dataclass(frozen=True)
class Outcome:
    """What a command came to. ``code`` is None where it did not end in time."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


# What is in the folder


RUN_FLAGS = "--dataset digits --sigma 6 --steps 4 --seed 1 --checkpoint-every 2 --quiet"
STUDY_FLAGS = "--dataset digits --optimizers dp-sgd,dp-macadam --sigma 6 --steps 2 --seeds 1"


def make_world(where: Path) -> None:
    """A finished run, a stopped one, a study, and what is not a run."""
    where.mkdir()
    with contextlib.chdir(where), quickened():
        for name in ("empty", "foreign"):
            Path(name).mkdir()
        Path("foreign", "thesis.tex").write_text("mine")
        Path("file.txt").write_text("mine")
        Path("good.yaml").write_text("dataset: digits\nsigma: 6\nsteps: 2\n")
        for typed, code in (
            (f"train {RUN_FLAGS} --out {RUN}", 0),
            (f"train {RUN_FLAGS} --steps 40 --optimizer dp-sgd --out {STOPPED}", 130),
            (f"compare {STUDY_FLAGS} --out {STUDY} --quiet", 0),
        ):
            outcome = type_here(shlex.split(typed))
            if outcome.code != code:
                raise RuntimeError(f"dpmac {typed} ended with {outcome}")


def artifacts(tree: Tree) -> list[str]:
    """The files of a world that runs and studies have left."""
    return [
        name
        for name, content in tree.items()
        if content and name.startswith((RUN, STOPPED, STUDY)) and not name.endswith(folder.LOCK)
    ]


def _cut(content: bytes, place: int) -> bytes:
    return content[:place]


def _flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ (1 + place % 255)]) + content[place + 1 :]


def _longer(content: bytes, place: int) -> bytes:
    return content + content[place:]


def _nested(content: bytes, place: int) -> bytes:
    del content
    return b"[" * (1000 + place)


DAMAGES: Mapping[str, Callable[[bytes, int], bytes]] = {
    "cut": _cut,
    "flipped": _flipped,
    "longer": _longer,
    "nested": _nested,
}
#: Damages that are not a matter of bytes.
LOSSES = ("gone", "folder", "swapped", "replaced", "unreadable link")


def inflict(damage: Damage, where: Path) -> None:
    """Do it, if what it is done to is there."""
    path, other = where / damage.path, where / damage.other
    if not path.is_file():
        return
    content = path.read_bytes()
    if damage.kind in DAMAGES:
        place = int(damage.place * max(0, len(content) - 1))
        path.write_bytes(DAMAGES[damage.kind](content, place) if content else b"\0")
    elif damage.kind in ("swapped", "replaced"):
        if other.is_file():
            path.write_bytes(other.read_bytes())
            if damage.kind == "swapped":
                other.write_bytes(content)
    else:
        path.unlink()
        if damage.kind == "folder":
            path.mkdir()
            (path / "inside").write_text("mine")
        if damage.kind == "unreadable link":
            path.symlink_to(path.name)


def prepare(case: Case, world: Path, where: Path) -> None:
    """A world of a case's own."""
    shutil.copytree(world, where)
    for name, content in case.files.items():
        (where / name).write_bytes(content)
    for damage in case.damages:
        inflict(damage, where)


# Typing a command in this process


class Hangs(BaseException):
    """Of no kind that dpmac handles."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises :class:`Hangs` where a block takes longer."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@cache
def _digits() -> Data:
    return data.load_data("digits", Path(), torch.device("cpu"))


def _load_data(name: str, where: Path, device: torch.device, **facts: Any) -> Data:
    """Digits are read once; nothing is downloaded."""
    if name == "digits":
        return _digits()
    return data.load_data(name, where, device, download=False, **facts)


def _loading(
    name: str, where: Path, device: torch.device, **facts: Any
) -> Generator[Computing, None, Data]:
    """The same, where a run is set up."""
    yield from ()
    return _load_data(name, where, device, **facts)


@contextlib.contextmanager
def _stop_soon() -> Iterator[Callable[[], bool]]:
    asked = itertools.count(1)
    yield lambda: next(asked) >= PATIENCE


class InlinePool(workers.Pool):
    """A pool whose runs are trained in this process, one at a time, for a few steps in all."""

    steps = 0

    def __init__(self, configs: Sequence[Any], jobs: int, data: Any) -> None:
        del jobs
        super().__init__(configs, 1, data)

    def train(self, run: Any, stop: threading.Event) -> Result:
        def stopped() -> bool:
            InlinePool.steps += 1
            return stop.is_set() or self.late()

        with contextlib.redirect_stdout(sys.stderr):
            return train_run(run, self.data[run.plan.data.source], stopped)

    @classmethod
    def late(cls) -> bool:
        """Whether the command is asked to stop."""
        return cls.steps >= PATIENCE

    @classmethod
    @contextlib.contextmanager
    def stop_request(cls) -> Iterator[Callable[[], bool]]:
        """What a command looks at between its looks at the runs."""
        cls.steps = 0
        yield cls.late


@contextlib.contextmanager
def quickened() -> Iterator[None]:
    """Commands that take no longer than they must: nobody waits for data, processes or steps."""
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(preparation, "loading", _loading))
        for module in (scoring, workers):
            patched.enter_context(mock.patch.object(module, "load_data", _load_data))
        for command, soon in (
            (train_command, _stop_soon),
            (compare_command, InlinePool.stop_request),
        ):
            patched.enter_context(mock.patch.object(command, "stop_request", soon))
        patched.enter_context(mock.patch.object(workers, "Pool", InlinePool))
        yield


def type_here(args: Sequence[str]) -> Outcome:
    """Type a command in the working folder, in this process; use within :func:`quickened`."""
    began = time.perf_counter()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with time_limit(TOO_LONG):
            result = CliRunner().invoke(app, list(args), env=ENVIRONMENT)
    except Hangs:
        return Outcome(None, "", "", time.perf_counter() - began)
    finally:
        for number, handler in handlers.items():  # workers ignore them
            signal.signal(number, handler)
    stderr = result.stderr
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        stderr += f"Traceback: {result.exception!r}"
    return Outcome(result.exit_code, result.stdout, stderr, time.perf_counter() - began)


# What must hold


def faults(case: Case, outcome: Outcome, before: Tree, after: Tree) -> list[str]:
    """What is wrong with an outcome; nothing if all is as promised."""
    if outcome.code is None:
        return [f"did not end within {TOO_LONG} seconds"]
    found = []
    if outcome.code not in CODES.get(case.command, {0, 2}):
        found.append(f"exit code {outcome.code}")
    if "Traceback" in outcome.stdout + outcome.stderr and "--debug" not in case.args:
        found.append("a traceback")
    said = outcome.stderr if case.args else outcome.stdout  # a bare "dpmac" shows its help
    if outcome.code not in (0, 130) and not said.strip():
        found.append("no message")
    if outcome.code == 2 and not _names_something(case, said):
        found.append("a message that names neither flag nor file")
    changed = {name for name in before | after if before.get(name, 0) != after.get(name, 0)}
    changed -= {name for name in changed if _incidental(name, case, after)}
    if outcome.code == 2 and changed and not _begun(case, outcome):
        found.append(f"refused, and yet changed {sorted(changed)}")
    places = _may_write(case)
    if outside := [name for name in changed if not _below(name, places)]:
        found.append(f"wrote outside {sorted(places)}: {sorted(outside)}")
    ended = outcome.code in (0, 130)
    replaced = ended and {"--resume", "--force"} & set(case.args)
    if not replaced and (lost := _lost(case, before, after)):
        found.append(f"lost {lost}")
    if case.command == "eval" and outcome.code == 0:
        found += _scored_damage(case, before)
    if "--json" in case.args and outcome.code == 0 and "--help" not in case.args:
        found += _not_json(outcome.stdout)
    return found


def _names_something(case: Case, stderr: str) -> bool:
    known = (*case.args, *case.files, *(damage.path for damage in case.damages), "COMMAND", "RUN")
    known += (".",) if "" in case.args else ()  # as paths are written
    # As stderr writes what is no text: \udcff.
    written = [word.encode("utf-8", "backslashreplace").decode() for word in known]
    return bool(re.search(r"--?\w", stderr)) or any(word and word in stderr for word in written)


def _incidental(name: str, case: Case, after: Tree) -> bool:
    """What may come with any command: locks, and folders made for data that were not to be had."""
    where = given(case, "--data-dir") or ENVIRONMENT["DPMAC_DATA_DIR"]
    made = after.get(name, b"") is None and _below(name, {where})
    return made or name.endswith(folder.LOCK)


def _begun(case: Case, outcome: Outcome) -> bool:
    """Whether a run was under way, or met a folder where a table or a checkpoint is to be."""
    folders = [damage.path for damage in case.damages if damage.kind == "folder"]
    return BEGUN in outcome.stderr or any(
        f"/{folder.CHECKPOINTS}/" in path or Path(path).name in (*TABLES, folder.SUMS)
        for path in folders
    )


def given(case: Case, flag: str) -> str | None:
    """The value of a flag, the last one counting."""
    values = [
        after if arg == flag else arg.removeprefix(f"{flag}=")
        for arg, after in itertools.zip_longest(case.args, case.args[1:], fillvalue="")
        if arg == flag or arg.startswith(f"{flag}=")
    ]
    return values[-1] if values else None


def _may_write(case: Case) -> set[str]:
    """Where a command may write, as it was asked to."""
    if case.command == "train":
        return {given(case, "--resume") or given(case, "--out") or "runs"}
    if case.command == "compare" and "--dry-run" not in case.args:
        return {given(case, "--out") or "runs"}
    return set()


def _below(name: str, places: set[str]) -> bool:
    """Whether a file is one of some places or inside, or one of the folders that lead there."""
    normal = [os.path.normpath(place) for place in places]
    return any(name == place or name.startswith(f"{place}/") for place in normal) or any(
        place.startswith(f"{name}/") for place in normal
    )


def _lost(case: Case, before: Tree, after: Tree) -> list[str]:
    """Files whose contents are nowhere any more, nor the beginning of what they are now.

    Checkpoints give way to newer ones, checksums and settings go with what they are of, tables are
    made anew, and a run that was damaged is, too.
    """
    kept = {content for content in after.values() if content}
    tables = {f"{STUDY}/{table}" for table in TABLES} if case.command == "compare" else set()
    damaged = {str(Path(damage.path).parent) for damage in case.damages}
    damaged |= {str(Path(damage.other).parent) for damage in case.damages if damage.other}
    return [
        name
        for name, content in before.items()
        if content
        and content not in kept
        and not (after.get(name) or b"").startswith(content)
        and not name.endswith((folder.SUMS, folder.CONFIG))
        and not (case.command == "compare" and _below(name, damaged) and name.startswith(STUDY))
        and name not in tables
        and f"{folder.CHECKPOINTS}/step-" not in name
    ]


def _scored_damage(case: Case, before: Tree) -> list[str]:
    """A model that was damaged in any way must not be scored."""
    touched = {damage.path for damage in case.damages if damage.kind in DAMAGES}
    models = {f"{arg}/{folder.MODEL}" for arg in case.args} | set(case.args)
    return [f"scored {name}, which is damaged" for name in sorted(models & touched & set(before))]


def _not_json(text: str) -> list[str]:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError as failure:
        return [f"stdout is not JSON ({failure})"]
    return []


# What people type

#: Values that are wrong for almost every flag, or nearly right.
ODD = (
    *("", " ", "-", "--", "0", "-0", "-1", "0.5", "1.", "1e3", "nan", "inf", "-inf", "1e400"),
    *("1e-400", "9" * 400, "0x10", "1_000", "١٢", "½", "１", "1,5", ",", "1,,2", "1, 2", "1;2"),
    *("é", "🙂", "a\nb", "\t", "\x1b[31mred", "[bold]x[/bold]", "[/]", "%s", "{}", "{0}", "\\"),
    *("'", '"', "true", "null", "none", "~", ".", "..", "/", "*", "a" * 300, "-h", "\u202eab"),
    *(
        "digits ",
        "Digits",
        "dp-sgd,adaclip",
        "60S",
        "0s",
        "999999999s",
        "1e9s",
        "cuda:999",
        "cpu:0",
    ),
    *("file.txt", "empty", "foreign", RUN, STOPPED, STUDY, "nowhere/deep", "\udcff", "--sigma"),
)
odd = st.sampled_from(ODD) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=8
)

#: Where runs may be sought and put.
PLACES = (
    *(RUN, STOPPED, STUDY, "new", "new/deep", "empty", "foreign", "file.txt", "file.txt/run"),
    *("nowhere", "", ".", f"{RUN}/../new", f"{RUN}/checkpoint", f"{STUDY}/runs", f"./{RUN}/"),
    *(f"{RUN}/{folder.MODEL}", f"{RUN}/{folder.REPORT}", f"{STOPPED}/{folder.CONFIG}"),
    *("a" * 300, "[bold]new[/bold]", "new 🙂", "good.yaml", "\udcff"),
)
places = st.sampled_from(PLACES)
#: Values in order, of settings whose bounds do not say it all: cheap to train and to price.
RIGHT: Mapping[str, Sequence[str]] = {
    "dataset": ("digits",) * 6 + tuple(DATASETS),
    "epochs": ("1", "2"),
    "steps": ("1", "2", "3"),
    "batch_size": ("1", "64", "128", "1437"),
    "sigma": ("0.5", "1", "6", "10000"),
    "epsilon": ("0.5", "3", "1000"),
    "max_epsilon": ("0.01", "1", "1e9"),
    "delta": ("1e-5", "1e-9", "1e-13", "1e-20", "0.1", "1e-300"),
    "lr": ("1e-10", "0.001", "1", "1e10"),
    "seed": ("0", "7", "9223372036854775808"),
    "physical_batch": ("1", "64", "1024"),
    "data_dir": ("empty", "nowhere"),
    "checkpoint_every": ("1", "100", "0s", "0.5s", "60s"),
    "device": ("cpu", "auto"),
}


def _beyond(name: str) -> Sequence[str]:
    """Values at the ends of a setting's bounds, and beyond."""
    if name in ("epochs", "steps"):
        return ()
    ends = (float(limit) for _, limit in limits_of(name))
    return [f"{end * share:g}" for end in ends for share in (0.99, 1, 1.01)]


def right(name: str) -> st.SearchStrategy[str]:
    """A value that a setting may have."""
    if name in RIGHT:
        return st.sampled_from(RIGHT[name])
    if SETTINGS[name].choices:
        return st.sampled_from(SETTINGS[name].choices)
    return st.sampled_from(("1e-8", "0.5", "0.9", "1"))


def wrong(name: str) -> st.SearchStrategy[str]:
    """A value that a setting may hardly have."""
    return st.sampled_from(_beyond(name)) | odd if _beyond(name) else odd


def _flag(name: str, value: str | bool, joined: bool = False) -> tuple[str, ...]:
    flag = f"--{flag_name(name)}"
    if isinstance(value, bool):
        return (flag,)
    return (f"{flag}={value}",) if joined else (flag, value)


TRAINABLE = [name for name in SETTINGS if name not in ("out", "dataset")]
STUDIED = [name for name in TRAINABLE if name not in NOT_STUDIED]
UNKNOWN = ("--sigm", "--verbose", "-v", "--no-json", "extra", "--seed=", "--", "---", "--é", "-")


@st.composite
def settings_of(
    draw: st.DrawFn, names: Sequence[str], several: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Some settings, most of them right; each as it is typed."""
    typed = []
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        if SETTINGS[name].kind is bool:
            typed.append(_flag(name, True))
            continue
        one = draw(right(name))
        if several and draw(st.booleans()):
            one = ",".join((one, draw(right(name))))
        typed.append(_flag(name, one, draw(st.booleans())))
    for name in draw(st.lists(st.sampled_from(names), max_size=2) | st.just([])):
        if SETTINGS[name].kind is not bool:
            typed.append(_flag(name, draw(wrong(name)), draw(st.booleans())))
    return tuple(typed)


@st.composite
def lines(
    draw: st.DrawFn, command: str, *parts: st.SearchStrategy[tuple[tuple[str, ...], ...]]
) -> tuple[str, ...]:
    """A command line: flags in any order, now and then one that does not exist."""
    typed = [flag for part in parts for flag in draw(part)]
    if draw(st.integers(0, 9)) == 0:
        typed.append((draw(st.sampled_from(UNKNOWN)),))
    if draw(st.integers(0, 19)) == 0:
        typed.append((draw(st.sampled_from(("--help", "--debug"))),))
    args = [command, *itertools.chain(*draw(st.permutations(typed)))]
    if draw(st.integers(0, 19)) == 0:  # a flag without its value, or half a line
        args = args[: draw(st.integers(0, len(args)))]
    return tuple(args)


def maybe(flag: str, values: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[Any, ...]]:
    """A flag and a value, or nothing."""
    return st.just(()) | st.tuples(st.tuples(st.just(flag), values))


def switches(*flags: str) -> st.SearchStrategy[tuple[Any, ...]]:
    """Some flags without values."""
    return st.lists(st.sampled_from(flags), max_size=2).map(lambda some: tuple((f,) for f in some))


SHORT = (("--dataset", "digits"), ("--steps", "2"), ("--sigma", "6"))
short: st.SearchStrategy[Any] = st.sampled_from((SHORT, SHORT, SHORT[:2], SHORT[:1], ()))
train_lines = lines(
    "train", short, settings_of(TRAINABLE), maybe("--out", places), switches("--force", "--json")
)
resume_lines = lines(
    "train",
    st.tuples(st.tuples(st.just("--resume"), st.sampled_from((RUN, STOPPED)) | places)),
    settings_of(TRAINABLE),
    switches("--json", "--quiet", "--force"),
)
fork_lines = lines(
    "train",
    st.tuples(st.tuples(st.just("--fork"), st.sampled_from((RUN, STOPPED)) | places)),
    settings_of(TRAINABLE),
    maybe("--out", places),
    switches("--json", "--quiet", "--force"),
)
eval_lines = lines(
    "eval",
    st.tuples(st.tuples(places)),
    maybe("--dataset", st.sampled_from((*DATASETS, "mnits")) | odd),
    maybe("--data-dir", places | odd),
    maybe("--device", st.sampled_from(("cpu", "cuda:7", "tpu")) | odd),
    switches("--json"),
)
compare_lines = lines(
    "compare",
    st.just(SHORT[:2]),
    maybe("--sigma", st.sampled_from(("6", "6,7", "0.5,6", "6,6", "6,x", "6,", ",", "0"))),
    maybe("--optimizers", st.sampled_from(("dp-sgd", "all", "dp-sgd,dp-macadam", "x")) | odd),
    maybe("--seeds", st.sampled_from(("1", "2", "3,3", "0", "-1", "1001", "1,-2", "1e9")) | odd),
    maybe("--jobs", st.sampled_from(("1", "2", "0", "-1", "1025", "9" * 30)) | odd),
    settings_of(STUDIED, several=True),
    maybe("--out", places),
    switches("--json", "--quiet", "--dry-run"),
)

PRICED: Mapping[str, Sequence[str]] = {
    "dataset": ("digits", "mnist", "cifar10", "mnits"),
    "model": ("linear", "mlp", "cnn", "mpl"),
    "recipe": ("paper", "best", "bset"),
    "dataset-size": ("1", "1000", "60000", "1000000000", "0"),
    "batch-size": ("1", "100", "1000", "1000000000", "0"),
    "epochs": ("0", "1", "5", "1,2", "10000001"),
    "steps": ("0", "1", "100", "1,10,100", "10000000"),
    "sigma": ("0", "0.01", "0.5", "1", "6", "10000", "0.5,1", "10001", "0.005"),
    "epsilon": ("1e-9", "0.1", "1", "1,3", "1e9", "0"),
    "delta": ("1e-5", "1e-13", "1e-15", "1e-20", "1e-300", "0.5", "0.999999", "1", "1e-400"),
    "sampler": options(Question)["sampler"].choices,
    "accountant": options(Question)["accountant"].choices,
}
assert PRICED.keys() == set(map(flag_name, options(Question)))


@st.composite
def priced(draw: st.DrawFn) -> tuple[tuple[str, ...], ...]:
    """Some flags of ``account``."""
    names = draw(st.lists(st.sampled_from(sorted(PRICED)), max_size=5, unique=True))
    typed = [(f"--{name}", draw(st.sampled_from(PRICED[name]))) for name in names]
    for name in draw(st.lists(st.sampled_from(sorted(PRICED)), max_size=1)):
        typed.append((f"--{name}", draw(odd)))
    return tuple(typed)


account_lines = lines(
    "account",
    priced(),
    st.just(()) | st.just(()) | st.tuples(st.tuples(places)),
    switches("--json"),
)
other_lines = st.lists(odd | st.sampled_from(("--version", "--help", "trian", "Eval")), max_size=3)

# What files may hold

KEYS = (*map(flag_name, SETTINGS), "optimizers", "seeds", "Sigma", "sigm", "", "é", "<<", "out ")
NODES = (
    *(
        "6",
        "0.8",
        "digits",
        "1e-5",
        "010",
        "1:30",
        "0o17",
        "0b1",
        ".nan",
        ".inf",
        "1e999",
        "9" * 99,
    ),
    *("null", "~", "true", "no", "'6'", '"6"', "[6, 7]", "[]", "[[6]]", "{a: 1}", "2026-01-01"),
    *("&a 6", "*a", "&b [*b]", "!!float 6", "!!python/object/apply:os.getcwd []", "!x 6"),
    *("|\n  6\n", ">\n  6", "? 6", "6 # why", "[6", "@", "`", "%", "🙂", "[6, [7]]", "[null]"),
)
RAW = (
    *(b"", b"\n", b"null", b"---\n...\n", b"sigma: 6\n---\nsigma: 7\n", b"- 1\n- 2\n", b"6"),
    *(b"[" * 3000, b"{a: " * 2000, b"sigma:\n\t- 6", b"\xff\xfes\x00", b"\xef\xbb\xbfsigma: 6\n"),
    *(bytes(range(256)), b"\0" * 100, b"sigma: 6\r\nsteps: 2\r\n", b"\x85", b"? [a]\n: 6\n"),
    *("sigma: 6".encode("utf-16"), "sigma: é".encode("latin-1"), b"sigma: 6\nsigma: 7\n"),
    b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nsigma: *c\n",
    b"base: &base {sigma: 6}\n<<: *base\n",
    b"%YAML 9.9\n---\nsigma: 6\n",
    b"sigma: " + b"9" * 5000,
    b"x" * 100_000,
)


@st.composite
def settings_files(draw: st.DrawFn) -> bytes:
    """A YAML file, right or wrong."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(RAW) | st.binary(max_size=20))
    entries = draw(
        st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(NODES) | odd), max_size=4)
    )
    text = "".join(f"{key}: {node}\n" for key, node in entries)
    head = draw(st.sampled_from(("dataset: digits\nsteps: 2\n", "")))
    return (head + text).encode("utf-8", "surrogatepass")


@st.composite
def with_settings_file(draw: st.DrawFn) -> Case:
    """A command that is given a YAML file."""
    typed = ("--config", "given.yaml")
    line = lines("train", st.just((*SHORT[1:2], typed)), switches("--json"))
    study = lines("compare", st.just((SHORT[0], typed, ("--seeds", "1"))), switches("--dry-run"))
    files = {"given.yaml": draw(settings_files())}
    return Case(draw(line | line | study), files)


@st.composite
def with_damage(draw: st.DrawFn, paths: Sequence[str]) -> Case:
    """A command that meets what has been damaged."""
    path = draw(st.sampled_from(paths))
    kinds = st.sampled_from((*DAMAGES, *LOSSES))
    damages = [
        Damage(path, draw(kinds), draw(st.floats(0, 1)), draw(st.sampled_from(paths)))
        for path in (path, *draw(st.lists(st.sampled_from(paths), max_size=1)))
    ]
    where = path.split("/", 1)[0]
    if where == STUDY:
        study = (*shlex.split(f"compare {STUDY_FLAGS} --out"), STUDY)
        return Case((*study, *draw(st.sampled_from(((), ("--json",))))), {}, tuple(damages))
    commands = (
        ("eval", where),
        ("eval", path),
        ("account", where),
        ("account", path),
        ("train", "--resume", where),
        ("train", "--resume", where, "--lr", "0.01"),
        ("train", "--fork", where, "--steps", "6", "--json", "--out", "new"),
        ("train", *shlex.split(RUN_FLAGS), "--out", where, "--force"),
        ("train", "--config", f"{where}/{folder.CONFIG}", "--steps", "2"),
    )
    return Case(draw(st.sampled_from(commands)), {}, tuple(damages))


def cases(paths: Sequence[str]) -> st.SearchStrategy[Case]:
    """Everything that can be tried.

    Args:
        paths: see :func:`artifacts`.
    """
    typed = (train_lines, resume_lines, fork_lines, eval_lines, account_lines, compare_lines)
    return st.one_of(
        *(line.map(Case) for line in typed),
        other_lines.map(lambda args: Case(tuple(args))),
        with_settings_file(),
        with_damage(paths),
        with_damage(paths),
    )


def generate(attempt: Callable[[Case], None], world: Path, count: int, seed: int) -> None:
    """Hand out so many cases, the same ones for the same seed."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(cases(artifacts(contents(world))))
    def each(case: Case) -> None:
        attempt(case)

    each()


def attempt_in(
    where: Path, world: Path, case: Case, typed: Callable[[Sequence[str]], Outcome] = type_here
) -> tuple[Outcome, list[str]]:
    """Try a case in a new folder: what it came to, and what is wrong with that.

    Args:
        where: the folder.
        world: see :func:`make_world`.
        case: to try.
        typed: types a command in the working folder; by default in this process, for which
            :func:`quickened` is wanted.
    """
    prepare(case, world, where)
    before = contents(where)
    with contextlib.chdir(where):
        outcome = typed(case.args)
    return outcome, faults(case, outcome, before, contents(where))
