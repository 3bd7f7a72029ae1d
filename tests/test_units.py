"""Units of privacy that hold several records: persons, customers, devices."""

import json
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from dpmac_cli import ArrayData, resume
from dpmac_cli.config.plan import Plan
from dpmac_cli.data.units import Units, units_in, units_of
from dpmac_cli.errors import InputError
from dpmac_cli.models.dataset import Data
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.training import data_sum
from dpmac_cli.training.augmentation import views_of
from tests.digits_runs import after, report_of
from tests.helpers import (
    Batches,
    Spy,
    declared,
    inspect,
    make_trainer,
    planned,
    records_of,
    tiny_data,
)
from tests.pairwise import all_pairs
from tests.typed import dpmac

#: Records of each unit.
SIZES = (1, 2, 3, 5, 8, 20, 1)
OWNERS = np.repeat(np.arange(len(SIZES)), SIZES)


def in_units() -> Data:
    """Records whose pixels and labels differ within a unit, not in the order of units."""
    data = tiny_data(records=len(OWNERS))
    units = units_of(np.random.default_rng(0).permutation(OWNERS))
    return replace(data, train=replace(data.train, units=units))


def words(units: int, seed: int = 0) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 2**64, units, dtype=np.uint64)


# Which records are taken.


@pytest.mark.promise("unit")
@pytest.mark.parametrize("count", [1, 3, 8])
def test_records_of_a_unit_are_its_own_and_none_comes_twice_too_early(count: int) -> None:
    owners = np.random.default_rng(3).permutation(OWNERS)
    units = units_of(owners)
    assert len(units) == len(SIZES)
    drawn = np.repeat(np.arange(len(SIZES)), 50)
    for unit, records in zip(drawn, units.records(drawn, words(len(drawn)), count), strict=True):
        assert set(owners[records]) == {unit}
        times = Counter(records.tolist()).values()
        assert max(times) <= -(-count // SIZES[unit])
        assert len(times) == min(count, SIZES[unit])


@pytest.mark.promise("unit")
def test_what_is_drawn_of_a_unit_does_not_depend_on_others() -> None:
    """Else one unit would move the gradients of all."""
    owners = np.random.default_rng(3).permutation(OWNERS)
    for removed in range(len(SIZES)):
        kept = np.flatnonzero(owners != removed)
        less, more = units_of(owners[kept]), units_of(owners)
        for unit in set(range(len(SIZES))) - {removed}:
            place = unit - (unit > removed)
            for word in words(20)[:, None]:
                one = more.records(np.array([unit]), word, 4)
                other = less.records(np.array([place]), word, 4)
                assert np.array_equal(one, kept[other])


# What a unit adds to a step.


def added(name: str, plan: Plan, data: Data, units: list[int], steps: int = 1) -> Any:
    """Whitened sums of steps that draw these units, without noise."""
    spy = Spy(0.0, 8)
    trainer = make_trainer(name, spy, plan=plan, data=data, sampler=Batches(units))
    for _ in range(steps):
        trainer.step()
    return [spy.whitened_sum(step) for step in range(steps)], spy


@pytest.mark.promise("unit")
@pytest.mark.parametrize(
    ("name", "records", "augment"),
    all_pairs(["dp-sgd", "dp-macadam", "adaclip"], [1, 3, 8], ["none", "flip"]),  # and their balls
)
def test_a_unit_moves_the_clipped_sum_by_at_most_one(name: str, records: int, augment: str) -> None:
    """However many records it has. Adam's second step is in an ellipsoid that is not the first."""
    chosen: dict[str, Any] = {"augmentations": 2, "augment": augment} if augment != "none" else {}
    plan, data = planned(unit="unit", records_per_unit=records, **chosen), in_units()
    everyone = list(range(len(SIZES)))
    [whole], _ = added(name, plan, data, everyone)
    for unit in everyone:
        others = [other for other in everyone if other != unit]
        [rest], _ = added(name, plan, data, others)
        moved = float((whole - rest).norm())
        assert 0 < moved <= 1
        [alone, later], _ = added(name, plan, data, [unit], steps=2)
        assert max(float(alone.norm()), float(later.norm())) <= 1


@pytest.mark.promise("unit")
def test_what_chooses_records_of_a_unit_does_not_augment_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, turned = list[Any](), list[Any]()
    records = Units.records

    def noted(units: Units, which: Any, words: Any, count: int) -> Any:
        chosen.append(words)
        return records(units, which, words, count)

    def augmented(images: Any, words: Any, kind: str) -> Any:
        turned.append(words)
        return views_of(images, words, kind)

    monkeypatch.setattr(Units, "records", noted)
    monkeypatch.setattr(data_sum, "views_of", augmented)
    plan = planned(unit="unit", records_per_unit=2, augmentations=2, augment="flip")
    added("dp-sgd", plan, in_units(), [0, 1])
    assert not np.isin(np.concatenate(chosen), np.concatenate(turned)).any()


# Own data.


def patients() -> tuple[Any, Any, Any]:
    """Numbers, classes and units of 120 records."""
    draws = np.random.default_rng(1)
    x = draws.normal(size=(120, 3))
    unit = draws.integers(0, 30, 120)
    return x, (x[:, 0] + draws.normal(0, 0.3, 120) > 0).astype(np.int64), unit


def write_npz(name: str = "scans.npz", **more: Any) -> Path:
    x, y, unit = patients()
    np.savez(name, x=x, y=y, **({"unit": unit} | more), low=-4, high=4, classes=["no", "yes"])
    return Path(name)


def write_table() -> None:
    x, y, unit = patients()
    lines = [
        "a,b,c,patient,ill",
        *(
            f"{a:.4f},{b:.4f},{c:.4f},p{p},{'yes' if label else 'no'}"
            for (a, b, c), p, label in zip(x, unit, y, strict=True)
        ),
    ]
    Path("visits.csv").write_text("\n".join(lines) + "\n")
    columns = "".join(f"  - {{name: {name}, range: [-4, 4]}}\n" for name in "abc")
    Path("schema.yaml").write_text(
        f"label: {{column: ill, classes: ['no', 'yes']}}\ncolumns:\n{columns}"
    )


@pytest.mark.promise("unit")
def test_a_unit_is_trained_on_or_tested_on() -> None:
    train, test = records_of(declared(write_npz()))
    x, _, unit = patients()
    owner = {row.astype(np.float32).tobytes(): u for row, u in zip(x, unit, strict=True)}
    sides = [
        {owner[np.asarray(row).ravel().tobytes()] for row in np.asarray(part.x)}
        for part in (train, test)
    ]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(unit.tolist())
    assert inspect(declared(Path("scans.npz"))).train_size == len(sides[0])


@pytest.mark.promise("unit")
def test_sampling_counts_units() -> None:
    plan = resolve({"dataset": str(write_npz()), "batch_size": "6", "sigma": "2"}).plan
    units = inspect(declared(Path("scans.npz"))).train_size
    assert units < 30
    assert plan.event.sampling_rate == 6 / units
    assert plan.records_in_a_step == 8


def test_a_run_names_its_unit_everywhere() -> None:
    write_table()
    flags = ("--dataset", "visits.csv", "--schema", "schema.yaml", "--unit", "patient")
    result = dpmac(
        "train", *flags, "--records-per-unit", "2", "--steps", "20", "--out", "run", "--sigma", "6"
    )
    assert result.exit_code == 0, result.output
    report = report_of("run")
    units = report["data"]["train_size"]
    assert f"{units} units" in result.output
    assert report["sentences"]["unit"] == "unit with all of its training records"
    assert (report["data"]["unit"], report["settings"]["records_per_unit"]) == ("patient", 2)
    said = "Adding or removing any one unit with all of its training records"
    assert report["sentences"]["guarantee"].startswith(said)
    assert "The number of units is public" in report["sentences"]["guarantee"]
    card = Path("run/model-card.md").read_text()
    assert said in card
    assert "given by `patient`" in card
    account = dpmac("account", "run")
    assert account.exit_code == 0
    assert "any one unit with all of its training records" in " ".join(account.output.split())
    everywhere = dpmac("account", "run", "--accountant", "all").output
    assert said in " ".join(everywhere.split())
    again = dpmac("eval", "run", "--json")
    assert again.exit_code == 0, again.output
    interval = json.loads(again.stdout)["intervals"]["accuracy"]  # of units, too
    assert interval == [report["scores"]["accuracy"][end] for end in ("low", "high")]
    assert re.search(r"\d+ held-out samples of \d+ units", dpmac("eval", "run").output)


def in_folders() -> Path:
    """Three images per person, of which every third person has some in both classes."""
    return pictures(
        *(
            f"{('ill', 'well')[(number == 0 and person % 3 == 0) ^ person % 2]}"
            f"/p{person:02}/{'series/' * (number == 2)}{number}.png"
            for person in range(24)
            for number in range(3)
        )
    )


@pytest.mark.promise("unit")
def test_records_of_a_folder_are_one_unit_at_any_depth_and_in_every_class() -> None:
    source = declared(in_folders(), unit="folder", test_fraction=0.3)
    train, test = records_of(source)
    assert train.unit is not None
    assert test.unit is not None
    assert len(train.y) + len(test.y) == 72
    counted = Counter([*train.unit.tolist(), *test.unit.tolist()])
    assert counted == {f"p{person:02}": 3 for person in range(24)}
    assert not set(train.unit.tolist()) & set(test.unit.tolist())
    assert inspect(source).train_size == len(set(train.unit.tolist()))
    for unit in set(train.unit.tolist()):
        if int(unit[1:]) % 3 == 0:  # in both classes
            assert set(train.y[train.unit == unit].tolist()) == {0, 1}


@pytest.mark.promise("unit")
def test_one_name_in_two_encodings_is_one_unit() -> None:
    pictures("train/ill/M\u00fcller/0.png", "train/well/Mu\u0308ller/1.png")
    pictures("test/ill/Meier/2.png", "test/well/Meier/3.png")
    found = inspect(declared(Path("scans"), unit="folder"))
    assert (found.train_size, found.test_size) == (1, 1)


@pytest.mark.promise("unit")
def test_a_folder_under_two_names_is_not_two_units() -> None:
    folder = in_folders()
    Path("scans/ill/p99").symlink_to(folder.resolve() / "ill/p02")
    Path("scans/ill/p01").mkdir(exist_ok=True)
    Path("scans/ill/p01/up").symlink_to(folder.resolve())
    with pytest.raises(InputError) as caught:
        inspect(declared(folder, unit="folder"))
    said = str(caught.value)
    assert "scans/ill/p99 is the same folder as scans/ill/p02" in said
    assert "scans/ill/p01/up is the same folder as scans;" in said


@pytest.mark.promise("unit")
def test_covered_scores_do_not_go_on_with_another_number_of_units() -> None:
    x, y, _ = patients()
    tested = {"x_test": x[:40], "y_test": y[:40]}

    def write(per_unit: int) -> str:
        return str(write_npz(**tested, unit_test=1000 + np.arange(40) % (40 // per_unit)))

    settings = {"dataset": write(2), "sigma": "6", "steps": "4", "cover_scores": True}
    finish(train_plan(resolve({**settings, "out": "stopped"}).plan, after(2)))
    write(4)
    with pytest.raises(InputError, match="numbers of records are not those"):
        resume("stopped", {})


@pytest.mark.long
def test_the_commands_of_the_guide_work_as_they_stand() -> None:
    guide = (Path(__file__).parents[1] / "docs" / "units.md").read_text()
    commands = re.findall(r"^dpmac train .*$", guide, re.MULTILINE)
    assert len(commands) == 6
    write_npz()
    write_table()
    Path("schema.yaml").rename("visits.yaml")
    draws = np.random.default_rng(0)
    for number in range(80):
        person = f"patient{number % 20}"
        place = Path("scans", "ill" if number % 2 else "well", person, f"{person}_{number}.png")
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (64, 64), dtype=np.uint8)).save(place)
    for command in commands:
        _, *args = shlex.split(command, comments=True)
        short = ("--steps", "2", "--batch-size", "3", "--sigma", "4", "--model", "linear")
        result = dpmac(*args, *short)
        assert result.exit_code == 0, f"{command}\n{result.output}"
        assert (" units, " in result.output) is ("digits" not in command)


# What a run says.


def pictures(*names: str) -> Path:
    draws = np.random.default_rng(0)
    for name in names:
        Path("scans", name).parent.mkdir(parents=True, exist_ok=True)
        picture = draws.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(picture).save(Path("scans", name))
    return Path("scans")


# The attack.


@pytest.mark.promise("unit")
@pytest.mark.parametrize(
    "word", ["-", "?", "n/a", "<NA>", "NaT", "k.A.", "Unknown", "unbekannt", "keine Angabe"]
)
def test_a_word_for_nobody_is_no_unit_without_a_declaration(tmp_path: Path, word: str) -> None:
    """Records of unknown persons do not become one person, in tables, arrays or folders."""
    names, faults = units_in(["p1", word, f" {word} ", "p2"])
    assert names.tolist() == ["p1", "", "", "p2"]
    assert list(faults) == [1, 2]
    x = np.zeros((40, 2))
    units = [word if n in (3, 7) else f"p{n}" for n in range(40)]
    data = ArrayData(x, np.arange(40) % 2, low=0, high=1, unit=units)
    with pytest.raises(InputError, match=r"record 3"):
        inspect(declared(data.path, in_memory=data))
    if "/" in word:
        return
    for kind in ("a", "b"):
        for person in (*map(str, range(9)), word):
            place = tmp_path / "scans" / kind / person
            place.mkdir(parents=True)
            Image.new("L", (8, 8), ord(kind)).save(place / "1.png")
    with pytest.raises(InputError, match="has no unit"):
        inspect(declared(tmp_path / "scans", unit="folder"))
    facts = inspect(declared(tmp_path / "scans", unit="folder", skip_bad=True))
    assert facts.train_size + facts.test_size == 9  # units


@pytest.mark.promise("unit")
def test_a_unit_with_training_and_test_records_is_refused() -> None:
    x = np.arange(8.0)[:, None]
    given: Any = {
        "x": x,
        "y": x[:, 0] % 2,
        "x_test": x + 8,
        "y_test": x[:, 0] % 2,
        "low": 0,
        "high": 20,
    }
    rows = np.arange(8)
    apart = ArrayData(**given, unit=rows, unit_test=rows + 8)
    assert resolve(dataset=apart, sigma=2, batch_size=4).plan.facts.train_size == 8
    with pytest.raises(InputError, match="1 unit, such as 7, has training and test records"):
        resolve(dataset=ArrayData(**given, unit=rows, unit_test=rows + 7), sigma=2, batch_size=4)
