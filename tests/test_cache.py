"""The cache of features: what a killed process leaves, what is removed, and its command."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.filesize import decimal
from torch import Tensor, nn

from dpmac_cli.data.dataset import Data
from dpmac_cli.data.loaders import load_data
from dpmac_cli.errors import InputError
from dpmac_cli.models.feature_cache import PROBED, featured
from dpmac_cli.models.features import FrozenFeatures
from dpmac_cli.storage.cache import RowFile, kept_files, make_room
from tests.digits_runs import dpmac, of, train_digits

RUN: Mapping[str, Any] = {"features": "scatter"}
pytestmark = pytest.mark.usefixtures("cache")


class Counted(nn.Module):
    """Doubles its inputs, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return twice x."""
        self.seen += len(x)
        return 2 * x


def work() -> tuple[Counted, FrozenFeatures, Data]:
    counted = Counted()
    parts = FrozenFeatures(counted, nn.Flatten(), torch.float16)
    return counted, parts, load_data("digits", Path(), torch.device("cpu"))


@pytest.mark.privacy
@pytest.mark.parametrize("harm", ["cut", "changed", "row not written", "fault", "header"])
def test_a_damaged_file_is_computed_again(harm: str, cache: Path) -> None:
    expected = features_of(cache)[1]
    [whole] = kept_files(cache)
    content = bytearray(whole.read_bytes())
    first = RowFile(whole).values
    if harm == "cut":
        content = content[:-5]
    elif harm == "changed":
        content[-len(first) * first.strides[0] // 2] ^= 1
    elif harm == "fault":
        content = content.replace(b'"faults": {}', b'"faults": {"0": ""}')
    elif harm == "header":
        content = content.replace(b"<f2", b"<i2")
    else:
        content[content.index(b"\n") + 1 + first[0].nbytes] = 0
    whole.write_bytes(content)
    seen, found = features_of(cache)
    assert seen >= 1797
    assert torch.equal(found, expected)
    assert features_of(cache)[0] == 0


def features_of(cache: Path) -> tuple[int, Tensor]:
    """How many images were looked at, and the features of the first."""
    counted, parts, data = work()
    found, _ = of(featured(parts, data, {}, cache))
    return counted.seen - PROBED, found.train.images[0]


@pytest.mark.privacy
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
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o755


def test_the_files_used_longest_ago_are_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, parts, data = work()
    names = []
    for number in range(3):
        of(featured(parts, data, {"number": number}, cache))
        names.append(kept_files(cache)[0])
        os.utime(names[-1], (number, number))
    of(featured(parts, data, {"number": 0}, cache))  # used again
    size = names[0].stat().st_size
    monkeypatch.setenv("DPMAC_CACHE_SIZE", str(2.5 * size / 1e9))
    of(featured(parts, data, {"number": 0}, cache))
    assert set(kept_files(cache)) == {names[0], names[2]}
    monkeypatch.setenv("DPMAC_CACHE_SIZE", "0")
    of(featured(parts, data, {"number": 0}, cache))
    assert kept_files(cache) == [names[0]]  # in use
    assert make_room(cache, 0) == [names[0]]


def test_the_command_lists_and_clears(cache: Path) -> None:
    assert "0 files, 0 bytes of 20.0 GB" in dpmac("cache").output
    train_digits(**RUN)
    [file] = kept_files(cache)
    size = decimal(file.stat().st_size)
    assert f"1 file, {size} of 20.0 GB" in dpmac("cache").output
    assert "1 removed" in dpmac("cache", "--clear").output
    assert kept_files(cache) == []
