"""A name becomes tensors, and what cannot become them is explained."""

import errno
import os
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError, URLError

import numpy as np
import pytest
import torch
import torchvision
from sklearn.datasets import load_digits
from torchvision.datasets import cifar, mnist
from torchvision.transforms.functional import normalize

from dpmac_cli.data import loaders
from dpmac_cli.data.dataset import Data, Split, fingerprint
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.splits import Records
from dpmac_cli.errors import InputError

CPU = torch.device("cpu")
RAW_FILES = tuple(Path(archive).stem for archive, _ in mnist.MNIST.resources)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise URLError("Temporary failure in name resolution")

    monkeypatch.setattr(mnist, "download_and_extract_archive", fail)


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_data("digits", Path("nowhere"), CPU)


def test_every_data_set_of_the_catalog_has_a_loader() -> None:
    assert {name for name, facts in DATASETS.items() if not facts.torchvision} == {"digits"}
    kinds = {facts.torchvision for facts in DATASETS.values()} - {""}
    assert all(hasattr(torchvision.datasets, kind) for kind in kinds)


def check_against_catalog(name: str, data: Data) -> None:
    facts = DATASETS[name]
    for split, size in ((data.train, facts.train_size), (data.test, facts.test_size)):
        assert split.images.shape == (size, *facts.shape)
        assert split.images.dtype == torch.uint8
        assert split.images.max() == facts.levels
        assert (split.labels.shape, split.labels.dtype) == ((size,), torch.int64)
        assert set(split.labels.tolist()) == set(range(len(facts.task.names)))
        assert len(split) == size


def test_digits_are_as_the_catalog_says(digits: Data) -> None:
    check_against_catalog("digits", digits)


def test_digits_are_split_without_loss_or_overlap(digits: Data) -> None:
    bunch = load_digits()
    whole = np.column_stack([bunch.data, bunch.target]).astype(np.int64)
    parts = [
        torch.column_stack([split.images.flatten(1).long(), split.labels]).numpy()
        for split in (digits.train, digits.test)
    ]
    assert sorted(map(tuple, np.concatenate(parts))) == sorted(map(tuple, whole))


def test_digits_split_does_not_depend_on_global_generators(digits: Data) -> None:
    np.random.default_rng()
    torch.manual_seed(3)
    again = load_data("digits", Path("elsewhere"), CPU)
    assert torch.equal(again.test.images, digits.test.images)
    assert digits.test.labels[:12].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5, 2, 8]


def test_standardisation_is_torchvisions(digits: Data) -> None:
    facts = DATASETS["digits"]
    wanted = normalize(
        digits.train.images.double() / facts.levels, list(facts.mean), list(facts.std)
    )
    standardised = digits.standardised(digits.train.images)
    assert standardised.dtype == torch.float32
    torch.testing.assert_close(standardised.double(), wanted, rtol=1e-6, atol=1e-6)
    assert abs(standardised.mean()) < 0.01
    assert abs(standardised.std() - 1) < 0.01


def records(split: Split) -> Records:
    return Records(split.images.numpy(), split.labels.numpy())


@pytest.mark.parametrize("part", ["images", "labels"])
def test_a_single_changed_value_is_noticed(
    monkeypatch: pytest.MonkeyPatch, digits: Data, part: str
) -> None:
    images, labels = digits.test.images.clone(), digits.test.labels.clone()
    changed = images.view(-1) if part == "images" else labels
    changed[-1] = 1 - changed[-1].clamp(max=1)
    parts = [records(digits.train), records(Split(images, labels))]
    monkeypatch.setattr(loaders, "_digits", lambda: parts)
    with pytest.raises(InputError) as caught:
        load_data("digits", Path("nowhere"), CPU)
    message = str(caught.value)
    assert message.startswith(
        "The dataset digits in nowhere is not the published one: its contents differ (SHA-256 "
    )
    assert f"instead of {fingerprint(digits.train, digits.test)[:16]}...)" in message
    assert "shape" not in message


def test_a_missing_record_is_noticed(monkeypatch: pytest.MonkeyPatch, digits: Data) -> None:
    parts = [records(digits.train).at(np.arange(1, len(digits.train))), records(digits.test)]
    monkeypatch.setattr(loaders, "_digits", lambda: parts)
    with pytest.raises(InputError) as caught:
        load_data("digits", Path("nowhere"), CPU)
    assert (
        "the shapes (1436, 1, 8, 8) and (360, 1, 8, 8) instead of (1437, 1, 8, 8) and "
        "(360, 1, 8, 8). Remove its files"
    ) in str(caught.value)


#: What only torchvision and Python need to know.
JARGON = ("download=True", "urlopen", "Errno", "pickle", "load key", "Dataset")


def the_error(name: str, data_dir: Path, *, download: bool = True) -> str:
    """The one message of a data set that cannot be loaded, checked for its manners."""
    with pytest.raises(InputError) as caught:
        load_data(name, data_dir, CPU, download=download)
    (message,) = caught.value.errors
    assert message.startswith(f"The dataset {name} ")
    for word in ("\n", *JARGON):
        assert word not in message
    for way_out in ("--data-dir", "DPMAC_DATA_DIR", "--dataset digits"):
        assert way_out in message
    return message


def test_missing_files_without_a_network_are_one_message(tmp_path: Path) -> None:
    assert the_error("mnist", tmp_path).startswith(
        f"The dataset mnist is not in {tmp_path / 'MNIST' / 'raw'} and could not be downloaded "
        f"(Temporary failure in name resolution). Put these files there: {', '.join(RAW_FILES)}; "
    )


def test_missing_files_that_may_not_be_downloaded_are_named(tmp_path: Path) -> None:
    assert (
        f"is not in {tmp_path / 'MNIST' / 'raw'}. Put these files there: {', '.join(RAW_FILES)}; "
    ) in the_error("mnist", tmp_path, download=False)


def test_a_data_folder_that_is_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "could not be downloaded (Not a directory: " in the_error("mnist", tmp_path / "file")


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (URLError(OSError(-2, "Name or service not known")), " (Name or service not known)"),
        (URLError("timed out"), " (timed out)"),
        (HTTPError("http://x", 503, "Busy", Message(), None), " (HTTP Error 503: Busy)"),
        (RuntimeError("File not found or corrupted."), " (File not found or corrupted)"),
        (TimeoutError(), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_why_a_download_failed_is_said_in_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: Exception, reason: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise raised

    monkeypatch.setattr(cifar, "download_and_extract_archive", fail)
    message = the_error("cifar10", tmp_path)
    assert f"could not be downloaded{reason}. Put these files there: data_batch_1, " in message


def test_a_download_that_brings_another_thing_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cifar, "download_and_extract_archive", lambda *args, **kwargs: None)
    assert "and could not be downloaded. Put these" in the_error("cifar100", tmp_path)


def test_files_of_cifar_that_are_altered_are_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test", "meta"):
        (folder / name).write_text("mine")
    assert f"in {folder} is damaged: a file is truncated, modified" in the_error(
        "cifar100", tmp_path
    )


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with files by the names of MNIST's."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in RAW_FILES:
        (raw / name).write_text("mine")
    return tmp_path


def test_files_that_may_not_be_read_are_explained(
    monkeypatch: pytest.MonkeyPatch, stand_ins: Path
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(mnist, "read_image_file", refuse)
    assert "raw cannot be read (Permission denied). Make it" in the_error("mnist", stand_ins)


def test_damaged_files_of_an_old_torchvision_are_damaged(stand_ins: Path) -> None:
    (stand_ins / "MNIST" / "processed").mkdir()
    for name in ("training.pt", "test.pt"):
        (stand_ins / "MNIST" / "processed" / name).write_text("mine")
    assert "is damaged" in the_error("mnist", stand_ins)


# MNIST itself


@pytest.fixture
def copied(tmp_path: Path, real_data_dir: Path) -> Path:
    """A folder with the files of MNIST, that a test may change."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in RAW_FILES:
        (raw / name).symlink_to(real_data_dir / "MNIST" / "raw" / name)
    return tmp_path


def put(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of MNIST."""
    file = folder / "MNIST" / "raw" / name
    file.unlink()
    file.write_bytes(content)


@pytest.mark.real_data
def test_mnist_is_as_the_catalog_says(real_data_dir: Path) -> None:
    data = load_data("mnist", real_data_dir, CPU)
    check_against_catalog("mnist", data)
    assert data.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    standardised = data.standardised(data.train.images[:10_000])
    assert abs(standardised.mean()) < 0.01
    assert abs(standardised.std() - 1) < 0.01


#: IDX files of kinds that MNIST's are not: text, floats, a type that does not exist.
OTHER_KINDS = (
    b"hello, world" * 9,
    b"\0\0\x0d\x01\0\0\0\x01" + bytes(4),
    b"\0\0\x0a\x01" + bytes(9),
)


@pytest.mark.real_data
@pytest.mark.parametrize("size", [0, 3, 8, 5000])
def test_truncated_files_are_damaged(copied: Path, size: int) -> None:
    name = "t10k-labels-idx1-ubyte"
    content = (copied / "MNIST" / "raw" / name).read_bytes()
    put(copied, name, content[:size])
    assert f"in {copied / 'MNIST' / 'raw'} is damaged: a file" in the_error("mnist", copied)


@pytest.mark.real_data
@pytest.mark.parametrize("content", OTHER_KINDS, ids=["text", "floats", "unknown"])
def test_files_of_another_kind_are_damaged(copied: Path, content: bytes) -> None:
    put(copied, "t10k-labels-idx1-ubyte", content)
    assert "is damaged: a file" in the_error("mnist", copied)


@pytest.mark.real_data
def test_an_altered_file_is_not_the_published_one(copied: Path) -> None:
    name = "t10k-labels-idx1-ubyte"
    content = bytearray((copied / "MNIST" / "raw" / name).read_bytes())
    content[-1] ^= 1
    put(copied, name, bytes(content))
    with pytest.raises(InputError, match="its contents differ") as caught:
        load_data("mnist", copied, CPU)
    assert f"The dataset mnist in {copied} is not the published one" in str(caught.value)
    assert os.listdir(copied) == ["MNIST"], "nothing is left beside the files"


@pytest.mark.real_data
def test_one_missing_file_is_named_alone(copied: Path) -> None:
    (copied / "MNIST" / "raw" / RAW_FILES[0]).unlink()
    message = the_error("mnist", copied)
    assert "mnist is incomplete in" in message
    assert f"Put this file there: {RAW_FILES[0]};" in message
