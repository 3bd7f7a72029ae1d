"""Score a published model on a test split, and predict the targets of new, unlabelled records."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmac_cli.config.facts import (
    NONE_LEFT_OUT,
    TABLES,
    DataFacts,
    InMemoryData,
    LeftOut,
    complaints,
    left_out,
    refuse,
)
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.data.array_file import channels_first, inputs_of, read_npz
from dpmac_cli.data.class_folders import is_hidden
from dpmac_cli.data.image_folder import GREY, SUFFIXES, decode, looked_at, size_of, usable_cores
from dpmac_cli.data.in_memory import as_array
from dpmac_cli.data.table import read_inputs
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.data.text_folder import SUFFIX, read_new_files
from dpmac_cli.data.texts import read_arrays
from dpmac_cli.errors import InputError, ModelError, raise_errors
from dpmac_cli.files import PRIVATE_MODE, data_folder, to_csv, write_atomically
from dpmac_cli.models.build import Network
from dpmac_cli.models.dataset import Data, standardisation
from dpmac_cli.models.loaders import load_data
from dpmac_cli.progress import report
from dpmac_cli.release.model_file import Released, load_model
from dpmac_cli.release.report import Facts
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.folder import CONFIG
from dpmac_cli.runs.resolve import read_facts, settings_of_data
from dpmac_cli.tasks.task import Task
from dpmac_cli.training.evaluation import Evaluation, evaluate, outputs, places

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Scored:
    """Results of a model file on every test sample.

    ``covered``: its run released scores with noise. ``held_out``: there was no test set.
    """

    result: Evaluation
    dataset: str
    path: Path
    covered: bool = False
    held_out: bool = False


def score(
    path: Path | str,
    dataset: str | InMemoryData | None = None,
    data_dir: Path | str | None = None,
    device: str = "auto",
    factory: str | None = None,
    network: Network | None = None,
) -> Scored:
    """Score a published model on the whole test split.

    Args:
        path: a run folder or a model file.
        dataset: a name, the path of your own data, or records in memory; None for the dataset it
            was trained on.
        data_dir: folder of datasets; None for DPMAC_DATA_DIR or the cache.
        device: see ``--device``.
        factory: ``FILE.py:FACTORY`` of a user-supplied model.
        network: instead, a network of the program: see :func:`load_model`.

    Raises:
        InputError: a file is missing or damaged.
        ModelError: the model does not fit the dataset.
    """
    where = choose_device(device)
    released = load_model(path, where, factory=factory, network=network)
    file, facts = released.path, released.header
    below, chosen = _settings_of_data(released, {"dataset": dataset, "data_dir": data_dir})
    known = _facts_of_data(released, below, chosen)
    if known.shape != facts.input.shape:
        raise ModelError(
            f"{file} does not fit {known.name}: it takes records of shape "
            f"{facts.input.shape}, but those of the dataset have {known.shape}."
        )
    fits = known.source is None and known.task.outputs == facts.task.outputs
    if known.task != facts.task and not fits:
        raise ModelError(
            f"{known.typed} has {known.task.summary}, but {file} was trained on "
            f"{facts.task.summary}."
        )
    data = load_data(known.chosen, data_folder(chosen.data_dir), where, found=known)
    return Scored(
        result=_evaluated(released.model, facts, data),
        dataset=known.name,
        path=file,
        covered=facts.privacy.covered_scores is not None,
        held_out=known.held_out,
    )


def _evaluated(model: nn.Module, facts: Facts, data: Data) -> Evaluation:
    """Evaluate a model on test records, read as those that it was trained on."""
    device = data.gain.device
    gain, offset = standardisation(*facts.input.constants, device)
    data = replace(data, gain=gain, offset=offset).shaped(facts.input.record)
    return evaluate(model, data, data.test)


def _settings_of_data(released: Released, given: dict[str, Any]) -> tuple[Path | None, Settings]:
    """Return the config.yaml beside a model, if it is of your own data, and settings of the data.

    Raises InputError.
    """
    file, known = released.path, released.header.dataset
    beside = file.parent / CONFIG
    # A run's config.yaml records how your own data was read and split.
    below = beside if known.own and beside.is_file() else None
    if below is None and given["dataset"] is None:
        if known.own:
            raise InputError(
                f"{file} was trained on your own data, {known.name}. Set {{dataset}} to its path."
            )
        given = {**given, "dataset": known.name}
    return below, settings_of_data(given, below)


def _facts_of_data(released: Released, below: Path | None, chosen: Settings) -> DataFacts:
    """Read the data to score on, and return its facts. Raises InputError and ModelError."""
    file, known = released.path, released.header.dataset
    schema = None if known.table is None else schema_of(known.table, f"{file}: its schema")
    facts = read_facts(chosen, released.reader, schema)
    if schema is not None and facts.schema is not None and facts.schema.columns != schema.columns:
        raise ModelError(
            f"{facts.typed} has a schema with other columns than the one that {file} was trained "
            "with. Pass that schema to from_dataframe."
        )
    if below is None and facts.held_out:
        raise InputError(
            f"{facts.typed} has no test set, and the split is only recorded in the {CONFIG} of "
            "the run. Use the run's folder, or data with a test set."
        )
    return facts


#: What to do about records that cannot be used, and about files that are no records.
REMEDY = " Correct or remove them, or add {skip_bad} to leave them out."
REMOVE = " Remove such files, or add {skip_bad} to leave them out."


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Records without labels.

    Attributes:
        path: where they are; for records in memory "the array", which messages name instead.
        names: file names relative to their folder, or rows from 0.
        at: reads some of them as inputs before standardisation. Those that cannot be read are
            zeros, and ``faults`` then says why.
        ids: what names the records in a table; None without it.
        faults: why records cannot be used, by their place in ``names``.
        skipped: records and files that are not among ``names``.
    """

    path: Path
    names: Sequence[str] | Sequence[int]
    at: Callable[[slice], NDArray[Any]]
    ids: Sequence[str] | None = None
    faults: dict[int, str] = field(default_factory=dict)
    skipped: LeftOut = NONE_LEFT_OUT


def read_unlabelled(
    data: Path | str | NDArray[Any] | Sequence[str],
    released: Released,
    *,
    skip_bad: bool,
    id_column: str | None,
) -> Unlabelled:
    """Return new records for a model. Raises InputError.

    ``skip_bad`` leaves out unusable records. ``id_column`` is the column of a table to keep beside
    each record; by default ``id``, if there is one.
    """
    path, kind = Path("the array"), ".npz"
    if isinstance(data, Path | str):
        path = Path(data)
        kind = path.suffix if os.path.exists(path) else ""  # of a text, Path.exists may raise
        kind = "folder" if os.path.isdir(path) else kind
    raise_errors(_misfits(path, kind, released, id_column))
    facts, reader = released.header, released.reader
    if facts.dataset.table is not None:
        schema = schema_of(facts.dataset.table, f"{path}: the schema of the model")
        found = read_inputs(path, schema, reader, id_column, skip_bad)
        at = _arrays(found.inputs, path, facts)
        return Unlabelled(path, found.rows, at, found.ids, skipped=found.skipped)
    settings: Mapping[str, Any] = {}
    with suppress(*folder.BROKEN):
        settings = folder.settings(released.path.parent)
    if kind == "folder":
        return _files(path, facts, settings, reader)
    given = {
        "x": read_npz(path, ("x",))["x"] if isinstance(data, Path | str) else as_array(data, "x")
    }
    read_arrays(given, reader, str(path))
    at = _arrays(given["x"], path, facts)
    return Unlabelled(path, range(len(given["x"])), at)


def _misfits(path: Path, kind: str, released: Released, id_column: str | None) -> Iterator[str]:
    """Yield why new records cannot be those for a model."""
    file, facts, reader = released.path, released.header, released.reader
    kinds, wanted = {"folder", ".npz"}, "images: use a folder of images or an .npz"
    if facts.dataset.table is not None:
        kinds, wanted = {*TABLES}, f"a table: use one ({', '.join(TABLES)})"
    elif reader is not None:
        wanted = f"texts: use a folder of texts ({SUFFIX}), or an .npz of texts"
    elif facts.input.levels == 1:
        kinds, wanted = {".npz"}, "rows of numbers: use an .npz"
    if not os.path.exists(path) and kind != ".npz":
        # It may be a text, which no message shows.
        texts = "There is no such file or folder. Pass texts as a list, such as [text]."
        yield f"{path} does not exist." if reader is None else texts
    elif kind not in kinds:
        yield f"{path} does not fit {file}, which was trained on {wanted}."
    if id_column is not None and facts.dataset.table is None:
        yield f"{{id=}}{id_column} names a column, but {file} was not trained on a table."


def _files(
    root: Path,
    facts: Facts,
    settings: Mapping[str, Any],
    reader: TextReader | None,
) -> Unlabelled:
    """Return the images or texts in a folder and below it."""
    suffixes, what = (SUFFIXES, "an image") if reader is None else ((SUFFIX,), "a file of text")
    below = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    names = sorted(str(name) for name in below if not any(map(is_hidden, name.parts)))
    strange = [name for name in names if not name.lower().endswith(suffixes)]
    skipped = [f"{root / name} is not {what}" for name in strange]
    names = [name for name in names if name.lower().endswith(suffixes)]
    if reader is None:
        at, faults = _images(root, names, facts, settings)
    else:
        x, faults = read_new_files(root, names, reader)
        at = _arrays(x, root, facts)
    return Unlabelled(root, names, at, faults=faults, skipped=left_out(skipped))


def _images(
    root: Path, names: Sequence[str], facts: Facts, settings: Mapping[str, Any]
) -> tuple[Callable[[slice], NDArray[np.uint8]], dict[int, str]]:
    """Return a function that decodes images, and faults that it fills."""
    (channels, height, width), faults = facts.input.shape, dict[int, str]()

    def look(opened: "Image") -> NDArray[np.uint8] | str:
        wide, high = size_of(opened)
        if "image_size" not in settings and (wide, high) != (width, height):
            found = f"{high}x{wide}"
            return f"has {found} pixels, but the model needs {height}x{width}"
        grey = opened.mode.partition(";")[0] in GREY
        if channels == 1 and not grey and "channels" not in settings:
            return "has colours, but the model needs grey images"
        return decode(opened, facts.input.shape, settings.get("levels"))

    def at(some: slice) -> NDArray[np.uint8]:
        with ThreadPoolExecutor(usable_cores()) as pool:
            seen = list(pool.map(lambda name: looked_at(str(root / name), look), names[some]))
        for row, fault in enumerate(seen, some.start or 0):
            if isinstance(fault, str):
                faults[row] = f"{root / names[row]} {fault}"
        blank = np.zeros(facts.input.shape, np.uint8)
        return np.stack([blank if isinstance(image, str) else image for image in seen])

    return at, faults


def _arrays(x: NDArray[Any], path: Path, facts: Facts) -> Callable[[slice], NDArray[Any]]:
    """Return a function that reads images or rows of numbers.

    Raises InputError if they do not fit the model.
    """
    known = facts.input
    images, table = known.levels > 1, known.shape[1:] == (1, 1)
    shape = channels_first(x[:1]).shape[1:] if x.ndim in ((3, 4) if images else (2, 3, 4)) else ()
    sides = "channels: {}, height: {}, width: {}".format(*known.shape)
    if images:
        wanted = f"images as uint8, with {sides}"
        fits = shape == known.shape and x.dtype == np.uint8
    else:
        wanted = f"rows of {known.shape[0]} numbers" if table else f"floats, {sides}"
        fits = shape == known.shape and x.dtype.kind in ("fiu" if x.ndim == 2 else "f")
        if fits and not np.isfinite(x).all():
            wanted, fits = "finite", False
    if not fits:
        raise InputError(f"{path}: x must be {wanted}, not {x.dtype} of shape {x.shape}.")
    middle, half = np.array([known.mean, known.std])
    ends = None if images else np.stack([middle - half, middle + half])
    return lambda some: inputs_of(x[some], ends)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of a model for new records.

    Attributes:
        answers: what the network's outputs mean, float32, shape (records, outputs): probabilities
            of classes, or numbers on the scale of their targets. NaN if an output contains NaN.
        task: what is predicted.
        records: names of records: file names relative to the folder of images, or rows from 0.
        ids: values of a table's column ``id``, or of another that was named; None without one.
        skipped: records that are left out, and why.
        texts: how a language model continues each record; None for other models.
    """

    answers: NDArray[np.float32]
    task: Task
    records: Sequence[str] | Sequence[int]
    ids: Sequence[str] | None = None
    skipped: LeftOut = NONE_LEFT_OUT
    texts: Sequence[str] | None = None

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """Answers, by a name that fits classes: float32, shape (records, classes)."""
        return self.answers

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes or of the target, in the order of the columns."""
        return self.task.names

    @property
    def unanswered(self) -> int:
        """Number of records for which the network's output contains NaN."""
        return int(np.isnan(self.answers).any(1).sum())

    @property
    def predicted(self) -> Sequence[Any]:
        """Prediction for each record, as ``dpmac predict`` writes it.

        The name of the most probable class, "" if the output contains NaN; a number, NaN if the
        output is; or how a text continues.
        """
        return self._columns["predicted"]

    @property
    def _columns(self) -> dict[str, Sequence[Any]]:
        texts = {} if self.texts is None else {"predicted": self.texts}
        return texts | self.task.columns(self.answers)

    def write(self, path: Path) -> None:
        """Write a .csv that only its owner can read. Raises OSError."""
        columns: dict[str, Sequence[Any]] = {} if self.ids is None else {"id": self.ids}
        columns |= self._columns
        if isinstance(self.records[0], int):
            columns = {"row": self.records, **columns}
        else:  # names that are not UTF-8 are escaped
            names = [
                os.fsencode(n).decode(errors="backslashreplace") for n in map(str, self.records)
            ]
            columns = {"file": names, **columns}
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        known = ({n: v for n, v in row.items() if v == v} for row in rows)  # noqa: PLR0124  (NaN)
        write_atomically(path, to_csv([*columns], known).encode(), PRIVATE_MODE)


def predict(
    run: Path | str,
    data: Path | str | NDArray[Any] | Sequence[str],
    device: str = "auto",
    factory: str | None = None,
    network: Network | None = None,
    *,
    skip_bad: bool = False,
    id_column: str | None = None,
    length: int | None = None,
    temperature: float | None = None,
) -> Predictions:
    """Predict the classes or numbers of new records, or continue texts.

    Args:
        run: a run folder or a model file.
        data: a folder of images or texts, an .npz with an array x, or a table, like the model's
            training data; or the array x itself, or a list of texts.
        device: see ``--device``.
        factory: ``FILE.py:FACTORY`` of a user-supplied model.
        network: instead, a network of the program: see :func:`load_model`.
        skip_bad: leave out unusable records instead of rejecting all.
        id_column: column of a table to keep beside each record; by default ``id``.
        length: number of tokens to add to a text; by default 50.
        temperature: of the draws of tokens; 0 for the most probable ones, by default 1.

    Raises:
        InputError: a file is missing or damaged, or records do not match the training data.
        ModelError: the model cannot be built.
    """
    where = choose_device(device)
    released = load_model(run, where, factory=factory, network=network)
    records = read_unlabelled(data, released, skip_bad=skip_bad, id_column=id_column)
    _check_some_left(records.path, len(records.names), records.skipped)
    answers = np.concatenate([*_answers(released, records, where)])
    texts = _continued(released, records, where, length, temperature)
    if not skip_bad:  # only now, because images are decoded one batch after another
        strays, faults = records.skipped.records, records.faults.values()
        raise_errors([*complaints(strays, REMOVE), *complaints([*faults], REMEDY)])
    return _usable(records, answers, released.header.task, texts)


#: Tokens that a language model adds to a text by default.
LENGTH = 50


def _continued(
    released: Released,
    records: Unlabelled,
    device: torch.device,
    length: int | None,
    temperature: float | None,
) -> list[str] | None:
    """Return how a language model continues texts; None for other models."""
    if released.reader is None or released.header.task.network is None:
        if (length, temperature) != (None, None):
            raise InputError(
                "{length} and {temperature} are for language models, but "
                f"{released.path} predicts {released.header.task.described}. Leave them out."
            )
        return None
    model: Any = released.model.get_submodule("frozen")
    settings = length or LENGTH, 1.0 if temperature is None else temperature
    batches = _inputs(released, records, device)
    found = (tokens for x in batches for tokens in model.continued(x, *settings))
    return [released.reader.tokenizer.decode(tokens) for tokens in found]


def _inputs(released: Released, records: Unlabelled, device: torch.device) -> Iterator[Tensor]:
    """Yield some records after the other as the network takes them."""
    known = released.header.input
    gain, offset = standardisation(*known.constants, device)
    some = places(len(records.names), known.shape)
    batches = (torch.from_numpy(records.at(rows)).to(device) for rows in some)
    inputs = (torch.addcmul(offset, batch.to(gain.dtype), gain) for batch in batches)
    return (each.reshape(len(each), *known.record) for each in inputs)


def _answers(
    released: Released, records: Unlabelled, device: torch.device
) -> Iterator[NDArray[np.float32]]:
    """Yield what the model's outputs mean for some records after the other, and report progress."""
    done = 0
    for logits in outputs(released.model, _inputs(released, records, device)):
        numbers = logits.to("cpu", torch.promote_types(logits.dtype, torch.float32)).numpy()
        found = released.header.task.answers(numbers)
        yield found
        done += len(found)
        report(done, len(records.names), released.path, "predictions")


def _usable(
    records: Unlabelled, answers: NDArray[np.float32], task: Task, texts: Sequence[str] | None
) -> Predictions:
    """Return the predictions of records without a fault."""
    kept = [row for row in range(len(records.names)) if row not in records.faults]
    skipped = records.skipped + left_out([*records.faults.values()])
    _check_some_left(records.path, len(kept), skipped)
    ids = None if records.ids is None else [records.ids[row] for row in kept]
    names: Any = [records.names[row] for row in kept]
    texts = None if texts is None else [texts[row] for row in kept]
    return Predictions(answers[kept], task, names, ids, skipped, texts)


def _check_some_left(path: Path, count: int, skipped: LeftOut) -> None:
    """Reject data without a record."""
    if not count:
        what = f"{path} contains no records" + " that can be used" * bool(skipped.records)
        refuse([what, *skipped.reasons])
