"""A name becomes tensors, and what cannot become them is explained."""

from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torchvision.datasets import mnist

from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.data import published
from dpmac_cli.data.dataset import Split as Records
from dpmac_cli.errors import InputError
from dpmac_cli.models.dataset import Data, Split, fingerprint
from tests.helpers import load_data

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


def check_against_catalog(name: str, data: Data) -> None:
    facts = DATASETS[name]
    for split, size in ((data.train, facts.train_size), (data.tested, facts.test_size)):
        assert split.images.shape == (size, *facts.records.shape)
        assert split.images.dtype == torch.uint8
        assert split.images.max() == getattr(facts.records, "white", None)
        assert (split.labels.shape, split.labels.dtype) == ((size,), torch.int64)
        assert set(split.labels.tolist()) == set(range(len(facts.task.names)))
        assert len(split) == size


def test_digits_are_as_the_catalog_says(digits: Data) -> None:
    check_against_catalog("digits", digits)


def records(split: Split) -> Records:
    return Records(split.images.numpy(), split.labels.numpy())


@pytest.mark.parametrize("part", ["images", "labels"])
def test_a_single_changed_value_is_noticed(
    monkeypatch: pytest.MonkeyPatch, digits: Data, part: str
) -> None:
    images, labels = digits.tested.images.clone(), digits.tested.labels.clone()
    changed = images.view(-1) if part == "images" else labels
    changed[-1] = 1 - changed[-1].clamp(max=1)
    parts = [records(digits.train), records(Split(images, labels))]
    monkeypatch.setattr(published, "_digits", lambda: parts)
    with pytest.raises(InputError) as caught:
        load_data("digits", Path("nowhere"), CPU)
    message = str(caught.value)
    assert message.startswith(
        "The dataset digits in nowhere is not the published one: its contents differ (SHA-256 "
    )
    assert f"instead of {fingerprint(*digits.splits)[:16]}...)" in message
    assert "shape" not in message


def test_missing_files_without_a_network_are_one_message(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_data("mnist", tmp_path, CPU)
    (message,) = str(caught.value).splitlines()
    assert message.startswith(
        f"The dataset mnist is not in {tmp_path / 'MNIST' / 'raw'} and could not be downloaded "
        f"(Temporary failure in name resolution). Put there: {', '.join(RAW_FILES)}; "
    )
    for way_out in ("--data-dir", "DPMAC_DATA_DIR", "--dataset digits"):
        assert way_out in message


# MNIST itself


@pytest.mark.real_data
def test_mnist_is_as_the_catalog_says(real_data_dir: Path) -> None:
    data = load_data("mnist", real_data_dir, CPU)
    check_against_catalog("mnist", data)
    assert data.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.tested.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    standardised = data.standardised(data.train.images[:10_000])
    assert abs(standardised.mean()) < 0.01
    assert abs(standardised.std() - 1) < 0.01
