"""From flags with several values to runs, each with an address of its own."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.errors import InputError
from dpmac_cli.studies.grid import Grid, plan

ROOT = Path("study")


def grid(**flags: Any) -> Grid:
    return plan({"dataset": "digits", **flags}, None, ROOT)


def faults(**flags: Any) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        grid(**flags)
    return caught.value.errors


def test_every_combination_is_run_with_every_seed() -> None:
    study = grid(optimizers="dp-sgd,dp-adam", sigma="1,2", lr="0.1,0.2", seeds="3")
    assert len(study.runs) == 2 * 2 * 2 * 3
    assert study.axes == ("optimizer", "lr")
    assert study.column == "sigma"
    assert study.seeds == (0, 1, 2)
    seen = {
        (r.plan.optimizer.name, r.plan.privacy.sigma, r.plan.optimizer.lr, r.seed)
        for r in study.runs
    }
    assert len(seen) == 24
    assert len({run.folder for run in study.runs}) == 24
    for run in study.runs:
        assert run.plan.settings.seed == run.seed
        assert run.column == run.plan.privacy.sigma
        assert dict(run.labels) == {
            "optimizer": run.plan.optimizer.name,
            "lr": f"{run.plan.optimizer.lr:g}",
        }


def test_a_setting_without_effect_is_no_second_run() -> None:
    """--kappa says nothing to DP-Adam, which is run once."""
    study = grid(optimizers="dp-adam,dp-macadam", kappa="paper,tracked", sigma="1", seeds="2")
    labels = [dict(run.labels) for run in study.runs]
    assert len(labels) == 2 + 4
    assert [row["kappa"] for row in labels] == ["", "", "paper", "paper", "tracked", "tracked"]


def test_epsilons_make_columns_of_the_noise_that_meets_them() -> None:
    study = grid(optimizers="dp-sgd,dp-adam", epsilon="0.1,0.2", seeds="1", epochs="1")
    assert study.column == "epsilon"
    for run in study.runs:
        config = run.plan
        assert run.column in (0.1, 0.2)
        price = total_epsilon((config.privacy.event,), config.privacy.delta)
        assert 0.99 * run.column < price <= run.column
    assert len({run.plan.privacy.sigma for run in study.runs}) == 2


@pytest.mark.parametrize(
    ("text", "seeds"), [("1", (0,)), ("3", (0, 1, 2)), ("3,7", (3, 7)), ("3,3,7", (3, 7))]
)
def test_seeds_are_how_many_or_which(text: str, seeds: tuple[int, ...]) -> None:
    assert grid(optimizers="dp-sgd", seeds=text).seeds == seeds


def test_the_address_is_the_settings_and_the_seed() -> None:
    one, again = (grid(optimizers="dp-sgd", sigma="1", seeds="2") for _ in range(2))
    assert [run.folder for run in one.runs] == [run.folder for run in again.runs]
    others = [
        grid(optimizers="dp-sgd", sigma="1", seeds="5,6"),
        grid(optimizers="dp-sgd", sigma="1.5", seeds="2"),
        grid(optimizers="dp-adam", sigma="1", seeds="2"),
        grid(optimizers="dp-sgd", sigma="1", seeds="2", epochs="3"),
        grid(optimizers="dp-sgd", sigma="1", seeds="2", lr="0.3"),
    ]
    folders = [run.folder for study in (one, *others) for run in study.runs]
    assert len(set(folders)) == len(folders)


@pytest.mark.privacy
@pytest.mark.parametrize("what", ["file", "folder", "schema"])
def test_runs_on_records_that_were_corrected_are_none_of_the_study(
    what: str, tmp_path: Path
) -> None:
    """Their epsilons may be of other units. The name tells when they changed, and no record."""
    data, schema = tmp_path / ("data.csv" if what == "schema" else "data.npz"), tmp_path / "s.yaml"
    flags = {"dataset": str(data), "optimizers": "dp-sgd", "sigma": "2", "seeds": "2"}
    changing = {"file": data, "folder": tmp_path / "photos" / "cat" / "1.png", "schema": schema}[
        what
    ]

    def write(value: int) -> None:
        if what == "folder":
            photos = [tmp_path / "photos" / name for name in ("cat", "dog")]
            for photo in (path / f"{n}.png" for path in photos for n in range(40)):
                photo.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 8), value, np.uint8)).save(photo)
            flags["dataset"] = str(tmp_path / "photos")
        elif what == "schema":
            data.write_text("age,ill\n" + "40,no\n50,yes\n" * 30)
            os.utime(data, ns=(5, 5))
            label = "label: {column: ill, classes: ['no', 'yes']}"
            schema.write_text(f"{label}\ncolumns: {{age: {{range: [0, {60 + value}]}}}}\n")
            flags["schema"] = str(schema)
        else:
            x, y = np.full((40, 3), value / 10), np.arange(40) % 2
            unit = np.arange(40) // 2 if value == 1 else np.arange(40) % 20
            np.savez(data, x=x, y=y, unit=unit, low=-9, high=99)
            flags["unit"] = "unit"

    def folders() -> list[Path]:
        return [run.folder for run in plan(flags, None, ROOT).runs]

    write(1)
    first = folders()
    assert folders() == first
    before = 0 if what == "folder" else changing.stat().st_mtime_ns
    write(2)
    second = folders()
    assert not {*first} & {*second}
    if before:
        os.utime(changing, ns=(before, before))
        assert folders() == first


def test_a_file_says_it_too_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(
        "dataset: digits\noptimizers: [dp-sgd, dp-adam]\nsigma: [1.0, 2.0]\nseeds: 2\n"
        "batch-size: 64\n"
    )
    study = plan({}, file, ROOT)
    assert len(study.runs) == 8
    assert {run.plan.privacy.batch_size for run in study.runs} == {64}
    fewer = plan({"sigma": "1.5", "seeds": "7"}, file, ROOT)
    assert {run.plan.privacy.sigma for run in fewer.runs} == {1.5}
    assert fewer.seeds == tuple(range(7))
    budget = plan({"epsilon": "3"}, file, ROOT)
    assert budget.column == "epsilon"


def test_every_fault_is_named_once() -> None:
    found = faults(optimizers="dp-sgd,dp-nothing", sigma="1,-1", lr="x,y")
    assert len(found) == len(set(found))
    text = "\n".join(found)
    for word in ("dp-nothing", "--sigma", "'x'", "'y'"):
        assert word in text


def test_a_study_has_an_end() -> None:
    many = ",".join(str(1 + n / 1000) for n in range(200))
    [fault] = faults(optimizers="dp-sgd", sigma=many, seeds="100")
    assert "10,000" in fault


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("unit", ["patient", "clinic"]),
        ("schema", ["one.yaml", "other.yaml"]),
        ("test_fraction", ["0.2", "0.3"]),
        ("split_seed", ["0", "1"]),
        ("dataset", ["digits", "mnist"]),
    ],
)
def test_runs_whose_epsilons_do_not_add_up_are_no_study(
    name: str, values: list[str], tmp_path: Path
) -> None:
    """A patient is protected once, and so is a clinic; nobody is in both totals."""
    flag = name.replace("_", "-")
    file = tmp_path / "study.yaml"
    file.write_text(f"sigma: 1\nseeds: 1\n{flag}: [{', '.join(values)}]\n")
    said = f"--{flag} {','.join(values)}: a study has one value of it"
    with pytest.raises(InputError, match=said):
        plan({"dataset": None if name == "dataset" else "digits"}, file, ROOT)
    if name != "unit":  # a pattern may contain a comma
        assert any(fault.startswith(said) for fault in faults(**{name: ",".join(values)}))
