"""A folder of images or an .npz becomes a data set, and what cannot become one is explained."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpmac_cli.data.schema import DataFacts, Source
from dpmac_cli.data.user_data import inspect
from dpmac_cli.errors import InputError
from tests.helpers import load

CLASSES = ("cat", "dog", "eel")


def picture(path: Path, value: int, size: tuple[int, int] = (8, 6), mode: str = "L") -> None:
    """An image of one grey, ``size`` wide and high."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255 - value)).save(path)


def folder(root: Path, records: int = 4, **options: Any) -> Path:
    """Images whose grey tells class and number."""
    for label, name in enumerate(CLASSES):
        for number in range(records):
            picture(root / name / f"{number}.png", 10 * label + number, **options)
    return root


def table(path: Path, **arrays: Any) -> Path:
    """Six records of three classes; arrays of None are left out."""
    full = {
        "x": np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5),
        "y": np.array([0, 1, 2, 0, 1, 2]),
        **arrays,
    }
    np.savez(path, **{name: array for name, array in full.items() if array is not None})
    return path


def refused(path: Path, **options: Any) -> str:
    """What is said of data that cannot be used."""
    with pytest.raises(InputError) as failure:
        load(Source(path, **options))
    return "\n".join(failure.value.errors)


def described(found: DataFacts) -> tuple[int, int, tuple[int, int, int], tuple[str, ...]]:
    facts = found.facts
    return facts.train_size, facts.test_size, facts.shape, facts.task.names


@pytest.mark.privacy
def test_a_folder_with_train_and_test(tmp_path: Path) -> None:
    folder(tmp_path / "train", 4)
    folder(tmp_path / "test", 2)
    source = Source(tmp_path)
    found = inspect(source)
    assert described(found) == (12, 6, (1, 6, 8), CLASSES)
    assert not found.held_out
    (x, y), (x_test, y_test) = load(source)
    assert x.shape == (12, 1, 6, 8)
    assert x.dtype == np.uint8
    assert y.dtype == np.int64
    assert y.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert x[:, 0, 3, 3].tolist() == [10 * label + i for label in range(3) for i in range(4)]
    assert x_test[:, 0, 0, 0].tolist() == [0, 1, 10, 11, 20, 21]
    assert y_test.tolist() == [0, 0, 1, 1, 2, 2]


def test_images_are_read_at_any_depth_below_a_class(tmp_path: Path) -> None:
    for number, place in enumerate(("cat/9", "cat/p1/8", "cat/p1/left/7", "dog/p2/6")):
        picture(tmp_path / f"train/{place}.png", number)
        picture(tmp_path / f"test/{place}.png", number)
    picture(tmp_path / "train/cat/p1/.hidden/0.png", 99)
    source = Source(tmp_path)
    (x, y), _ = load(source)
    assert x[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert y.tolist() == [0, 0, 0, 1]
    picture(tmp_path / "train/cat/p1/left/later.png", 4)
    assert len(load(source)[0][1]) == 5


def sides(path: Path) -> tuple[set[int], set[int]]:
    """The records to train on and those held out, by their greys."""
    (x, _), (x_test, _) = load(Source(path, test_fraction=0.3))
    return set(x[:, 0, 0, 0].tolist()), set(x_test[:, 0, 0, 0].tolist())


@pytest.mark.privacy
def test_a_file_that_comes_or_goes_moves_no_other_between_train_and_test(tmp_path: Path) -> None:
    train, test = sides(folder(tmp_path, 10))
    (tmp_path / "dog" / "4.png").unlink()
    assert sides(tmp_path) == (train - {14}, test - {14})
    picture(tmp_path / "cat" / "00.png", 200)
    assert [part - {200} for part in sides(tmp_path)] == [train - {14}, test - {14}]


@pytest.mark.privacy
def test_a_row_that_comes_or_goes_moves_no_other_between_train_and_test(tmp_path: Path) -> None:
    x = np.repeat(np.arange(60, dtype=np.uint8), 20).reshape(60, 4, 5)
    y = np.arange(60) % 3
    train, test = sides(table(tmp_path / "all.npz", x=x, y=y))
    kept = np.delete(np.arange(60), [7, 33])
    fewer = sides(table(tmp_path / "fewer.npz", x=x[kept], y=y[kept]))
    assert fewer == (train - {7, 33}, test - {7, 33})
    assert sides(table(tmp_path / "turned.npz", x=x[::-1], y=y[::-1])) == (train, test)


@pytest.mark.privacy
def test_of_equal_rows_one_less_is_one_less_on_one_side(tmp_path: Path) -> None:
    x = np.repeat(np.arange(40) % 2, 20).reshape(40, 4, 5).astype(np.uint8)
    y = np.arange(40) // 2 % 3

    def counts(name: str, kept: list[int]) -> tuple[Counter[Any], Counter[Any]]:
        file = table(tmp_path / f"{name}.npz", x=x[kept], y=y[kept])
        (x0, y0), (x1, y1) = load(Source(file, test_fraction=0.3))
        train, test = (zip(x[:, 0, 0, 0], y, strict=True) for x, y in ((x0, y0), (x1, y1)))
        return Counter(train), Counter(test)

    train, test = counts("all", list(range(40)))
    assert len(train) > 2
    assert len(test) > 2
    for gone in range(40):
        fewer = counts(str(gone), [row for row in range(40) if row != gone])
        lost = train - fewer[0], test - fewer[1]
        assert lost[0] + lost[1] == Counter([(x[gone, 0, 0], y[gone])])
        assert not fewer[0] - train
        assert not fewer[1] - test


DEEP = np.array([[0, 128, 129, 257], [32896, 55746, 65278, 65535]], np.uint16)
SHALLOW = [[0, 0, 1, 1], [128, 217, 254, 255]]  # 65535 is 255, to the nearest


def deep(path: Path) -> None:
    """A grey image with 16 bits a pixel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pgm":
        path.write_bytes(b"P5 4 2 65535\n" + DEEP.astype(">u2").tobytes())
    else:
        Image.fromarray(DEEP).save(path)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
@pytest.mark.parametrize("colour", [False, True])
def test_sixteen_bits_become_eight_by_the_range_of_the_format(
    tmp_path: Path, suffix: str, colour: bool
) -> None:
    folder(tmp_path, 5, size=(4, 2))
    deep(tmp_path / "cat" / f"deep.{suffix}")
    if colour:
        picture(tmp_path / "dog" / "9.png", 200, (4, 2), mode="RGB")
    for source in (Source(tmp_path), Source(tmp_path, skip_bad=True)):
        assert inspect(source).facts.shape == (3 if colour else 1, 2, 4)
        (x, _), (x_test, _) = load(source)
        assert SHALLOW in [plane for image in (*x.tolist(), *x_test.tolist()) for plane in image]


def test_an_npz_of_images_in_any_order_of_axes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), np.uint8)
    tests = {"x_test": x[:2], "y_test": np.array([2, 0])}
    last = Source(table(tmp_path / "last.npz", x=x, **tests))
    first = {"x": x.transpose(0, 3, 1, 2), "x_test": tests["x_test"].transpose(0, 3, 1, 2)}
    turned = Source(table(tmp_path / "first.npz", **{**tests, **first}))
    for source in (last, turned):
        assert described(inspect(source)) == (6, 2, (3, 4, 5), ("0", "1", "2"))
        assert not inspect(source).held_out
        (images, labels), (test_images, test_labels) = load(source)
        assert np.array_equal(images, x.transpose(0, 3, 1, 2))
        assert np.array_equal(test_images, images[:2])
        assert labels.tolist() == [0, 1, 2, 0, 1, 2]
        assert test_labels.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": None}, "must contain the arrays x"),
        ({"x_test": np.zeros((1, 4, 5), np.uint8)}, "must both be given"),
        ({"y": np.zeros(6, complex)}, "must have one integer per record"),
        ({"y": np.full(6, 0.5)}, "a label that is not a whole number"),
        ({"y": np.arange(5)}, "6 records, but y has 5 labels"),
        ({"y": np.array([0, 1, 2, 0, 1, -1])}, "the label -1 (labels start at 0"),
        ({"classes": np.array(["a", "b"])}, "contains the label 2 (there are 2 classes"),
        (
            {"classes": np.array(["a", "\x1b[31mb", "c"])},
            "'\\x1b[31mb' contains characters that cannot",
        ),
        ({"classes": np.array(["a", "a", "b"])}, "has 2 classes a. Class names must be unique"),
        ({"x": np.zeros((6, 4, 5))}, "numbers need a public range"),
        ({"x": np.zeros((6, 4, 5), np.uint16)}, "(x / 257).astype('uint8') for 16 bits"),
        ({"x": np.zeros((6, 4, 5, 2), np.uint8)}, "1 or 3 channels"),
        ({"x": np.array([[np.nan], *[[0.0]] * 5])}, "NaN or infinity in 1 of 6 rows"),
        ({"x": np.zeros((6, 2)), "low": np.zeros(2), "high": np.full(2, 1e300)}, "2 of 2 col"),
        ({"x": np.zeros((6, 2)), "low": np.zeros(2), "high": np.full(2, 1e-40)}, "2 of 2 col"),
        ({"x": np.zeros((6, 2)), "low": np.ones(2), "high": np.array([2, 1 + 1e-9])}, "1 of 2 col"),
        ({"x": np.zeros((6, 2)), "low": np.ones(2, complex), "high": np.ones(2) * 2}, "2 of 2 col"),
        ({"x": np.zeros((6, 2)), "low": np.array(["a", "b"]), "high": np.ones(2)}, "2 of 2 col"),
        ({"y": np.array([0, 999_999] * 3)}, "the label 999999, but no 1"),
        ({"y": np.array([1, 2, 3] * 2)}, "the label 3, but no 0"),
        ({"y": np.array([0, 2**63] * 3, np.uint64)}, f"the label {2**63}, but no 1"),
        ({"x": np.zeros((6, 2))}, "--feature-range LOW,HIGH"),
        ({"x": np.zeros((6, 2)), "low": np.ones(2), "high": np.ones(2)}, "low below high"),
        ({"y": np.zeros(6, np.int64)}, "one class, 0. A classifier needs at least two"),
        ({"x": np.zeros((0, 4, 5), np.uint8), "y": np.zeros(0, np.int64)}, "x is empty"),
        (
            {"x_test": np.zeros((1, 4, 5), np.uint8), "y_test": np.array([7])},
            "y_test contains the label 7, which is not in y",
        ),
        (
            {"x_test": np.zeros((1, 4, 6), np.uint8), "y_test": np.array([1])},
            "x_test has records of shape (4, 6)",
        ),
        ({"x": np.array([object()] * 6)}, "cannot be read as an .npz of plain arrays"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_are_no_data_set(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    assert message in refused(table(tmp_path / "d.npz", **arrays))


def test_files_that_are_no_images_are_named_or_left_out(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("meow")
    said = refused(tmp_path)
    assert "notes.txt is not an image" in said
    assert "--skip-bad" in said
    whole = (tmp_path / "dog" / "1.png").read_bytes()
    (tmp_path / "dog" / "1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cat" / "notes.txt").unlink()
    assert "1.png cannot be read as an image" in refused(tmp_path, split_seed=5)
    source = Source(tmp_path, skip_bad=True)
    found = inspect(source)
    assert len(found.skipped) == 1
    assert "1.png" in found.skipped[0]
    assert found.facts.train_size + found.facts.test_size == 11
    (x, _), (x_test, _) = load(source)
    assert len(x) + len(x_test) == 11


@pytest.mark.privacy
def test_labels_may_be_names_of_declared_classes(tmp_path: Path) -> None:
    names = np.array(["cow", "cat", "dog", "cat", "cow", "dog"])
    path = table(
        tmp_path / "d.npz", y=names, x_test=np.zeros((2, 4, 5), np.uint8), y_test=names[:2]
    )
    assert "y contains names. Declare them as class names: --classes cat,cow,dog" in refused(path)
    many = table(tmp_path / "many.npz", y=np.array(list("fedcba")))
    assert refused(many).endswith("--classes a,b,c,d,e,....")  # no command that leaves one out
    train, test = load(Source(path, classes=("cow", "dog", "cat")))
    assert train[1].tolist() == [0, 2, 1, 2, 0, 1]
    assert test[1].tolist() == [0, 2]
    assert "the label -1" in refused(path, classes=("cow", "dog"))
    left = load(Source(path, classes=("cow", "dog"), skip_bad=True))
    assert [labels.tolist() for _, labels in left] == [[0, 1, 0, 1], [0]]


@pytest.mark.parametrize("name", ["nothing", "file.txt", "file.npz"])
def test_paths_that_lead_to_no_data(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "file.npz").write_text("x")
    assert str(tmp_path / name) in refused(tmp_path / name)


# A declared schema.


@pytest.mark.privacy
def test_declared_channels_alone_hold_whatever_the_images_are(tmp_path: Path) -> None:
    source = Source(folder(tmp_path), channels=1, classes=CLASSES)
    before = inspect(source).facts.shape
    picture(tmp_path / "cat" / "odd.png", 3, mode="RGB")
    assert inspect(source).facts.shape == before == (1, 6, 8)


@pytest.mark.privacy
@pytest.mark.parametrize("parts", [("train", "test"), (".",)])
def test_a_declared_class_needs_no_records(tmp_path: Path, parts: tuple[str, ...]) -> None:
    root = tmp_path / "photos"
    for part in parts:
        folder(root / part, 6)
        for file in (root / part / "cat").iterdir():
            file.unlink()
    source = Source(root, 0.5, channels=1, image_size=8, classes=CLASSES)
    for _ in range(2):
        facts = inspect(source).facts
        assert facts.task.names == CLASSES
        assert facts.train_size + facts.test_size == 12 * len(parts)
        assert {1, 2} == {int(label) for _, y in load(source) for label in y}
        for part in parts:
            shutil.rmtree(root / part / "cat", ignore_errors=True)
    one = Source(folder(tmp_path / "1", 1), test_fraction=0.5, split_seed=1, classes=CLASSES)
    assert inspect(one).facts.train_size == 2  # all of the class cat are held out


@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["rows", "images"])
@pytest.mark.parametrize("named", ["by flag", "in the file"])
def test_of_an_npz_with_named_classes_a_bad_row_is_left_out(
    tmp_path: Path, kind: str, named: str
) -> None:
    x = np.arange(40.0).reshape(20, 2) if kind == "rows" else np.zeros((20, 4, 5), np.uint8)
    arrays: dict[str, Any] = {"x": x, "y": np.arange(20) % 2, "x_test": x[:3]}
    arrays["y_test"] = np.array([2, 0, 1])  # a class without a record to train on
    if named == "in the file":
        arrays["classes"] = np.array(CLASSES)
    options: dict[str, Any] = {"feature_range": (0.0, 9.0)} if kind == "rows" else {}
    options |= {"classes": CLASSES} if named == "by flag" else {}
    source = Source(table(tmp_path / "a.npz", **arrays), skip_bad=True, **options)
    before = inspect(source)
    assert before.inferred == ()
    more = {"x": np.concatenate([x, x[:2]]), "y": np.append(arrays["y"], [3, -1])}
    if kind == "rows":
        more = {name: np.concatenate([part, part[:1]]) for name, part in more.items()}
        more["x"][-1, 0] = np.nan
    worse = Source(table(tmp_path / "b.npz", **{**arrays, **more}), skip_bad=True, **options)
    assert inspect(worse).facts == before.facts
    assert len(inspect(worse).skipped) == (3 if kind == "rows" else 2)
    for one, other in zip(load(source), load(worse), strict=True):
        assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
    assert "the label -1" in refused(worse.path, **options)


def test_what_was_taken_from_the_records_is_known(tmp_path: Path) -> None:
    folder(tmp_path / "a")
    assert inspect(Source(tmp_path / "a")).inferred == ("channels", "image size", "classes")
    assert inspect(Source(tmp_path / "a", channels=3)).inferred == ("image size", "classes")
    assert inspect(Source(table(tmp_path / "t.npz"))).inferred == ("classes",)
    assert "have 1, and arrays are not converted" in refused(tmp_path / "t.npz", channels=3)
