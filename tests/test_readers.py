"""Readers of programs: one function and one registration, with the promises of all readers."""

import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpmac_cli import InputError, load, register_reader, train
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.reader import READERS, Reading
from tests.helpers import declared, inspect, records_of

QUICK: dict[str, Any] = {"sigma": 4, "steps": 2, "batch_size": 8, "device": "cpu", "out": "run"}
CLASSES = ("high", "low")


@pytest.fixture(autouse=True)
def _sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader of folders of WAV files, registered for one test, and such a folder."""
    monkeypatch.chdir(tmp_path)
    for row in range(40):
        write(Path("sounds", CLASSES[row % 2], f"{row}.wav"), row)
    register_reader("sounds", fits=has_sounds)(read_sounds)
    yield
    READERS.pop("sounds", None)


def write(file: Path, value: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(np.full(10, value * 100, "<i2").tobytes())


def samples(file: Path) -> Any:
    with wave.open(str(file), "rb") as sound:
        return np.frombuffer(sound.readframes(10), "<i2")


def has_sounds(dataset: Declaration) -> bool:
    return dataset.path.is_dir() and any(dataset.path.rglob("*.wav"))


def read_sounds(dataset: Declaration) -> Reading:
    files = sorted(dataset.path.rglob("*.wav"))
    x = np.stack([samples(file) for file in files]) / 2**15
    arrays = {"x": x, "low": -1, "high": 1, "name": [file.name for file in files]}
    if dataset.labels:
        arrays["y"] = [file.parent.name for file in files]
    return Reading(arrays)


def test_a_reader_of_a_program_is_one_function_and_one_registration() -> None:
    run = train(dataset="sounds", classes="high,low", **QUICK)
    assert run.report["data"]["train_size"] + run.report["data"]["test_size"] == 40
    found = load("run").predict("sounds/low")
    assert found.records[:2] == ["1.wav", "11.wav"]
    assert found.probabilities.shape == (20, 2)


def test_it_is_asked_before_those_of_the_package() -> None:
    assert inspect(declared("sounds", classes=CLASSES)).records.shape == (10,)
    READERS.pop("sounds")
    with pytest.raises(InputError, match="is not an image"):
        inspect(declared("sounds", classes=CLASSES))


def test_the_last_one_of_a_name_is_used() -> None:
    @register_reader("sounds", fits=has_sounds)
    def nothing(dataset: Declaration) -> Reading:
        raise InputError(f"{dataset.path} is silent.")

    with pytest.raises(InputError, match="sounds is silent"):
        inspect(declared("sounds", classes=CLASSES))


@pytest.mark.promise("reading")
def test_its_records_are_clipped_checked_and_split_like_all_others() -> None:
    whole = records_of(declared("sounds", classes=CLASSES))
    write(Path("sounds/low/1.wav"), 99)
    other = records_of(declared("sounds", classes=CLASSES))
    for before, after in zip(whole, other, strict=True):
        was, now = ({row.tobytes() for row in side.x} for side in (before, after))
        assert len(was - now) <= 1
    register_reader("sounds", fits=has_sounds)(lambda _: Reading({"x": [[1.0]], "y": [0]}))
    with pytest.raises(InputError, match="rows of numbers need a public range"):
        inspect(declared("sounds", classes=CLASSES))


NUMBERS = {"x": np.arange(40.0)[:, None], "y": [0, 1] * 20, "low": 0, "high": 40}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (NUMBERS, "returned dict: it must return a Reading"),
        (None, "returned NoneType: it must return a Reading"),
        (Reading({"x": NUMBERS["x"]}), "returned no array y"),
        (Reading({"y": NUMBERS["y"]}), "returned no array x"),
        (Reading(NUMBERS | {"key": ["a"]}), "returned key of 1 records, and x of 40"),
        (Reading(NUMBERS | {"name": ["a"]}), "returned name of 1 records, and x of 40"),
    ],
)
def test_what_a_reader_forgets_is_said(returned: Any, said: str) -> None:
    register_reader("sounds", fits=has_sounds)(lambda _: returned)
    with pytest.raises(InputError, match=f"The reader 'sounds' {said}"):
        inspect(declared("sounds", classes=CLASSES))


def test_records_may_be_named_by_numbers() -> None:
    named = Reading(NUMBERS | {"key": range(40)})
    register_reader("sounds", fits=has_sounds)(lambda _: named)
    train, test = records_of(declared("sounds", classes=CLASSES))
    assert len(train.x) + len(test.x) == 40


@pytest.mark.promise("published")
def test_what_a_reader_says_of_a_record_is_not_repeated() -> None:
    @register_reader("sounds", fits=has_sounds)
    def failing(_: Declaration) -> Reading:
        raise ValueError("the sound 1 2 3")

    said = "The reader 'sounds' failed on sounds: ValueError"
    with pytest.raises(InputError, match=said) as caught:
        inspect(declared("sounds", classes=CLASSES))
    assert "1 2 3" not in str(caught.value)
