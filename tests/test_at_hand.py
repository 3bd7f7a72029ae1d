"""Records at hand in a program: arrays, torch datasets, data frames."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer
from torch.utils.data import TensorDataset

import dpmac_cli
from dpmac_cli import (
    ArrayData,
    InputError,
    finish,
    from_dataframe,
    from_torch,
    resolve,
    train,
)
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.schema import Source

QUICK = {"sigma": 4, "epochs": 2, "batch_size": 32, "model": "mlp", "seed": 1}


def rows(count: int = 200) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, count)
    return rng.random((count, 5)) + y[:, None], y


def images(count: int = 120) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 8, 8, 3), np.uint8), rng.integers(0, 3, count)


def train_on(dataset: Any, out: Path, **settings: Any) -> dict[str, Any]:
    return dict(finish(train(resolve(QUICK, dataset=dataset, out=out, **settings).plan)).report)


@pytest.mark.long
def test_arrays_are_what_their_file_is(tmp_path: Path) -> None:
    x, y = rows()
    np.savez(tmp_path / "table.npz", x=x, y=y, low=np.zeros(5), high=np.full(5, 2.0))
    filed = train_on(tmp_path / "table.npz", tmp_path / "filed")
    held = train_on(ArrayData(x, y, low=[0.0] * 5, high=[2.0] * 5), tmp_path / "held")
    assert held["dataset"]["name"] == "arrays"
    for part in ("test", "input", "privacy"):
        assert held[part] == filed[part]


def test_fractions_of_a_torch_dataset_are_the_images(tmp_path: Path) -> None:
    x, y = images()
    known: dict[str, Any] = {"classes": ["a", "b", "c"]}
    fractions = TensorDataset(torch.as_tensor(x).permute(0, 3, 1, 2) / 255, torch.as_tensor(y))
    plain, read = (
        ArrayData(x, y, x, y, **known),
        from_torch(fractions, copy.deepcopy(fractions), low=0, high=1, **known),
    )
    inputs = []
    for dataset in (plain, read):
        data = load_data(
            resolve(QUICK, dataset=dataset).plan.data.source, Path(), torch.device("cpu")
        )
        inputs.append(data.standardised(data.train.images))
    assert torch.allclose(inputs[0], inputs[1], atol=1e-6)
    assert resolve(QUICK, dataset=read).plan.data.facts.shape == (3, 8, 8)


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame])
def test_data_frames_are_read_as_their_schema_says(kind: Any, tmp_path: Path) -> None:
    bunch = load_breast_cancer(as_frame=True)
    frame = bunch.data.iloc[:, :3].assign(
        kind=pd.Series(["benign" if t else "malignant" for t in bunch.target])
    )
    ranges = {"mean radius": 40, "mean texture": 50, "mean perimeter": 300}
    schema = {
        "label": {"column": "kind", "classes": ["malignant", "benign"]},
        "columns": {name: {"range": [0, top]} for name, top in ranges.items()},
    }
    frame.to_csv(tmp_path / "table.csv", index=False)
    (tmp_path / "schema.yaml").write_text(str(schema))
    given = kind(frame) if kind is pd.DataFrame else pl.from_pandas(frame)
    held = resolve(QUICK, dataset=from_dataframe(given, schema)).plan
    filed = resolve(QUICK, dataset=tmp_path / "table.csv", schema=tmp_path / "schema.yaml").plan
    ours, theirs = (
        load_data(plan.data.source, Path(), torch.device("cpu")).train for plan in (held, filed)
    )
    assert torch.equal(ours.images, theirs.images)
    assert torch.equal(ours.labels, theirs.labels)
    sources = [plan.data.source for plan in (held, filed)]
    ours_of, theirs_of = (source.schema for source in sources if isinstance(source, Source))
    assert ours_of == theirs_of is not None
    with pytest.raises(InputError, match=r"schema: columns\.mean radius: needs either a range"):
        from_dataframe(given, {**schema, "columns": {"mean radius": {}}})
    with pytest.raises(InputError, match="There is no column mean radius"):
        resolve(QUICK, dataset=from_dataframe(frame.drop(columns="mean radius"), schema))


def test_what_cannot_be_records_is_told_at_once() -> None:
    x, y = rows(20)
    with pytest.raises(InputError, match=r"dataset cannot be a tuple.*ArrayData\(x, y\)"):
        resolve(dataset=(x, y))
    with pytest.raises(InputError, match="dataset cannot be a DataFrame"):
        resolve(dataset=pd.DataFrame(x))
    with pytest.raises(InputError, match="rows of numbers need a public range"):
        resolve(dataset=ArrayData(x, y))
    with pytest.raises(InputError, match="numbers need a public range"):
        resolve(dataset=ArrayData(x.reshape(20, 1, 5, 1), y))
    with pytest.raises(InputError, match="20 records, but y has 19 labels"):
        resolve(dataset=ArrayData(x, y[:-1], low=0, high=1))
    x[3, 2] = np.nan
    with pytest.raises(InputError, match="1 of 20 rows"):
        resolve(dataset=ArrayData(x.reshape(20, 5, 1), y, low=0, high=1))
    with pytest.raises(InputError, match="must consist of letters and digits"):
        ArrayData(x, y, name="../up")
    with pytest.raises(InputError, match=r"does not return \(record, label\) pairs"):
        from_torch([1, 2, 3])
    with pytest.raises(InputError, match="there is no dataset '<arrays>'"):
        resolve(dataset="<arrays>")


def test_labels_cannot_change_under_a_run() -> None:
    x, y = rows(60)
    data = ArrayData(x, y, low=0, high=2)
    plan = resolve(QUICK, dataset=data).plan
    kept = load_data(plan.data.source, Path(), torch.device("cpu")).train.labels.clone()
    y[:] = 7
    assert torch.equal(load_data(plan.data.source, Path(), torch.device("cpu")).train.labels, kept)
    assert "ArrayData" in dpmac_cli.__all__
