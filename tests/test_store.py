"""Own images are decoded once, into a file of rows that is read as it is used."""

import errno
import os
import sys
import threading
from collections.abc import Generator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.data import dataset, decoding, user_data
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import InputError, RunError
from dpmac_cli.runs.session import Started
from dpmac_cli.storage.cache import (
    BEGUN,
    WHOLE,
    RowFile,
    Rows,
    complete,
    kept_file,
    kept_files,
)
from dpmac_cli.storage.progress import LISTENER, Computing, outcome, until
from dpmac_cli.studies.local import share_data
from tests.digits_runs import a_run, same_weights, train_events
from tests.helpers import PLAN, Batches, load, make_trainer
from tests.typed import dpmac

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("cache")


def photos(root: Path, count: int = 40) -> Path:
    """Images of two classes; each is as grey as its number says."""
    for number in range(count):
        path = root / ("cat", "dog")[number % 2] / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number % 251, np.uint8)).save(path)
    return root


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that this process decodes."""
    seen: list[int] = []

    def watched(file: RowFile, row: int, path: str, levels: int | None) -> str | None:
        seen.append(row)
        return plain(file, row, path, levels)

    plain = decoding.decode_into
    monkeypatch.setattr(decoding, "decode_into", watched)
    monkeypatch.setattr(decoding, "FEW", 1000)
    return seen


def plan_of(out: str = "run") -> TrainPlan:
    plain = {"dataset": "photos", "model": "cnn", "sigma": 4, "batch_size": 16, "steps": 4}
    return resolve(plain, physical_batch=3, seed=1, out=out, device="cpu").plan


@pytest.mark.privacy
def test_a_run_that_reads_by_row_is_the_run_that_has_all_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With chunks that are read ahead, bit for bit; and it is scored alike."""
    photos(Path("photos"))
    _, one = train_events(plan_of())
    monkeypatch.setattr(dataset, "IN_MEMORY", 0)
    source = plan_of().data.source
    assert load_data(source, Path(), CPU).train.images.device.type == "meta"
    _, other = train_events(plan_of("other"))
    assert same_weights(one.folder, other.folder)
    assert one.report["test"] == other.report["test"]


def test_images_are_decoded_once_and_kept_for_their_owner_alone(
    cache: Path, decoded: list[int]
) -> None:
    photos(Path("photos"))
    first = load(Source(Path("photos")))
    assert sorted(decoded) == list(range(40))
    second = load(Source(Path("photos")))
    assert len(decoded) == 40
    np.testing.assert_array_equal(first[0][0], second[0][0])
    [file] = kept_files(cache)
    assert (file.suffix, file.stat().st_mode & 0o777) == (WHOLE, 0o600)
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.privacy
@pytest.mark.parametrize("what", ["contents", "name", "size", "more"])
def test_other_files_or_settings_are_decoded_again(what: str, decoded: list[int]) -> None:
    """Also a file of the same name, size and time of writing as before."""
    root = photos(Path("photos"))
    load(Source(root))
    path = root / "cat" / "0002.png"
    if what == "contents":
        facts = path.stat()
        content = bytearray(path.read_bytes())
        Image.fromarray(np.full((8, 8), 99, np.uint8)).save(path)
        assert path.stat().st_size == len(content)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    elif what == "name":
        path.rename(path.with_name("0002b.png"))
    elif what == "more":
        photos(root, 42)
    found = load(Source(root, image_size=4 if what == "size" else None))
    assert len(decoded) == 80 + 2 * (what == "more")
    if what == "contents":
        assert 99 in found[0][0] or 99 in found[1][0]


def test_processes_share_the_work_and_two_runs_share_one_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(Path("photos"), 300)
    monkeypatch.setattr(decoding, "FEW", 16)
    monkeypatch.setattr(decoding, "usable_cores", lambda: 3)
    seen: list[Computing] = []
    found: list[Any] = []

    def second() -> None:
        LISTENER.set(seen.append)
        found.append(load(Source(Path("photos"), test_fraction=0.3)))

    thread = threading.Thread(target=second)
    thread.start()
    x, _ = load(Source(Path("photos")))[0]
    thread.join()
    assert len(kept_files(cache)) == 1
    assert {int(image[0, 0, 0]) for image in x} <= set(range(251))
    (more, _), (rest, _) = found[0]
    assert len(more) + len(rest) == 300
    values = np.concatenate([more, rest])[:, 0, 0, 0]
    assert sorted(values.tolist()) == sorted(number % 251 for number in range(300))


@pytest.mark.privacy
def test_a_damaged_file_is_decoded_again(cache: Path, decoded: list[int]) -> None:
    photos(Path("photos"))
    before = load(Source(Path("photos")))
    [file] = kept_files(cache)
    content = bytearray(file.read_bytes())
    content[content.index(b"\n") + 20 * 65] ^= 1
    file.write_bytes(content)
    after = load(Source(Path("photos")))
    assert len(decoded) == 80
    np.testing.assert_array_equal(before[0][0], after[0][0])


def full(*_: int) -> None:
    """Find the disk full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_says_how_much_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    photos(Path("photos"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    result = dpmac(
        "train", "--dataset", "photos", "--sigma", "4", "--device", "cpu", "--out", "run"
    )
    assert result.exit_code == 2
    assert "The images (0.0 GB) cannot be stored in" in result.output
    assert "(No space left on device)" in result.output
    assert not Path("run").exists()
    assert not list(Path().glob("cache/rows/*.begun"))


def test_a_process_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    photos(Path("photos"))
    monkeypatch.setattr(decoding, "FEW", 4)
    monkeypatch.setattr(decoding, "usable_cores", lambda: 2)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="A process that decodes images exited with code 1"):
        load(Source(Path("photos")))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (("--sigma", "0.3", "--max-epsilon", "0.0001"), "max-epsilon"),
        (("--sigma", "4", "--model", "net.py:Net"), "BatchNorm"),
        (("--sigma", "4", "--out", "taken"), "taken"),
        (("--sigma", "4", "--batch-size", "1000"), "batch-size"),
    ],
    ids=["budget", "network", "folder", "flag"],
)
def test_what_is_cheap_is_checked_before_an_image_is_decoded(
    mistake: tuple[str, ...], said: str, cache: Path
) -> None:
    photos(Path("photos"))
    Path("taken").mkdir()
    Path("taken/thesis.txt").write_text("")
    Path("net.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 2))\n"
    )
    plain = ("train", "--dataset", "photos", "--steps", "4", "--device", "cpu")
    result = dpmac(*plain, *mistake)
    assert result.exit_code in (2, 3, 4)
    assert said in result.output
    assert kept_files(cache) == []


def test_with_skip_bad_images_are_decoded_once_all_the_same(
    cache: Path, decoded: list[int]
) -> None:
    root = photos(Path("photos"))
    (root / "cat" / "0004.png").write_bytes(b"no image")
    source = Source(root, channels=1, image_size=8, classes=("cat", "dog"), skip_bad=True)
    reported: list[Computing] = []
    token = LISTENER.set(reported.append)
    found = user_data.inspect(source)
    LISTENER.reset(token)
    assert found.facts.train_size + found.facts.test_size == 39
    assert [event.what for event in reported] == ["images"] * len(reported) != []
    (x, _), (x_test, _) = load(source)
    assert 4 not in np.concatenate([x, x_test])
    assert len(decoded) == 40
    assert user_data.inspect(source) == found
    assert len(decoded) == 40
    with pytest.raises(InputError, match=r"0004\.png cannot be read as an image"):
        load(Source(root, channels=1, image_size=8, classes=("cat", "dog")))


def test_stopped_while_images_are_decoded_nothing_is_begun(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(Path("photos"))
    monkeypatch.setattr(decoding, "FEW", 8)
    with pytest.raises(KeyboardInterrupt):
        outcome(until(lambda: True, user_data.load(Source(Path("photos")), None)))
    [begun] = kept_files(cache)
    assert begun.suffix == BEGUN
    (x, _), (x_test, _) = load(Source(Path("photos")))
    assert sorted(np.concatenate([x, x_test])[:, 0, 0, 0].tolist()) == list(range(40))


def test_progress_is_shown_with_its_place(cache: Path) -> None:
    photos(Path("photos"))
    events, _ = train_events(plan_of())
    shown = [event for event in events if isinstance(event, Computing)]
    assert shown[-1] == Computing(40, 40, cache, what="images", nbytes=40 * 64)
    assert isinstance(events[len(shown)], Started)
    result = dpmac("train", "--config", "run/config.yaml", "--out", "again", "--seed", "1")
    assert result.exit_code == 0
    assert "decoding" not in result.output  # it is there already


@pytest.mark.privacy
def test_rows_are_what_was_written(cache: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (10, 2, 3), dtype=np.uint8)

    def fill(file: RowFile) -> Generator[Computing, None, dict[int, str]]:
        for row in (3, 0, 1, 2, 4, 5, 6, 7, 8):
            file.write(row, values[row])
        assert file.missing().tolist() == [9]
        yield Computing(9, 10, cache)
        return {9: "strange"}

    kept = outcome(kept_file(cache / "a.rows", 10, (2, 3), np.dtype(np.uint8), fill))
    assert kept.faults == {9: "strange"}
    some = np.array([7, 0, 7])
    one, two = Rows(kept, some), Rows(kept, some[::-1][:2])
    np.testing.assert_array_equal(one.read(), values[some])
    np.testing.assert_array_equal(one.read(slice(1, 2)), values[:1])
    assert one.sha256() != two.sha256()


def test_the_command_lists_images_too(cache: Path) -> None:
    photos(Path("photos"))
    load(Source(Path("photos")))
    assert len(kept_files(cache)) == 1
    assert "1 file" in dpmac("cache").output
    assert "1 removed" in dpmac("cache", "--clear").output
    assert kept_files(cache) == []


@pytest.mark.privacy
def test_records_that_are_read_ahead_are_those_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    photos(Path("photos"))
    whole = load_data(plan_of().data.source, Path(), CPU).train
    monkeypatch.setattr(dataset, "IN_MEMORY", 0)
    split = load_data(plan_of().data.source, Path(), CPU).train
    some, others = np.array([4, 0, 9]), np.array([1, 2])
    split.read_ahead(some)
    for places in (others, some, slice(3, 7)):
        images, labels = split.at(places)
        assert torch.equal(images, whole.images[places])
        assert torch.equal(labels, whole.labels[places])
    split.read_ahead(some)
    assert torch.equal(split.at(some)[0], whole.images[some])


def test_every_chunk_of_a_step_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the chunk before it is worked on."""
    photos(Path("photos"))
    monkeypatch.setattr(dataset, "IN_MEMORY", 0)
    data = load_data(plan_of().data.source, Path(), CPU)
    assert isinstance(data.train, dataset.StoredSplit)
    reads: list[list[int]] = []
    read = data.train._read

    def counted(places: Any) -> torch.Tensor:
        reads.append(places.tolist())
        return read(places)

    monkeypatch.setattr(dataset.StoredSplit, "_read", lambda _, places: counted(places))
    plan = replace(PLAN, physical_batch=2)
    whole = list(range(len(data.train)))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    make_trainer("dp-sgd", plan=plan, data=data, model=model, sampler=Batches(whole)).step()
    assert len(reads) > 2
    assert sorted(record for chunk in reads for record in chunk) == whole


def test_processes_of_a_study_read_the_file_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    photos(Path("photos"))
    monkeypatch.setattr(dataset, "IN_MEMORY", 0)
    plan = plan_of()
    train = share_data([a_run(plan)])[plan.data.source].train
    received = ForkingPickler.loads(ForkingPickler.dumps(train))
    places = np.array([5, 1])
    assert torch.equal(received.at(places)[0], train.at(places)[0])


@pytest.mark.privacy
def test_a_file_of_another_user_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(Path("photos"))
    load(Source(Path("photos")))
    file = next(cache.rglob(f"*{WHOLE}"))
    assert complete(file) is not None
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    assert complete(file) is None
    with pytest.raises(InputError, match="the folder belongs to another user"):
        load(Source(Path("photos")))
