"""A person's own network, found and checked."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import DpmacError, InputError, ModelError
from dpmac_cli.models.build import build_model, without_batch_norm
from dpmac_cli.models.registry import BuiltIn, UserModel, parse_model

DIGITS = DATASETS["digits"]
OWN = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Settings:
    width: int = 12

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], Settings().width, 3), nn.BatchNorm2d(12), nn.ReLU()
        )
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def broken(shape, classes):
    raise KeyError("no weights")

def wrong():
    return 3

def leaves():
    raise SystemExit(0)

def colours():
    raise RuntimeError("no \\x1b[31mway")

table = {}
_hidden = plain
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own_net.py"
    file.write_text(OWN)
    return file


def failure(spec: str) -> tuple[type[Exception], str]:
    with pytest.raises(DpmacError) as raised:
        build_model(parse_model(spec), DIGITS.signature, seed=0)
    return raised.type, str(raised.value)


def test_a_factory_without_arguments_and_one_with_shape_and_classes(own: Path) -> None:
    assert parse_model(f"{own}:plain") == UserModel(str(own), "plain")
    assert parse_model("mlp") == BuiltIn("mlp")
    x = torch.zeros(2, *DIGITS.shape)
    assert build_model(UserModel(str(own), "plain"), DIGITS.signature, seed=0)(x).shape == (2, 10)
    assert build_model(UserModel(str(own), "Net"), DIGITS.signature, seed=0, fix_norm=True)(
        x
    ).shape == (
        2,
        10,
    )


def test_a_factory_in_a_module(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own.parent))
    model = build_model(UserModel("own_net", "plain"), DIGITS.signature, seed=0)
    again = build_model(UserModel(str(own), "plain"), DIGITS.signature, seed=0)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    del sys.modules["own_net"]


def test_batch_norm_is_refused_with_the_remedy(own: Path) -> None:
    kind, said = failure(f"{own}:Net")
    assert kind is ModelError
    assert "BatchNorm2d" in said
    assert "--fix-norm" in said


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("missing", InputError, "has no callable 'missing'. Available: Settings, Net"),
        ("table", InputError, "has no callable 'table'"),
        (
            "broken",
            ModelError,
            "called with (shape, classes), failed: KeyError at own_net.py, line 25: 'no weights'.",
        ),
        ("colours", ModelError, "RuntimeError at own_net.py, line 34: no \\x1b[31mway."),
        ("leaves", ModelError, "called with (), failed: SystemExit at own_net.py, line 31: 0."),
        ("wrong", ModelError, "must return a torch.nn.Module, not a value of type int"),
    ],
)
def test_factories_that_make_no_model(
    own: Path, name: str, kind: type[Exception], message: str
) -> None:
    found, said = failure(f"{own}:{name}")
    assert found is kind
    assert message in said


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:net", "no such file: nowhere.py"),
        (
            "no_such_package.net:make",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'.",
        ),
    ],
)
def test_places_that_cannot_be_imported(spec: str, message: str) -> None:
    kind, said = failure(spec)
    assert kind is InputError
    assert message in said


def test_a_file_that_fails(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    kind, said = failure(f"{tmp_path / 'bad.py'}:net")
    assert kind is InputError
    assert "ZeroDivisionError at bad.py, line 1: division by zero." in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit()", "SystemExit at bad.py, line 2."),
        ("def net(:", "SyntaxError: invalid syntax (bad.py, line 1)."),
    ],
)
def test_a_file_that_is_no_module(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    kind, said = failure(f"{tmp_path / 'bad.py'}:net")
    assert kind is InputError
    assert message in said


def test_batch_norm_becomes_group_norm_wherever_it_is() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Conv2d(1, 6, 1), nn.BatchNorm2d(6, affine=False))
            self.b = nn.ModuleList([nn.BatchNorm1d(64), nn.SyncBatchNorm(7)])

    model = without_batch_norm(Deep())
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert [(n.num_groups, n.num_channels, n.affine) for n in norms] == [
        (3, 6, False),
        (32, 64, True),
        (1, 7, True),
    ]
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    assert isinstance(without_batch_norm(nn.BatchNorm1d(4)), nn.GroupNorm)


def test_a_group_norm_has_the_weight_and_bias_of_the_batch_norm() -> None:
    """As of a residual network whose branches begin at zero, or of public weights."""
    norm = nn.BatchNorm2d(4).double()
    nn.init.zeros_(norm.weight)
    nn.init.constant_(norm.bias, 2)
    norm.bias.requires_grad_(False)
    found = without_batch_norm(norm)
    assert isinstance(found, nn.GroupNorm)
    assert torch.equal(found.weight, torch.zeros(4).double())
    assert torch.equal(found.bias, torch.full((4,), 2).double())
    assert [found.weight.requires_grad, found.bias.requires_grad] == [True, False]
