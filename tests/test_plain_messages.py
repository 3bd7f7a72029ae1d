"""Messages on files that are almost right: what is wrong with them, in words of their format."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpmac_cli import InputError
from dpmac_cli.runs.folder import check_chosen_folder
from dpmac_cli.runs.resolve import resolve

X = np.random.default_rng(0).random((40, 3))
Y = np.arange(40) % 2
ARRAYS: dict[str, Any] = {"x": X, "y": Y, "low": 0, "high": 1}


def refused(**settings: Any) -> str:
    with pytest.raises(InputError) as raised:
        resolve({"epsilon": 3, **settings}, settings.pop("config", None))
    return str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": Y == 1}, "y has truth values. Make labels of them: y.astype(int)"),
        ({"low": np.zeros(2)}, "low and high have 2 and 1 numbers for 3 columns."),
        ({"x_tset": X}, "has an array x_tset, which is not read. Did you mean x_test?"),
        ({"classes": np.array(["a", 1], object)}, "the array classes holds objects of Python"),
    ],
)
def test_arrays_that_are_almost_right(changes: dict[str, Any], message: str) -> None:
    np.savez("data.npz", **{**ARRAYS, **changes})
    assert message in refused(dataset="data.npz")


def test_other_arrays_are_left_alone() -> None:
    np.savez("data.npz", **ARRAYS, u=X, weights=Y, names=Y, x_train=X)
    resolve(dataset="data.npz", epsilon=3)


def test_classes_that_are_typed_twice_blame_the_flag() -> None:
    np.savez("data.npz", **ARRAYS)
    assert refused(dataset="data.npz", classes="a,b,a").startswith("--classes has 2 classes a.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("secure: maybe\n", "config.yaml, line 1: secure: Input should be true or false"),
        ("- a\n", "config.yaml is not a mapping"),
    ],
)
def test_settings_of_the_wrong_type_have_the_words_of_yaml(text: str, message: str) -> None:
    Path("config.yaml").write_text(text)
    assert message in refused(config=Path("config.yaml"))
    Path("config.yaml").write_text(text, encoding="utf-16")
    assert "config.yaml is not in UTF-8. Save it as UTF-8." in refused(config=Path("config.yaml"))


def test_schemas_of_the_wrong_type_have_the_words_of_yaml() -> None:
    Path("table.csv").write_text("a,y\n1,no\n2,yes\n")
    Path("schema.yaml").write_text("label: y\ncolumns: {a: {range: [0, 3]}}\n")
    said = refused(dataset="table.csv", schema="schema.yaml")
    assert "line 1: label: Input should be a mapping, such as name: value." in said
    Path("schema.yaml").write_text("label: y\n", encoding="utf-16")
    said = refused(dataset="table.csv", schema="schema.yaml")
    assert "schema.yaml is not in UTF-8. Save it as UTF-8." in said


def test_a_table_that_gzip_wrote_is_to_be_unpacked() -> None:
    Path("table.csv").write_bytes(gzip.compress(b"a,y\n1,no\n2,yes\n"))
    Path("schema.yaml").write_text(
        "label: {column: y, classes: [no, yes]}\ncolumns: {a: {range: [0, 3]}}\n"
    )
    said = refused(dataset="table.csv", schema="schema.yaml")
    assert "it is compressed by gzip: unpack it, gunzip -c table.csv" in said


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("-run", "-run begins like a flag of a command. Use another name."),
        ("link", "link is a link to a folder that does not exist. Make that folder, or use"),
    ],
)
def test_folders_that_no_command_could_use(out: str, message: str) -> None:
    Path("link").symlink_to("nowhere")
    with pytest.raises(InputError) as raised:
        check_chosen_folder(Path(out), force=True)
    assert message in str(raised.value)


def test_names_of_columns_that_are_hard_to_see_are_quoted() -> None:
    Path("table.csv").write_text(" a,,y\n1,2,no\n2,3,yes\n")
    Path("schema.yaml").write_text(
        "label: {column: y, classes: [no, yes]}\ncolumns: {a: {range: [0, 3]}}\n"
    )
    said = refused(dataset="table.csv", schema="schema.yaml")
    assert "There is no column a, which" in said
    assert "does not declare the column ' a', to use" in said
    assert "does not declare the column '', to use" in said
