"""Tables of which only the kind of each column is declared."""

import contextlib
import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml

import dpmac_cli
from dpmac_cli import resume
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.records import PLACES, Table
from dpmac_cli.data.column_schema import Column
from dpmac_cli.data.table_cells import hashed_in
from dpmac_cli.errors import ModelError
from dpmac_cli.features.counts import Distribution, distributions
from dpmac_cli.features.tables import TableInputs
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs import checkpoint, trainer, uncounted
from dpmac_cli.runs.ledger import read_ledger
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.training.distributed import Ranks
from tests.digits_runs import after
from tests.typed import dpmac

pytestmark = pytest.mark.promise("ranges")

KINDS = """\
label: {column: y, classes: [bad, good]}
columns:
  age: {type: number}
  income: {type: number}
  job: {type: category}
  smoker: {type: boolean}
  since: {type: date}
"""


def people(records: int = 1500, seed: int = 0) -> pd.DataFrame:
    draws = np.random.default_rng(seed)
    age = draws.integers(18, 90, records)
    income = np.exp(draws.normal(10, 1, records)).round(2)
    job = draws.choice(["a", "b", "c", "d"], records)
    smoker = draws.choice(["yes", "no"], records)
    since = pd.Timestamp("2020-01-01") + pd.to_timedelta(draws.integers(0, 1000, records), "D")
    score = age / 30 + np.log(income) - 10 + 1.5 * (job == "a") + (smoker == "yes")
    good = score + draws.normal(0, 0.5, records) > 2.9
    return pd.DataFrame(
        {
            "age": age,
            "income": income,
            "job": job,
            "smoker": smoker,
            "since": since.strftime("%Y-%m-%d"),
            "y": np.where(good, "good", "bad"),
        }
    )


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table and its schema of kinds, in the current folder."""
    monkeypatch.chdir(tmp_path)
    people().to_csv("people.csv", index=False)
    Path("kinds.yaml").write_text(KINDS)
    return tmp_path


TRAIN = ("train", "--dataset", "people.csv", "--schema", "kinds.yaml", "--epsilon", "3")


def plan(**settings: Any) -> Any:
    return resolve(dataset="people.csv", schema="kinds.yaml", **{"epsilon": 3.0, **settings})


def report_of(folder: str = "run") -> dict[str, Any]:
    read: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text())
    return read


@pytest.mark.promise("target")
def test_a_table_of_kinds_is_trained_by_one_command_within_epsilon(table: Path) -> None:
    made = dpmac(*TRAIN, "--out", "run")
    assert made.exit_code == 0, made.output
    report = report_of()
    events = events_of(report)
    counts = Counter(event.histogram for event in events)
    assert counts == {False: 1, True: 4}  # steps; three rounds of counts, and a calibration
    delta = report["delta"]
    assert report["epsilon"] == total_epsilon(events, delta) <= 3
    # By hand: a tenth of mu^2 in the ratio 2 : 3 : 5, and a fiftieth for the calibration.
    signals = [event.noise_multiplier**-2 for event in events if event.histogram]
    expected = np.array([0.02, 0.02, 0.03, 0.05])
    assert np.sort(signals) / sum(signals) == pytest.approx(expected / expected.sum(), rel=1e-4)
    assert report["scores"]["accuracy"]["value"] > 0.7
    card = (table / "run" / "model-card.md").read_text()
    for name, (low, high) in report["data"]["ranges"].items():
        assert f"`{name}`, a " in card
        ends = f"{low:.4g} to {high:.4g}"
        if name == "since":
            ends = " to ".join(str(np.datetime64(int(day), "D")) for day in (low, high))
            assert re.search(r"a date of .*: [-\d]+ to [-\d]+, by noisy", card)
        assert ends in card
    assert "index of the class" not in card
    assert "print(predictions.predicted, predictions.probabilities)" in card
    assert {"age", "income", "since"} == report["data"]["ranges"].keys()


def test_the_screen_names_the_counts_and_predictions_take_new_words_and_gaps(table: Path) -> None:
    made = dpmac(*TRAIN, "--out", "run", "--epochs", "3")
    assert "ranges found before the first step by histograms" in made.output
    longer = dpmac("train", "--resume", "run", "--out", "longer", "--epochs", "4")
    assert "ranges kept from the steps before, which paid for them" in longer.output
    assert "ranges found" not in longer.output
    rows = people(4, seed=1).drop(columns="y").astype(object)
    rows.loc[0, "job"] = "never seen"
    rows.loc[1, "age"] = "?"
    rows.loc[2, ["smoker", "since"]] = None
    rows.loc[3, "income"] = 1e300
    rows.to_csv("new.csv", index=False)
    made = dpmac("predict", "run", "new.csv", "--out", "answers.csv")
    assert made.exit_code == 0, made.output
    assert "1 cell of age is no number, and counts as missing" in " ".join(made.output.split())
    answers = pd.read_csv("answers.csv")
    assert len(answers) == 4
    assert answers[["p_bad", "p_good"]].notna().to_numpy().all()
    assert dpmac("eval", "run").exit_code == 0
    made = dpmac("predict", "run", "new.csv", "--out", "fewer.csv", "--skip-bad")
    assert "counts as missing" not in " ".join(made.output.split())
    assert made.exit_code == 0, made.output
    printed = " ".join(made.output.split())
    assert "1 record of new.csv is left out: Record 2 has no number in age: '?'" in printed
    assert pd.read_csv("fewer.csv")["row"].tolist() == [0, 2, 3]


@pytest.mark.promise("reading")
def test_a_cell_that_is_no_number_is_missing_and_stops_nothing(table: Path) -> None:
    frame = people().astype(object)
    frame.loc[3, "age"] = "unknown"
    frame.loc[[4, 5], "smoker"] = "perhaps"
    frame.to_csv("people.csv", index=False)
    resolved = plan()
    assert "1 cell of age is no number, and counts as missing" in " ".join(resolved.private_notes)
    assert (
        "2 cells of smoker are no truth value, and count as missing (records 5 and 6)"
        in " ".join(resolved.private_notes)
    )
    assert "missing" not in " ".join([*resolved.notes, *resolved.chosen])


@pytest.mark.promise("reading")
def test_a_number_to_predict_needs_no_range(table: Path) -> None:
    frame = people()
    frame["y"] = 1000 * (frame.age / 30 + np.log(frame.income)) + 50
    frame.to_csv("people.csv", index=False)
    Path("kinds.yaml").write_text(KINDS.replace("classes: [bad, good]", "type: number"))
    made = dpmac(*TRAIN, "--out", "run")
    assert made.exit_code == 0, made.output
    report = report_of()
    low, high = report["data"]["target"]["low"], report["data"]["target"]["high"]
    middle = frame.y.quantile([0.05, 0.95])
    assert low < middle.iloc[0]
    assert high > middle.iloc[1]
    assert high - low < 10 * (frame.y.max() - frame.y.min())
    assert report["scores"]["r2"]["value"] > 0.3
    assert report["epsilon"] <= 3
    assert sum(event["histogram"] for event in report["events"]) == 8
    scored = dpmac("eval", "run")
    assert scored.exit_code == 0, scored.output
    predictions = dpmac_cli.load("run").predict(frame.drop(columns="y").head(20))
    assert np.all(np.array(predictions.predicted) >= low - 1)
    card = Path("run/model-card.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    frame.head(20).to_csv("new.csv", index=False)
    said = io.StringIO()
    with contextlib.chdir("run"), contextlib.redirect_stdout(said):
        exec(code.replace("new.csv", "../new.csv"), {})
    assert said.getvalue().strip() == str(dict(predictions.columns))
    assert list(predictions.columns) == ["predicted", "low", "high"]
    assert "index of the class" not in card


def events_of(report: dict[str, Any]) -> tuple[TrainingEvent, ...]:
    return tuple(TrainingEvent(**event) for event in report["events"])


def killed() -> Callable[..., Any]:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    return die


@pytest.mark.promise("ledger")
@pytest.mark.promise("resume")
def test_ranges_are_paid_for_once_when_stored_and_again_when_not(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = plan(epochs=4, out="run")
    whole = wanted.plan
    with monkeypatch.context() as patched:
        patched.setattr(uncounted.Uncounted, "prepared", killed())
        with pytest.raises(KeyboardInterrupt):
            finish(train_plan(wanted))
    account = read_ledger(Path("run"))
    assert account is not None
    assert [event for event in account.events if event.histogram] == [*whole.ranges]
    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "calibrate", killed())
        with pytest.raises(KeyboardInterrupt):
            resume("run")
    account = read_ledger(Path("run"))
    assert account is not None
    again = [event for event in account.events if event.histogram]
    assert Counter(again) == Counter([*whole.ranges] * 2)  # the first ones were lost
    stored = counted_in("run")
    report = resume("run").report
    events = events_of(report)
    found = Counter(event for event in events if event.histogram)
    assert found[whole.ranges[1]] == 2
    assert report["epsilon"] <= 3
    assert report["data"]["ranges"]["age"] == stored


def counted_in(folder: str) -> list[float]:
    tensors = checkpoint_of(folder)
    return [tensors["ranges.low"][0].item(), tensors["ranges.high"][0].item()]


def checkpoint_of(folder: str) -> Any:
    return checkpoint.read(Path(folder)).tensors


@pytest.mark.promise("resume")
def test_more_epochs_keep_the_ranges_and_draw_the_calibration_anew(table: Path) -> None:
    first = finish(train_plan(plan(epochs=4, out="run"))).report
    more = resume("run", epochs=6, out="more").report
    assert more["data"]["ranges"] == first["data"]["ranges"]
    events = events_of(more)
    assert sum(event.histogram for event in events) == 5  # three rounds, two calibrations
    assert more["epsilon"] == total_epsilon(events, more["delta"])


@pytest.mark.promise("resume")
def test_ranges_are_kept_by_a_run_that_is_too_short_to_find_them(table: Path) -> None:
    finish(train_plan(plan(epochs=400, out="run"), stop=after(1)))
    resume("run", epochs=2, out="less")
    assert counted_in("less") == counted_in("run")


@pytest.mark.promise("target")
def test_shown_epsilons_count_the_ranges_from_the_first_step_on(table: Path) -> None:
    planned = plan(epochs=4, out="run")
    report = finish(train_plan(planned)).report
    text = (table / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    first = (*planned.plan.ranges, planned.plan.event.first(1))
    assert lines[0]["epsilon"] >= total_epsilon(first, report["delta"])


def test_nothing_is_read_before_its_event_has_begun(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RefusedError(Exception):
        pass

    read = list[int]()
    counted = distributions

    def watched(values: Any, events: Any, noise: Any, begin: Any, *rest: Any) -> Any:
        def refuse(event: TrainingEvent) -> None:
            raise RefusedError

        read.append(len(values))
        return counted(values, events, noise, refuse, *rest)

    monkeypatch.setattr(uncounted, "distributions", watched)
    with pytest.raises(RefusedError):
        finish(train_plan(plan(out="run")))
    assert read


@pytest.mark.parametrize("schema", ["kinds.yaml", "wide.yaml"])
def test_a_network_of_images_is_refused_for_rows_by_one_message(table: Path, schema: str) -> None:
    Path("wide.yaml").write_text(WIDE)
    refused = dpmac("train", "--dataset", "people.csv", "--schema", schema, "--model", "cnn")
    assert refused.exit_code == 2
    message = " ".join(refused.output.split())
    assert "--model cnn is for images, but" in message
    assert "Use --model mlp" in message
    assert message.count("error") == 1


def test_few_records_are_refused_with_the_columns_and_the_least_epsilon(table: Path) -> None:
    people(300).to_csv("people.csv", index=False)
    made = dpmac(*TRAIN[:-1], "0.5", "--out", "run")
    assert made.exit_code == 2
    assert "The ranges of age, income and since cannot be found from" in made.output
    [least] = [word for word in made.output.split() if word.rstrip(".").replace(".", "").isdigit()][
        -1:
    ]
    made = dpmac(*TRAIN[:-1], least.rstrip("."), "--out", "run", "--epochs", "2")
    assert made.exit_code == 0, made.output
    assert "are found by noisy counts of few records" in made.output


def test_many_records_are_silent(table: Path) -> None:
    assert not any("noisy counts" in note for note in plan().notes)


@pytest.mark.promise("features")
def test_a_value_has_a_public_place_that_no_other_record_decides() -> None:
    column = Column.model_validate({"name": "job", "type": "category"})
    cells = ["nurse", "", None, "NA", " nurse ", "cook"]
    places = hashed_in(pa.array(cells), column)
    digest = hashlib.sha256(b"job\x1fnurse").digest()
    assert places[0] == int.from_bytes(digest, "big") % PLACES == places[4]
    assert places[1] == places[2] == places[3] != places[0]
    alone = [hashed_in(pa.array([cell]), column)[0] for cell in cells if cell is not None]
    assert alone == [place for cell, place in zip(cells, places, strict=True) if cell is not None]


@pytest.mark.promise("noise")
def test_every_place_gets_noise_in_every_step_seen_or_not(table: Path) -> None:
    finish(train_plan(plan(epochs=1, out="run")))
    model = dpmac_cli.load("run/model.safetensors").model
    [weight] = [p for name, p in model.named_parameters() if "lookups" in name]
    assert weight.shape[0] == PLACES
    assert (weight != 0).all()


@pytest.mark.promise("features")
def test_inputs_of_a_row_depend_on_that_row_alone() -> None:
    records = Table(
        shape=(7,),
        low=(-1e30, -1, 0, 0, -1, -1, 0),
        high=(1e30, 1, 1, 1, 1, 1, 255),
        columns=(
            ("open", 1),
            ("flag", 1),
            ("number", 1),
            ("boolean", 1),
            ("one-hot", 2),
            ("hashed", 1),
        ),
    )
    inputs = TableInputs(records)
    inputs.adopt([Distribution(0.0, 8.0, (0.0, 2.0, 8.0), (0.0, 0.5, 1.0))])
    draws = torch.Generator().manual_seed(0)
    rows = torch.rand(50, 7, generator=draws) * 8
    rows[:, 1] = (rows[:, 1] > 6).float()
    whole = inputs(rows)
    assert torch.equal(whole.flip(0), inputs(rows.flip(0)))
    other = rows.clone()
    other[7] = 1e30
    changed = (inputs(other) != whole).any(1)
    assert changed.nonzero().flatten().tolist() == [7]
    assert torch.equal(whole[:, -1], rows[:, -1])


def test_numbers_become_their_place_in_the_range_their_rank_and_hats() -> None:
    columns: Any = (("open", 1), ("flag", 1))
    inputs = TableInputs(Table(shape=(2,), low=(-1e30, -1), high=(1e30, 1), columns=columns))
    inputs.adopt([Distribution(0.0, 8.0, (0.0, 2.0, 8.0), (0.0, 0.5, 1.0))])
    [half, beyond, missing] = inputs(torch.tensor([[2.0, 0], [100.0, 0], [0.0, 1]]))
    assert half[:2].tolist() == [-0.5, 0.0]
    assert half[2:11].tolist() == pytest.approx([0.5 * ((j == 2) - 1 / 9) for j in range(9)])
    assert half[11:20].tolist() == pytest.approx([0.5 * ((j == 4) - 1 / 9) for j in range(9)])
    assert beyond[:2].tolist() == [1, 1]
    assert missing[:20].tolist() == [0] * 20
    assert missing[20] == 1


@pytest.mark.promise("said")
def test_that_a_label_is_a_number_is_named_as_a_fact_of_the_records() -> None:
    """One record more may have the value with which labels are too many for classes."""
    labels = np.arange(300) % 20
    more = np.where(np.arange(300) == 7, 20, labels)
    for values, kinds, found, inferred in (
        (labels, {}, Classification, ("classes",)),
        (more, {}, Regression, ("kinds of columns",)),
        (labels, {"y": "number"}, Regression, ()),
        (more, {"y": "number"}, Regression, ()),
    ):
        frame = pd.DataFrame({"a": np.arange(300.0), "y": values})
        data = dpmac_cli.from_dataframe(frame, label="y", kinds={"a": "number", **kinds})
        facts = resolve(dataset=data, epsilon=3).plan.facts
        assert (type(facts.task), facts.inferred) == (found, inferred)


def test_a_schema_is_drafted_from_the_records_with_a_warning(table: Path) -> None:
    made = dpmac("schema", "people.csv", "--label", "y", "--kinds")
    assert made.exit_code == 0, made.output
    assert "facts of these records" in made.output.splitlines()[0]
    drafted = yaml.safe_load(made.output)
    assert drafted["columns"] == yaml.safe_load(KINDS)["columns"]
    assert drafted["label"] == {"column": "y", "classes": ["bad", "good"]}
    Path("kinds.yaml").write_text(made.output)
    assert dpmac(*TRAIN, "--epochs", "2", "--out", "run").exit_code == 0


@pytest.mark.promise("said")
def test_a_draft_that_nobody_has_checked_is_named_as_facts_of_the_records(table: Path) -> None:
    drafted = dpmac("schema", "people.csv", "--label", "y", "--kinds").output
    Path("kinds.yaml").write_text(drafted)
    resolved = plan()
    assert resolved.plan.facts.inferred == ("kinds of columns", "classes")
    assert "remove its line from_records" in " ".join(resolved.notes)
    Path("kinds.yaml").write_text(drafted.replace("from_records: true\n", ""))
    assert plan().plan.facts.inferred == ()
    frame = people()
    data = dpmac_cli.from_dataframe(frame, yaml.safe_load(drafted))
    facts = resolve(dataset=data, epsilon=3).plan.facts
    assert facts.inferred == ("kinds of columns", "classes")


def test_a_draft_points_out_columns_that_name_records(table: Path) -> None:
    frame = people()
    frame["case"] = [f"K-{number}" for number in range(len(frame))]
    frame["row"] = np.arange(len(frame)) + 1000
    frame["patient_id"] = 7
    frame["paid"] = 2 * np.arange(len(frame))
    frame["patient"] = [f"P{number // 3:05}" for number in range(len(frame))]
    frame.to_csv("people.csv", index=False)
    by_kinds = dpmac("schema", "people.csv", "--label", "y", "--kinds").output
    assert "# case, row, patient_id: names of records" in by_kinds
    assert "# patient: many different values. If they name persons" in by_kinds
    by_header = dpmac("schema", "people.csv", "--label", "y", "--drop", "case").output
    assert "# patient_id: names of records" in by_header
    dropped = dpmac("schema", "people.csv", "--label", "y", "--drop", "patient_id").output
    assert "names of records" not in dropped


@pytest.mark.promise("said")
def test_kinds_that_follow_from_dtypes_are_named_as_facts_of_the_records(table: Path) -> None:
    frame = people()
    kinds = {"age": "number", "income": "number", "job": "category", "smoker": "boolean"}
    data = dpmac_cli.from_dataframe(frame, label="y", kinds=kinds)
    assert resolve(dataset=data, epsilon=3).plan.facts.inferred == ("kinds of columns", "classes")
    data = dpmac_cli.from_dataframe(
        frame, label="y", kinds={**kinds, "since": "date"}, classes=["bad", "good"]
    )
    assert resolve(dataset=data, epsilon=3).plan.facts.inferred == ()
    declared = frame.drop(columns=["since"]).astype({"job": "category"})
    declared["smoker"] = declared.smoker == "yes"
    data = dpmac_cli.from_dataframe(
        declared, label="y", kinds={"age": "number", "income": "number"}, classes=["bad", "good"]
    )
    resolved = resolve(dataset=data, epsilon=3)
    assert resolved.plan.facts.inferred == ()
    assert resolved.plan.facts.schema is not None
    assert [c.type for c in resolved.plan.facts.schema.columns] == [
        *("number", "number", "category", "boolean")
    ]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("age: {type: number}", "age: {type: numbr}"), "line 3: columns.age.type"),
        (("age: {type: number}", "age: {}"), "line 3: columns.age: needs either a range"),
        (("job: {type: category}", "job: {type: category, range: [0, 1]}"), "range is not for"),
        (("classes: [bad, good]", "type: category"), "needs either the names of its classes"),
        (
            ("age: {type: number}", "age: {type: number, missing: refuse}"),
            "missing: refuse needs range",
        ),
    ],
)
def test_a_bad_schema_gets_one_message_with_its_line(
    table: Path, edit: tuple[str, str], message: str
) -> None:
    Path("kinds.yaml").write_text(KINDS.replace(*edit))
    made = dpmac(*TRAIN)
    assert made.exit_code == 2
    assert message in made.output


def test_without_privacy_ranges_are_exact_and_named_so(table: Path) -> None:
    report = finish(train_plan(plan(epsilon=None, no_dp=True, epochs=3, out="run"))).report
    low, high = report["data"]["ranges"]["age"]
    assert low <= 18 + 2
    assert 88 <= high <= 120
    assert "exact facts of the training records" in report["sentences"]["ranges"]


def test_an_account_prices_the_counts_beforehand(table: Path) -> None:
    planned = plan(epochs=4).plan
    made = finish(train_plan(plan(epochs=4, out="run"))).report
    cost = total_epsilon(planned.planned, planned.settings.delta)
    assert format_epsilon(cost) == format_epsilon(made["epsilon"])


def test_an_account_has_a_switch_for_ranges() -> None:
    flags = ["account", "--dataset-size", "5000", "--batch-size", "5000", "--steps", "80", "--json"]
    [row] = json.loads(dpmac(*flags, "--epsilon", "1", "--ranges").stdout)["rows"]
    assert "and 4 noisy counts or sums of training records with noise mult" in row["statement"]
    assert "histogram" not in row["statement"]
    assert (row["steps"], row["compositions"]) == (80, 84)
    assert row["epsilon"] <= 1
    shown = dpmac(*flags[:-1], "--sigma", "35", "--ranges").stdout
    assert "3, with noise multipliers" in shown


def test_an_account_has_switches_for_all_counts_of_a_run(tmp_path: Path) -> None:
    schema = tmp_path / "number.yaml"
    schema.write_text(
        "columns:\n  a: {type: number, range: [-5, 5]}\n"
        "label: {column: y, type: number, range: [0, 1000]}\n"
    )
    numbers = np.random.default_rng(0).normal(size=(1000, 2))
    rows = [f"{a:.3f},{y + 50:.3f}" for a, y in numbers]
    path, delta = tmp_path / "number.csv", 1e-5
    path.write_text("\n".join(["a,y", *rows]))
    run = {"dataset": str(path), "schema": str(schema), "batch_size": 100, "steps": 4}
    planned = resolve({**run, "sigma": 2.0, "scale": "private", "delta": delta}).plan
    cost = total_epsilon(planned.planned, delta)
    size = planned.facts.train_size
    flags = ["account", "--dataset-size", str(size), "--batch-size", "100", "--steps", "4"]
    flags += ["--sigma", "2", "--delta", str(delta), "--json"]
    [row] = json.loads(dpmac(*flags, "--ranges", "--target-range").stdout)["rows"]
    assert row["epsilon"] == cost
    assert "no setting --scale" in dpmac(*flags, "--scale", "private").stderr
    run |= {"epsilon": 1.0, "scale": "declared", "delta": delta}
    target = [*flags[:7], "--epsilon", "1", *flags[9:]]
    for more in ({}, {"calibration": "none"}, {"calibration": "histogram"}):
        event = resolve({**run, **more}).plan.event
        typed = [word for name, value in more.items() for word in (f"--{name}", value)]
        [row] = json.loads(dpmac(*target, *typed).stdout)["rows"]
        assert row["noise_multiplier"] == event.noise_multiplier


def test_noise_that_was_given_keeps_its_epsilon_and_the_counts_add_to_it(table: Path) -> None:
    planned = plan(epsilon=None, sigma=4.0, epochs=4).plan
    alone = total_epsilon((planned.event,), planned.settings.delta)
    assert planned.event.noise_multiplier == 4
    assert planned.histogram is None
    assert total_epsilon(planned.planned, planned.settings.delta) > alone
    assert math.isfinite(alone)


def test_units_share_one_weight(table: Path) -> None:
    frame = people()
    frame["person"] = np.arange(len(frame)) // 3
    frame.to_csv("people.csv", index=False)
    Path("kinds.yaml").write_text(f"{KINDS}drop: [person]\n")
    report = finish(train_plan(plan(unit="person", epochs=3, out="run"))).report
    assert report["data"]["unit"] == "person"
    assert report["data"]["ranges"]["age"][1] > 60


def test_a_column_of_units_that_is_an_input_too_is_pointed_out(table: Path) -> None:
    frame = people()
    frame["person"] = np.arange(len(frame)) // 3
    frame.to_csv("people.csv", index=False)
    Path("kinds.yaml").write_text(f"{KINDS}  person: {{type: category}}\n")
    notes = [note for note in plan(unit="person").notes if "{unit=}person is an input" in note]
    assert len(notes) == 1
    assert "under drop" in notes[0]
    Path("kinds.yaml").write_text(f"{KINDS}drop: [person]\n")
    assert not any("{unit=}" in note for note in plan(unit="person").notes)


def test_ranges_are_those_of_training_records_and_their_units(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = people()
    frame["person"] = np.arange(len(frame)) // 3
    frame["side"] = np.where(frame.person % 5 == 0, "b", "a")
    frame.loc[frame.side == "b", "age"] *= 1000
    frame.to_csv("people.csv", index=False)
    Path("kinds.yaml").write_text(f"{KINDS}drop: [person]\ntest: {{column: side, values: [b]}}\n")
    owners = list[Any]()
    counted = distributions

    def watched(*given: Any) -> Any:
        owners.append(given[4])
        return counted(*given)

    monkeypatch.setattr(uncounted, "distributions", watched)
    report = finish(train_plan(plan(unit="person", epochs=2, out="run"))).report
    assert report["data"]["ranges"]["age"][1] < 1000
    assert np.bincount(owners[0]).tolist() == [3] * 400


def test_a_table_may_have_nothing_but_words(table: Path) -> None:
    people()[["job", "smoker", "y"]].to_csv("people.csv", index=False)
    kinds = "columns: {job: {type: category}, smoker: {type: category}}"
    Path("kinds.yaml").write_text(f"{KINDS.splitlines()[0]}\n{kinds}\n")
    report = finish(train_plan(plan(out="run"))).report
    assert report["scores"]["accuracy"]["value"] > 0.6


WIDE = """\
label: {column: y, classes: [bad, good]}
columns:
  age: {range: [0, 9000], missing: input}
  income: {range: [0, 100000000]}
  job: {categories: [a, b, c, d]}
  smoker: {type: boolean, categories: [no, yes]}
  since: {type: date, range: [1900-01-01, 2100-01-01]}
"""


@pytest.mark.promise("target")
def test_declared_ranges_a_hundred_times_too_wide_lose_next_to_nothing(table: Path) -> None:
    frame = people()
    frame["age"] = frame.age.astype(object)
    frame.loc[:20, "age"] = None
    frame.to_csv("people.csv", index=False)
    close = finish(train_plan(plan(out="close"))).report
    Path("kinds.yaml").write_text(WIDE)
    planned = plan(out="run")
    assert planned.plan.settings.scale == "private"
    wide = finish(train_plan(planned)).report
    events = events_of(wide)
    assert sum(event.histogram for event in events) == 4
    assert wide["epsilon"] == total_epsilon(events, wide["delta"]) <= 3
    found = wide["data"]["ranges"]
    assert found.keys() == {"age", "income", "since"}
    lowest, highest = found["age"]
    assert -500 < lowest < 40
    assert 80 < highest < 500
    assert found["income"][1] < 5e6
    first, last = found["since"]
    assert first < 18_500  # days from 1970 to 2020
    assert last > 19_000
    assert wide["scores"]["accuracy"]["value"] > close["scores"]["accuracy"]["value"] - 0.04
    frame.drop(columns="y").to_csv("new.csv", index=False)
    assert len(dpmac_cli.load("run").predict("new.csv").outputs) == len(frame)


def test_ranks_beside_declared_ranges_are_for_a_target_and_enough_records(table: Path) -> None:
    Path("kinds.yaml").write_text(WIDE)
    assert plan().plan.ranges
    for settings in ({"epsilon": None, "sigma": 4.0}, {"scale": "declared"}, {"epsilon": 0.5}):
        planned = plan(**settings).plan
        assert planned.settings.scale == "declared"
        assert not planned.ranges
        assert planned.facts.records.count("number") == 3
    with pytest.raises(dpmac_cli.InputError, match=r"cannot be found .* at least 0\.29"):
        plan(epsilon=0.2, scale="private")
    with pytest.raises(dpmac_cli.InputError, match=r"table \(--features columns\)\. Leave"):
        resolve(dataset="digits", epsilon=1.0, scale="private")


@pytest.mark.promise("ranks")
@pytest.mark.parametrize("schema", ["KINDS", "WIDE"])
def test_ranges_are_not_found_by_several_processes(table: Path, schema: str) -> None:
    """Each process would add noise to counts of its own, and only the first one would pay."""
    Path("kinds.yaml").write_text({"KINDS": KINDS, "WIDE": WIDE}[schema])
    several = Ranks(rank=0, size=2)
    with pytest.raises(dpmac_cli.InputError, match="are found by one process"):
        finish(train_plan(plan(out="run", epochs=1), ranks=several))
    assert not Path("run").exists()


def numbers(low: float, high: float, transform: str = "none") -> pd.DataFrame:
    """People with a number to predict, and a schema in which its range is declared."""
    frame = people()
    frame["y"] = 1000 * (frame.age / 30 + np.log(frame.income)) + 50
    if transform == "log1p":
        frame["y"] = np.exp(frame.y / 2000)
    frame.to_csv("people.csv", index=False)
    label = f"label: {{column: y, range: [{low}, {high}], transform: {transform}}}"
    Path("kinds.yaml").write_text(WIDE.replace(WIDE.splitlines()[0], label))
    return frame


@pytest.mark.promise("target")
@pytest.mark.promise("resume")
def test_a_declared_range_to_predict_that_is_far_too_wide_loses_next_to_nothing(
    table: Path,
) -> None:
    numbers(8000, 18_000)
    close = finish(train_plan(plan(out="close", seed=0))).report
    frame = numbers(0, 1_000_000)
    planned = plan(out="run", seed=0)
    wide = finish(train_plan(planned)).report
    # By hand: a tenth of mu^2 for columns, 3% for the range, 5% for moments, 2% for intervals.
    events = events_of(wide)
    signals = [event.noise_multiplier**-2 for event in events if event.histogram]
    expected = np.array([0.006, 0.009, 0.015, 0.02, 0.02, 0.03, 0.05, 0.05])
    assert np.sort(signals) / sum(signals) == pytest.approx(expected / expected.sum(), rel=1e-4)
    assert wide["epsilon"] == total_epsilon(events, wide["delta"]) <= 3
    assert [event for event in events if event.histogram] == [*planned.plan.counts]
    low, high = wide["data"]["target"]["low"], wide["data"]["target"]["high"]
    assert 0 <= low < frame.y.quantile(0.05)
    assert frame.y.quantile(0.95) < high
    assert high - low < 10 * (frame.y.max() - frame.y.min())
    assert wide["scores"]["r2"]["value"] > close["scores"]["r2"]["value"] - 0.05
    sentences = wide["sentences"]
    assert "the range of y was found by three rounds" in sentences["ranges"]
    assert sentences["computed_from_records"]["range of the target"] == "protected"
    scored = dpmac("eval", "run")
    assert scored.exit_code == 0, scored.output
    assert json.loads(dpmac("eval", "run", "--json").stdout)["r2"] == wide["scores"]["r2"]["value"]
    predicted = dpmac_cli.load("run").predict(frame.drop(columns="y")).predicted
    assert low - 1 <= np.min(predicted) < np.max(predicted) <= high + 1
    more = resume("run", epochs=82, out="more").report
    assert more["data"]["target"] == wide["data"]["target"]
    assert sum(event.histogram for event in events_of(more)) == 9  # and one more of intervals


def test_a_range_after_a_transform_is_found_on_that_scale(table: Path) -> None:
    frame = numbers(0, 1e12, "log1p")
    target = finish(train_plan(plan(epochs=3, seed=0, out="run"))).report["data"]["target"]
    assert target["low"] < frame.y.quantile(0.05)
    assert frame.y.quantile(0.95) < target["high"]
    # Of a declared width of 27.6 on that scale; the records have 2.8, and noise widens that.
    assert np.log1p(target["high"]) - np.log1p(target["low"]) < 14
    assert target["transform"] == "log1p"


def test_a_range_to_predict_is_counted_where_those_of_columns_are(table: Path) -> None:
    numbers(8000, 18_000)
    for settings in ({"epsilon": None, "sigma": 4.0}, {"scale": "declared"}, {"epsilon": 0.5}):
        planned = plan(**settings).plan
        assert not planned.counts_target
        assert not planned.ranges
    report = finish(train_plan(plan(scale="declared", epochs=2, out="run"))).report
    assert (report["data"]["target"]["low"], report["data"]["target"]["high"]) == (8000, 18_000)
    assert sum(event.histogram for event in events_of(report)) == 1
    people()[["job", "smoker", "age"]].to_csv("people.csv", index=False)
    words = "columns: {job: {type: category}, smoker: {type: category}}"
    Path("kinds.yaml").write_text(f"label: {{column: age, range: [0, 9000]}}\n{words}\n")
    assert plan().plan.counts_target
    assert len(plan().plan.ranges) == 4
    assert not plan(epsilon=0.6).plan.counts_target


@pytest.mark.promise("histogram")
def test_a_range_to_predict_follows_from_what_was_released_alone(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tables with nothing in common, and the same released counts and moments."""
    released = Distribution(100.0, 300.0, (100.0, 300.0), (0.0, 1.0))
    monkeypatch.setattr(
        uncounted, "distributions", lambda values, *_: (released,) * values.shape[1]
    )
    monkeypatch.setattr(uncounted, "target_moments", lambda *_: (220.0, 30.0))
    targets = []
    for factor in (1.0, 0.01):
        frame = numbers(0, 1_000_000)
        frame.y *= factor
        frame.to_csv("people.csv", index=False)
        report = finish(train_plan(plan(epochs=1, out=f"run{factor}"))).report
        targets.append(report["data"]["target"])
    assert targets[0] == targets[1]
    assert (targets[0]["low"], targets[0]["high"]) == (100, 340)  # 220 - 4 * 30 to 220 + 4 * 30


@pytest.mark.promise("reading")
def test_a_model_fits_a_table_whose_range_is_around_that_which_was_found(table: Path) -> None:
    numbers(0, 1_000_000)
    finish(train_plan(plan(epochs=2, out="run")))
    declared = Path("kinds.yaml").read_text()
    Path("other.yaml").write_text(declared.replace("1000000], t", "13000], t"))
    model, frame = dpmac_cli.load("run"), pd.read_csv("people.csv")
    assert model.score(dpmac_cli.from_dataframe(frame, "kinds.yaml")).metrics["r2"] < 1
    with pytest.raises(ModelError, match="was trained on the target y from"):
        model.score(dpmac_cli.from_dataframe(frame, "other.yaml"))


@pytest.mark.promise("resume")
def test_more_epochs_keep_the_scale_of_declared_ranges(table: Path) -> None:
    Path("kinds.yaml").write_text(WIDE)
    first = finish(train_plan(plan(epochs=4, out="run"))).report
    more = resume("run", epochs=6, out="more").report
    assert more["data"]["ranges"] == first["data"]["ranges"]


def test_a_missing_number_has_no_rank_and_is_counted_as_missing() -> None:
    records = Table(
        shape=(3,), low=(0.0, -1.0, 0.0), high=(10.0, 1.0, 4.0),
        columns=(("number", 1), ("flag", 1), ("number", 1)),
    ).ranked()  # fmt: skip
    inputs = TableInputs(records)
    rows = torch.tensor([[0.5, 0.0, -0.5], [0.0, 1.0, 0.25]])
    assert inputs.values(rows).isnan().tolist() == [[False, False], [True, False]]
    made = inputs(rows)
    assert made.shape == (2, 2 * 20 + 1)
    of_first = [0, *range(4, 13), 2, *range(22, 31)]  # number, hats, rank and its hats
    assert made[1, of_first].eq(0).all()
    assert inputs.values(rows)[0].tolist() == [7.5, 1.0]  # as the table has them
