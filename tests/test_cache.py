"""The cache of features: what an interrupted run leaves, what is removed, and its command."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from dpmac_cli import files, from_dataframe, train
from dpmac_cli.config.plan import Plan
from dpmac_cli.data import image_folder
from dpmac_cli.data.cache import (
    WHOLE,
    RowFile,
    Rows,
    complete,
    kept_file,
    kept_files,
    make_room,
)
from dpmac_cli.errors import InputError
from dpmac_cli.features.frozen import FrozenFeatures
from dpmac_cli.features.stored import PROBED, featured
from dpmac_cli.files import PART
from dpmac_cli.models import dataset
from dpmac_cli.models.dataset import Data
from dpmac_cli.progress import LISTENER, Computing
from dpmac_cli.runs import prepare
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import same_weights, train_events
from tests.helpers import declared, load, load_data

pytestmark = pytest.mark.usefixtures("cache")


class Counted(nn.Module):
    """Doubles its inputs, and counts those of all copies."""

    seen: ClassVar = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return twice x."""
        Counted.seen += len(x)
        return 2 * x


def work() -> tuple[FrozenFeatures, Data]:
    Counted.seen = 0
    parts = FrozenFeatures(Counted(), nn.Flatten(), torch.float16)
    return parts, load_data("digits", Path(), torch.device("cpu"))


DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"1",
    "without its faults": lambda content: content[:-2],
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "of something else": lambda _: b"{}",
}


@pytest.mark.promise("facts")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_computed_again(damage: str, cache: Path) -> None:
    expected = features_of(cache)[1]
    [whole] = kept_files(cache)
    whole.write_bytes(DAMAGES[damage](whole.read_bytes()))
    seen, found = features_of(cache)
    assert seen >= 1797
    assert torch.equal(found, expected)
    assert features_of(cache)[0] == 0


def features_of(cache: Path) -> tuple[int, Tensor]:
    """How many images were looked at, and the features of the first."""
    parts, data = work()
    found = featured(parts, data, {}, cache)
    return Counted.seen - PROBED, found.train.images[0]


@pytest.mark.promise("search")
@pytest.mark.parametrize("most", [dataset.IN_MEMORY, 0], ids=["in memory", "in a file"])
def test_inputs_that_follow_from_ranges_of_a_run_are_not_kept(
    most: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial of a search has ranges of its own, so files would tell how many there were."""
    monkeypatch.setattr(dataset, "IN_MEMORY", most)
    draws = np.random.default_rng(0)
    frame = pd.DataFrame({"a": draws.uniform(0, 9, 600)})
    frame["y"] = np.where(frame["a"] > 4, "many", "few")
    numbers = from_dataframe(frame, label="y", kinds={"a": "number"}, classes=["few", "many"])
    run = train(dataset=numbers, epsilon=8, epochs=3, device="cpu", out=tmp_path / "run")
    assert run.report["data"]["ranges"]
    assert run.report["scores"]["accuracy"]["value"] > 0.8
    assert kept_files(cache) == []


@pytest.mark.promise("facts")
def test_a_folder_behind_a_link_of_another_user_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could lead to any folder of this user, which would be made private."""
    (tmp_path / "home").mkdir(mode=0o755)
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "home")
    examine = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = examine(path)
        if path != cache:
            return found
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]])

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(InputError, match="the folder belongs to another user"):
        features_of(cache)
    assert complete(cache / "any.rows") is None
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o755


CPU = torch.device("cpu")


def photos(root: Path, count: int = 40) -> Path:
    """Images of two classes; each is as grey as its number says."""
    for number in range(count):
        path = root / ("cat", "dog")[number % 2] / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number % 251, np.uint8)).save(path)
    return root


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that this process decodes."""
    seen: list[str] = []

    def watched(opened: Any, *how: Any, **named: Any) -> NDArray[Any] | str:
        seen.append(str(getattr(opened.fp, "name", "")))
        return plain(opened, *how, **named)

    plain = image_folder.decode
    monkeypatch.setattr(image_folder, "decode", watched)
    monkeypatch.setattr(image_folder, "FEW", 1000)
    return seen


def plan_of(out: str = "run") -> Plan:
    plain = {"dataset": "photos", "model": "cnn", "sigma": 4, "batch_size": 16, "steps": 2}
    return resolve(plain, physical_batch=3, seed=1, out=out, device="cpu").plan


@pytest.mark.promise("facts")
def test_a_run_that_reads_by_row_is_the_run_that_has_all_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit; and it is scored alike."""
    photos(Path("photos"))
    _, one = train_events(plan_of())
    monkeypatch.setattr(dataset, "IN_MEMORY", 0)
    assert prepare.load(plan_of(), CPU).train.images.device.type == "meta"
    _, other = train_events(plan_of("other"))
    assert same_weights(one.folder, other.folder)
    assert one.report["scores"] == other.report["scores"]


def test_images_are_decoded_once_and_kept_for_their_owner_alone(
    cache: Path, decoded: list[str]
) -> None:
    photos(Path("photos"))
    first = load(declared(Path("photos")))
    assert len({*decoded}) == len(decoded) == 40
    second = load(declared(Path("photos")))
    assert len(decoded) == 40
    np.testing.assert_array_equal(first[0][0], second[0][0])
    [file] = kept_files(cache)
    assert (file.suffix, file.stat().st_mode & 0o777) == (WHOLE, 0o600)
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.promise("facts")
@pytest.mark.parametrize("what", ["contents", "name", "size", "more"])
def test_other_files_or_settings_are_decoded_again(what: str, decoded: list[str]) -> None:
    """Also a file of the same name, size and time of writing as before."""
    root = photos(Path("photos"))
    load(declared(root))
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
    found = load(declared(root, image_size=4 if what == "size" else None))
    assert len(decoded) == 80 + 2 * (what == "more")
    if what == "contents":
        assert 99 in found[0][0] or 99 in found[1][0]


def test_rows_that_are_not_complete_have_no_name(cache: Path) -> None:
    """Nor do they stay, unless the process was killed; then they are removed like other files."""

    def interrupted() -> Iterator[tuple[NDArray[Any], dict[int, str]]]:
        yield np.ones((2, 3), np.uint8), {}
        assert [file.suffix for file in kept_files(cache)] == [PART]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept_file(cache / f"a{WHOLE}", 4, (3,), np.dtype(np.uint8), interrupted)
    assert kept_files(cache) == []
    left = cache / f".a.b{PART}"
    left.write_bytes(b"1")
    assert make_room(cache, 0) == [left]


def test_processes_share_the_work_and_two_runs_share_one_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(Path("photos"), 300)
    monkeypatch.setattr(image_folder, "FEW", 16)
    monkeypatch.setattr(image_folder, "usable_cores", lambda: 2)
    seen: list[Computing] = []
    found: list[Any] = []

    def second() -> None:
        LISTENER.set(seen.append)
        found.append(load(declared(Path("photos"), test_fraction=0.3)))

    thread = threading.Thread(target=second)
    thread.start()
    x, _ = load(declared(Path("photos")))[0]
    thread.join()
    assert len(kept_files(cache)) == 1
    assert {int(image[0, 0, 0]) for image in x} <= set(range(251))
    (more, _), (rest, _) = found[0]
    assert len(more) + len(rest) == 300
    values = np.concatenate([more, rest])[:, 0, 0, 0]
    assert sorted(values.tolist()) == sorted(number % 251 for number in range(300))


@pytest.mark.promise("facts")
def test_other_rows_of_a_file_have_another_checksum(cache: Path) -> None:
    features_of(cache)
    [whole] = kept_files(cache)
    file = RowFile(whole)
    sums = {Rows(file, np.array(rows)).sha256() for rows in ([0, 1], [0, 2], [1, 0], [0])}
    assert len(sums) == 4


def test_a_file_that_was_used_is_removed_last(cache: Path) -> None:
    features_of(cache)
    [used] = kept_files(cache)
    other = used.with_name(f"other{WHOLE}")
    other.write_bytes(used.read_bytes())
    os.utime(used, (0, 0))
    os.utime(other, (1e9, 1e9))
    assert complete(used) is not None
    assert make_room(cache, used.stat().st_size) == [other]


@pytest.mark.promise("ledger")
def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, sync, name = list[str](), os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append("sync")
        sync(handle)

    def named(old: Path, new: Path) -> None:
        done.append("name")
        name(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    files.write_atomically(tmp_path / "file", b"content")
    assert done[:2] == ["sync", "name"]
