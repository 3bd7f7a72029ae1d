"""Studies: from flags with several values to runs, their addresses, and what they cost together."""

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from PIL import Image
from scipy import stats

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.flags import choices_of
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.errors import InputError, as_flags
from dpmac_cli.release.plots import curves
from dpmac_cli.release.report import events_of
from dpmac_cli.release.train import resume_folder, train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.studies import local, written
from dpmac_cli.studies.grid import NOT_STUDIED, Grid, address, listed_values, plan
from dpmac_cli.studies.local import arguments
from dpmac_cli.studies.results import (
    FEWEST,
    Cell,
    Comparison,
    collect,
    finished_report,
    holm,
    judge,
    paired,
)
from dpmac_cli.studies.written import as_json, as_markdown, study_figure, write_comparison
from dpmac_cli.tasks.task import METRICS
from tests.digits_runs import after

ROOT = Path("study")


def grid(**flags: Any) -> Grid:
    return plan({"dataset": "digits", **flags}, None, ROOT)


def faults(**flags: Any) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        grid(**flags)
    return tuple(map(as_flags, caught.value.errors))


def test_every_combination_is_run_with_every_seed() -> None:
    study = grid(optimizers="dp-sgd,dp-adam", sigma="1,2", lr="0.1,0.2", seeds="3")
    assert len(study.runs) == 2 * 2 * 2 * 3
    assert study.axes == ("optimizer", "lr")
    assert study.column == "sigma"
    assert study.seeds == (0, 1, 2)
    assert len({run.folder for run in study.runs}) == 24
    for run in study.runs:
        assert run.plan.settings.seed == run.seed
        assert run.column == run.plan.event.noise_multiplier
        assert dict(run.labels) == {
            "optimizer": run.plan.optimizer.name,
            "lr": f"{run.plan.optimizer.lr:g}",
        }


def test_a_text_with_commas_is_one_value() -> None:
    for name, field in SETTINGS.items():
        if example := re.search(r"such as (\S+,\S+)$", choices_of(field).known):
            assert listed_values(name, example[1]) == [example[1]], name
    assert listed_values("lr", "0.1,0.2") == ["0.1", "0.2"]


def test_a_list_of_the_parts_of_a_text_is_one_value() -> None:
    assert listed_values("class_weights", [1, 15]) == ["1,15"]
    assert listed_values("class_weights", ["1,15", "balanced"]) == ["1,15", "balanced"]
    assert listed_values("class_weights", [[1, 15], (1, 2)]) == ["1,15", "1,2"]
    assert listed_values("unit", ["patient", "clinic"]) == ["patient", "clinic"]


def test_contradictions_are_reported_with_faults_of_values(tmp_path: Path) -> None:
    assert faults(sigma="1", epsilon="3", batch_size="x") == (
        "--batch-size: Input should be a valid integer, not 'x'.",
        "--sigma and --epsilon contradict each other: give one.",
    )
    file = tmp_path / "study.yaml"
    file.write_text("lr: y\nfeatures: scatter\nbackbone: efficientnet-lite0\n")
    with pytest.raises(InputError) as caught:
        plan({"dataset": "digits"}, file, ROOT)
    value, both = caught.value.errors
    assert value.startswith(f"{file}, line 1: lr: Input should be a valid number")
    assert both.startswith(f"{file}, line 2: backbone and features contradict each other")


def test_a_setting_without_effect_is_no_second_run() -> None:
    """--kappa says nothing to DP-Adam, which is run once."""
    study = grid(optimizers="dp-adam,dp-macadam", kappa="paper,tracked", sigma="1", seeds="2")
    labels = [dict(run.labels) for run in study.runs]
    assert len(labels) == 2 + 4
    assert [row["kappa"] for row in labels] == ["", "", "paper", "paper", "tracked", "tracked"]


def test_epsilons_make_columns_of_the_noise_that_meets_them() -> None:
    study = grid(
        optimizers="dp-sgd,dp-adam", epsilon="0.1,0.2", seeds="1", epochs="1", batch_size="1437"
    )
    assert study.column == "epsilon"
    for run in study.runs:
        config = run.plan
        assert run.column in (0.1, 0.2)
        price = total_epsilon(config.planned, config.settings.delta)
        assert 0.99 * run.column < price <= run.column
    assert len({run.plan.event.noise_multiplier for run in study.runs}) == 2


def test_the_address_is_the_settings_and_the_seed() -> None:
    one, again = (grid(optimizers="dp-sgd", sigma="1", seeds="2") for _ in range(2))
    assert [run.folder for run in one.runs] == [run.folder for run in again.runs]
    changes = ({"seeds": "5,6"}, {"sigma": "1.5"}, {"optimizers": "dp-adam"}, {"lr": "0.3"})
    others = [
        grid(**{"optimizers": "dp-sgd", "sigma": "1", "seeds": "2", **more}) for more in changes
    ]
    folders = [run.folder for study in (one, *others) for run in study.runs]
    assert len(set(folders)) == len(folders)


@pytest.mark.promise("price")
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


@pytest.mark.promise("price")
def test_runs_of_other_public_weights_are_none_of_the_study(tmp_path: Path) -> None:
    """A file of the same name may hold others, so that runs would be of another network."""
    [run] = grid(optimizers="dp-sgd", sigma="1", seeds="1").runs
    weights, folders = tmp_path / "weights", list[str]()
    settings = run.plan.settings.replace(pretrained=weights)
    for content in (b"one", b"other", b"one"):
        weights.write_bytes(content)
        folders.append(address(replace(run.plan, settings=settings), run.seed))
    assert folders[0] == folders[2]
    assert len({*folders, run.folder.name}) == 3


def test_flags_take_precedence_over_a_file_and_it_over_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("recipe: digits\noptimizers: dp-sgd\nsigma: 2\nlr: [0.1, 0.2]\nseeds: 1\n")
    [run] = plan({"lr": "0.3", "clip_norm": "2"}, file, ROOT).runs
    assert (run.plan.optimizer.lr, run.plan.recorded["clip_norm"]) == (0.3, 2)
    assert run.plan.event.noise_multiplier == 2  # 1.5 in the recipe
    assert (run.plan.facts.typed, run.plan.event.steps) == ("digits", 240)


@pytest.mark.promise("price")
def test_a_run_that_ended_before_its_last_step_is_not_finished(tmp_path: Path) -> None:
    """Its row would be of fewer steps. A run for an epsilon may end earlier to keep to it."""
    flags = {"dataset": "digits", "optimizers": "dp-sgd", "steps": "4", "seeds": "1"}
    [fixed] = plan({**flags, "sigma": "6"}, None, tmp_path).runs
    settings = fixed.plan.settings.replace(epsilon=0.5)
    budgeted = replace(fixed, plan=replace(fixed.plan, settings=settings))
    fixed.folder.mkdir()

    def found(steps: int, state: str) -> list[bool]:
        report = {"state": state, "network": {"steps": steps}}
        (fixed.folder / "report.json").write_text(json.dumps(report))
        return [finished_report(run) is not None for run in (fixed, budgeted)]

    assert found(4, "finished") == [False, False]  # no checksums
    (fixed.folder / "SHA256SUMS").touch()
    assert found(4, "finished") == [True, True]
    assert found(3, "finished") == [False, True]
    assert found(4, "interrupted") == [False, False]
    (fixed.folder / "report.json").write_text(json.dumps({"schema_version": 2}))
    with pytest.raises(InputError, match="written by an older version"):
        finished_report(fixed)


def test_a_figure_has_the_mean_scores_of_finished_runs_by_epsilon_and_by_epoch(
    tmp_path: Path,
) -> None:
    flags = {"dataset": "digits", "optimizers": "dp-sgd,dp-adam", "sigma": "6", "epochs": "2"}
    study = plan({**flags, "seeds": "2"}, None, tmp_path)
    for number, run in enumerate(study.runs[:3]):  # the last one is not finished
        run.folder.mkdir()
        report = {"state": "finished", "network": {"steps": run.plan.event.steps}}
        (run.folder / "report.json").write_text(json.dumps(report))
        (run.folder / "SHA256SUMS").touch()
        scores = (0.2 + number / 10, 0.6 + number / 10)
        lines = [
            {"epoch": epoch, "epsilon": epoch / 10, "test_accuracy": score}
            for epoch, score in enumerate(scores, 1)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (run.folder / "metrics.jsonl").write_text(text)
    by_epsilon, by_epoch = study_figure(study).get_axes()
    for panel, places in ((by_epsilon, [0.1, 0.2]), (by_epoch, [1, 2])):
        first, second = panel.get_lines()
        assert (first.get_label(), second.get_label()) == ("dp-sgd, sigma 6", "dp-adam, sigma 6")
        assert (
            np.asarray(first.get_xdata()).tolist()
            == np.asarray(second.get_xdata()).tolist()
            == places
        )
        assert np.asarray(first.get_ydata()).tolist() == pytest.approx([25, 65])
        assert np.asarray(second.get_ydata()).tolist() == pytest.approx([40, 80])


@pytest.mark.promise("price")
@pytest.mark.parametrize("delta", [1e-8, 1e-3])
def test_every_epsilon_of_a_study_is_at_its_own_delta(delta: float, tmp_path: Path) -> None:
    flags = {"dataset": "digits", "optimizers": "dp-sgd", "sigma": "6", "steps": "13"}
    study = plan({**flags, "seeds": "2", "delta": f"{delta}"}, None, tmp_path)
    event = study.plan.event
    one, both = total_epsilon((event,), delta), total_epsilon((event, event), delta)
    found = collect(study, {})
    assert (found.cells[0].epsilon, found.epsilon) == (one, both)
    assert f"epsilon {format_epsilon(both)} at delta {delta:g} in total" in as_markdown(found)
    assert as_json(found)["delta"] == delta
    _, row = study.planned()
    assert row[2] == format_epsilon(one)


@pytest.mark.promise("price")
def test_what_a_study_does_not_have_is_refused() -> None:
    for name in NOT_STUDIED[1:]:
        said = faults(sigma="1", **{name: "1"})
        assert any(f"--{name.replace('_', '-')} is of a single run" in fault for fault in said)


@pytest.mark.promise("reading")
def test_a_column_shows_the_largest_epsilon_of_its_runs() -> None:
    cells = [shown(name, 1.0, 0.9, epsilon=e) for name, e in (("dp-sgd", 2.0), ("dp-adam", 4.0))]
    for order in (cells, cells[::-1]):
        assert as_markdown(comparison(*order)).splitlines()[2].split()[3] == "4"


def test_a_kill_leaves_no_checksums_of_another_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_comparison(WHOLE, tmp_path)
    assert (tmp_path / "SHA256SUMS").exists()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(written, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        write_comparison(comparison(*CELLS[:2]), tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_run_is_a_command_with_the_settings_that_were_typed(tmp_path: Path) -> None:
    """From which the same plan follows, so its folder counts wherever the command is run."""
    flags = {"optimizers": "dp-sgd,dp-macadam", "kappa": "paper,exact", "epsilon": "1,3"}
    more = {
        "seeds": "7",
        "class_weights": [1, *[2] * 9],
        "checkpoint_every": "5",
        "recipe": "paper",
    }
    study = plan({"dataset": "digits", **flags, **more}, None, tmp_path)
    for run in study.runs:
        name, out, *typed, seed, quiet = arguments(run, "cpu")[:1] + arguments(run, "cpu")[2:]
        assert (name, out, seed, quiet) == (
            "train",
            str(run.folder),
            f"--seed={run.seed}",
            "--quiet",
        )
        given = dict(flag.removeprefix("--").split("=", 1) for flag in typed)
        assert given.pop("checkpoint-every") == "5"
        again = resolve({flag.replace("-", "_"): value for flag, value in given.items()}).plan
        assert address(again, run.seed) == run.folder.name
        assert again.event == run.plan.event
    [baseline, *_] = plan({"dataset": "digits", "no_dp": True}, None, tmp_path).runs
    assert "--no-dp" in arguments(baseline, "cpu")


def test_what_a_network_prints_is_not_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    [run] = grid(optimizers="dp-sgd", sigma="1", seeds="1").runs
    monkeypatch.setattr(local, "arguments", lambda *_: ["--version"])
    assert local.Command(run, "cpu", threads=1).failure() is None
    out, error = capfd.readouterr()
    assert (out, error.split()[0]) == ("", "dpmac")


def test_a_study_has_an_end() -> None:
    many = ",".join(str(1 + n / 1000) for n in range(200))
    [fault] = faults(optimizers="dp-sgd", sigma=many, seeds="100")
    assert "10,000" in fault


@pytest.mark.promise("price")
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


def cell(*accuracies: float, name: str = "a", **changes: Any) -> Cell:
    failures: dict[int, str] = changes.pop("failures", {})
    values: dict[str, Any] = {
        "labels": (("optimizer", name),),
        "column": 1.0,
        "sigma": 1.0,
        "epsilon": 2.0,
        "values": dict(enumerate(accuracies)),
        "failures": failures,
        "seconds": 1.0,
    }
    return Cell(**{**values, **changes})


def test_differences_are_paired_over_common_seeds() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.9, 0.01, 6), rng.normal(0.89, 0.01, 6)
    tested = stats.ttest_rel(one, other)
    low, high = tested.confidence_interval(0.95)
    expected = (np.mean(one - other), low, high, tested.pvalue)
    assert paired(dict(enumerate(one)), dict(enumerate(other))) == pytest.approx(expected)
    # A seed that only one of them has does not count, in whatever order they come.
    extra = dict(reversed([*enumerate(one), (9, 0.1)]))
    assert paired(extra, dict(enumerate(other))) == pytest.approx(expected)
    alike = paired(dict(enumerate(one)), {seed: value - 0.1 for seed, value in enumerate(one)})
    assert alike == pytest.approx((0.1, 0.1, 0.1, 1))


def holm_by_definition(p_values: Sequence[float], level: float) -> list[bool]:
    """Reject i if its adjusted p-value, a running maximum, is at most the level."""
    order = np.argsort(p_values, kind="stable")
    count = len(p_values)
    adjusted = np.maximum.accumulate([(count - k) * p_values[i] for k, i in enumerate(order)])
    rejected = [False] * count
    for k, i in enumerate(order):
        rejected[i] = bool(adjusted[k] <= level)
    return rejected


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([]) == []
    for p_values in itertools.product([0.001, 0.012, 0.02, 0.04, 0.2], repeat=3):
        assert holm(p_values) == holm_by_definition(p_values, 0.05)


def standings(*cells: Cell) -> list[str]:
    """The standings of cells of a column, each of a row of its own."""
    apart = [replace(cell, labels=(("optimizer", str(n)),)) for n, cell in enumerate(cells)]
    return [cell.standing for cell in judge(apart, METRICS["accuracy"])]


GOOD, BAD = (0.90, 0.91, 0.92, 0.93, 0.94), (0.80, 0.811, 0.82, 0.83, 0.84)


def test_the_best_is_best_only_where_all_others_are_worse() -> None:
    good, same, bad = cell(*GOOD), cell(0.901, 0.909, 0.921, 0.931, 0.938), cell(*BAD)
    assert standings(bad, good) == ["", "best"]
    assert standings(good, bad, same) == ["tied", "", "tied"]


def test_a_row_stands_beside_the_best_with_its_difference() -> None:
    cells = shown("dp-adam", 1.0, *BAD), shown("dp-sgd", 1.0, *GOOD)
    bad, good = judge(cells, METRICS["accuracy"])
    found = paired(bad.values, good.values)
    assert found is not None
    assert (bad.difference, good.difference) == (found, None)
    study = comparison(bad, good)
    assert f"| dp-adam | {100 * found.mean:.2f} [{100 * found.low:.2f}, " in as_markdown(study)
    row, best = as_json(study)["rows"]
    assert (row["difference"], *row["difference_interval"]) == found[:3]
    assert best["difference"] is best["difference_interval"] is None


def test_four_seeds_show_nothing() -> None:
    """A t-test of two differences finds 67.2 to be no worse than 81.9."""
    good, bad = cell(0.815, 0.823, 0.82, 0.81), cell(0.66, 0.684, 0.65, 0.66)
    assert standings(good, bad) == ["", ""]
    few = {seed: 0.001 * seed for seed in range(FEWEST - 1)}
    assert paired(dict.fromkeys(few, 9.0), few) is None
    text = as_markdown(comparison(good, bad))
    assert "with fewer than five finished runs per row, a difference cannot be told from" in text
    assert "~" not in text
    assert "t-test" not in text
    for seeds, said in ((5, "Five seeds show only a difference of 1.2"), (10, "ten 0.7")):
        assert said in text
        least = stats.t.ppf(0.975, seeds - 1) / math.sqrt(seeds)
        assert least == pytest.approx({5: 1.2, 10: 0.7}[seeds], rel=0.05)


def test_none_is_the_best_beside_a_row_that_was_not_tested() -> None:
    """Most of its runs failed, but those that did not were better."""
    good, bad, few = cell(*GOOD), cell(*BAD), cell(0.95, 0.96)
    assert standings(good, bad, few) == ["tied", "", ""]
    text = as_markdown(comparison(good, bad, few))
    assert "Rows with fewer than five finished runs are not tested" in text
    assert "not tested" not in as_markdown(comparison(good, bad))


@pytest.mark.promise("price")
@pytest.mark.parametrize("changed", [{"sigma": "2"}, {"steps": "6"}, {"lr": "0.1"}])
def test_a_run_replaced_by_its_resume_into_another_folder_is_charged_as_that(
    changed: dict[str, str], tmp_path: Path
) -> None:
    flags = {"dataset": "digits", "optimizers": "dp-sgd", "sigma": "6", "steps": "4", "seeds": "2"}
    study = plan({**flags, "device": "cpu"}, None, tmp_path)
    for one in study.runs:
        list(train_plan(one.plan, after(3)))
    where, replaced = tmp_path / "longer", study.runs[0].folder
    list(resume_folder(replaced, {**changed, "out": where}))
    shutil.rmtree(replaced)
    where.rename(replaced)
    list(resume_folder(study.runs[1].folder))
    done = [event for one in study.runs for event in events_of(one.folder)]
    assert collect(study, {}).epsilon == pytest.approx(total_epsilon(tuple(done), 1e-5), rel=1e-9)
    assert sum(event.steps for event in done) == 4 + int(changed.get("steps", 4))


@pytest.mark.promise("price")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_study_costs_what_all_of_its_runs_cost(sampler: str, tmp_path: Path) -> None:
    """A run pays for whole epochs: 13 steps of epochs of 12 cost as much as 24 steps."""
    flags = {"dataset": "digits", "optimizers": "dp-sgd", "sampler": sampler}
    study = plan({**flags, "sigma": "6,8", "steps": "13", "seeds": "3"}, None, tmp_path)
    steps = 3 * 24 if SAMPLERS[sampler].once_an_epoch else 3 * 13
    events = tuple(TrainingEvent(128 / 1437, sigma, steps, sampler, 12) for sigma in (6.0, 8.0))
    assert collect(study, {}).epsilon == pytest.approx(total_epsilon(events, 1e-5), rel=1e-9)


# A comparison as Markdown and JSON: what must be said beside it.


def shown(name: str, sigma: float, *accuracies: float, **changes: Any) -> Cell:
    """A cell of a table with a second axis, which dp-macadam alone has."""
    values: dict[str, Any] = {
        "labels": (("optimizer", name), ("kappa", "paper_x" if name == "dp-macadam" else "")),
        "column": sigma,
        "sigma": sigma,
        "epsilon": 3 / sigma if sigma else math.inf,
        "seconds": 1.5 if accuracies else math.nan,
    }
    return cell(*accuracies, **{**values, **changes})


CELLS = (
    shown("dp-adam", 0.5, 0.90, 0.91, 0.92, 0.93, 0.94, standing="tied"),
    shown("dp-adam", 1.0, 0.80, 0.81, 0.82, 0.83, 0.84),
    shown("dp-macadam", 0.5, 0.91, 0.92, 0.93, 0.94, 0.95, standing="tied"),
    shown("dp-macadam", 1.0, 0.88, 0.89, 0.89, 0.88, 0.89, standing="best"),
    shown("dp-sgd", 0.5, failures={0: "its process died", 1: "no"}),
)


GRID = plan({"dataset": "mnist", "kappa": "paper,exact", "sigma": "0.5,1", "seeds": "2"}, None)


def comparison(*cells: Cell, epsilon: float = 12.345) -> Comparison:
    return Comparison(GRID, cells, epsilon)


WHOLE = comparison(*CELLS)


@pytest.mark.promise("reading")
def test_every_form_says_what_the_epsilons_are_worth() -> None:
    for text in (as_markdown(WHOLE), json.dumps(as_json(WHOLE))):
        assert "epsilon 12.35" in text  # rounded up
        assert "The 22 runs, 2 of them not finished and counted in full, use the same" in text
        # What one seed draws for one, it draws for all.
        assert "So no epsilon bounds anything learnt from all of them" in text
        assert "Publish at most one of them. Drawn independently, all would cost" in text
        assert "Test scores are exact, and not covered by any epsilon." in text
        assert "costs epsilon" not in text
        assert "know the seeds" in text
        assert "paired two-sided t-test" in text
    finished = as_markdown(comparison(*CELLS[:2]))
    assert "not finished" not in finished
    assert "runs use the same records" in finished
    assert "Other runs on the same records add" in finished
    one = comparison(shown("dp-sgd", 1.0, 0.9), epsilon=3.0)
    assert "know the seeds" in as_markdown(one)
    assert "in total" not in as_markdown(one)
    twice = as_markdown(comparison(shown("dp-sgd", 1.0, 0.9), epsilon=4.0))
    assert "in total" in twice  # an attempt before that one is charged
    alike = as_markdown(comparison(shown("dp-sgd", 1.0, 0.9, 0.9)))
    assert "in total" in alike
    assert "Publish at most one" not in alike
    assert "learnt from all of them, such as which is best, costs epsilon" in alike
    baseline = comparison(shown("dp-sgd", 0.0, 0.9, 0.9, epsilon=math.inf), epsilon=0.0)
    assert "seeds named" not in as_markdown(baseline)
    assert "no privacy" in as_markdown(baseline)


def test_a_comparison_is_as_its_schema_describes() -> None:
    path = Path(__file__).parent.parent / "docs" / "compare.schema.json"
    schema = json.loads(path.read_text())
    written = json.loads(json.dumps(as_json(WHOLE)))
    assert [fault.message for fault in Draft202012Validator(schema).iter_errors(written)] == []
    of_numbers = {**written["rows"][0], "mean": 7.5, "values": {"0": 7.5}}  # an error, not a share
    written["rows"] = [of_numbers]
    assert [*Draft202012Validator(schema).iter_errors(written)] == []
    written["rows"] = [{**of_numbers, "standing": "first"}]
    assert [*Draft202012Validator(schema).iter_errors(written)]


def test_lines_on_each_other_are_told_apart_without_colour() -> None:
    points = [
        {"epoch": epoch, "epsilon": epoch / 10, "test_accuracy": 0.5 + epoch / 100}
        for epoch in range(1, 21)
    ]
    cells = {f"cell {number}": points for number in range(9)}
    figure = curves(cells, METRICS["accuracy"])
    for panel in figure.get_axes():
        lines = panel.get_lines()
        assert len({line.get_marker() for line in lines}) == len(lines)
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines)
        first, second = (line.get_markevery() for line in lines[:2])
        assert first != second  # neighbours have marks at different points
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*cells]
