"""Base class of optimizers, types of hyperparameters, and the registry."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeVar

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from torch import Tensor

    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments

# Squares and fourth roots of these, and quotients by them, fit into float32.
Scale = Annotated[float, Field(ge=1e-10, le=1e10)]
Variance = Annotated[float, Field(ge=1e-30, le=1e10)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Stability = Annotated[float, Field(ge=0, le=1)]


class Optimizer(BaseModel, frozen=True, extra="forbid"):
    """An optimizer with its hyperparameters, which are its fields.

    It has no privacy cost, because it only sees the private mean. A subclass declares each
    hyperparameter as a field, with its type and limits. A field without a default gets that of the
    dataset.
    """

    #: Name in the registry.
    name: ClassVar[str] = ""
    #: One line for help: the first of the docstring.
    summary: ClassVar[str] = ""
    #: Whether it is one of the DP-MacAdam paper's, which ``dpmac compare`` runs by default.
    paper: ClassVar[bool] = False
    #: Default learning rates by dataset, where another than that of the field is better.
    lr_on: ClassVar[Mapping[str, float]] = {}
    #: Hyperparameters that have no effect without privacy: those of clipping and noise.
    of_privacy: ClassVar[frozenset[str]] = frozenset()
    #: Region that gradients are clipped to: a key of :data:`~dpmac_cli.dp.geometry.GEOMETRIES`, a
    #: class whose fields are among the hyperparameters.
    clips: ClassVar[str] = "ball"
    #: Moments that it keeps, each of the size of theta: "m", "v", "mv" or none.
    keeps: ClassVar[str] = ""
    #: Whether updates are proportional to gradients. The rate is then divided by the public mean
    #: weight of a record, so that weights of records do not make it smaller.
    proportional: ClassVar[bool] = False
    #: Whether gradients are clipped about a centre other than 0. Weights of records then act more
    #: slowly, and a quantile is not reached.
    centred: ClassVar[bool] = False

    lr: Scale  # eta

    @classmethod
    def used(cls, *, private: bool = True) -> list[str]:
        """Return the names of the hyperparameters that have an effect, in alphabetical order."""
        return sorted(cls.model_fields.keys() - (frozenset() if private else cls.of_privacy))

    @classmethod
    def default(cls, name: str, otherwise: float) -> float:
        """Return the default of a hyperparameter, or ``otherwise`` if it has no effect."""
        field = cls.model_fields.get(name)
        return otherwise if field is None or field.is_required() else field.default

    @classmethod
    def default_lr(cls, dataset: str) -> float:
        """Return the default learning rate on a dataset."""
        return cls.lr_on.get(dataset, cls.model_fields["lr"].default)

    def with_lr(self, rate: float) -> Self:
        """Return the optimizer with another learning rate."""
        return self.model_copy(update={"lr": float(rate)})

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Update theta and the moments with the private mean of step ``moments.step``, in place.

        The vectors are blocks of those of the run, shape (block,), so that they stay in cache: each
        coordinate must be updated by itself. ``eta`` is ``lr`` times the schedule's factor.
        """
        raise NotImplementedError


class InBall(Optimizer, frozen=True):
    """An optimizer with a fixed clipping norm."""

    of_privacy: ClassVar[frozenset[str]] = frozenset({"clip_norm"})

    clip_norm: Scale  # C


Registered = TypeVar("Registered", bound=type[Optimizer])

#: Optimizers by name, in the order of help and tables.
OPTIMIZERS: dict[str, type[Optimizer]] = {}


def register_optimizer(
    name: str, *, lr_on: Mapping[str, float] | None = None, paper: bool = False
) -> Callable[[Registered], Registered]:
    """Register a class of optimizers by its name, for ``--optimizer``.

    Args:
        name: name in help, reports and tables. An earlier optimizer of the name is replaced.
        lr_on: default learning rates by dataset, where they differ from that of the field.
        paper: whether it is one of the DP-MacAdam paper's.
    """

    def register(kind: Registered) -> Registered:
        kind.name, kind.paper, kind.lr_on = name, paper, lr_on or {}
        kind.summary = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
        OPTIMIZERS[name] = kind
        return kind

    return register


def defaults_of(name: str) -> str:
    """Return the defaults of a hyperparameter for help, the most common one first."""
    kinds = [kind for kind in OPTIMIZERS.values() if name in kind.model_fields]
    common, *_ = Counter(kind.model_fields[name].default for kind in kinds).most_common(1)[0]
    others = [
        f"{kind.name} {value:g}"
        for kind in kinds
        if (value := kind.model_fields[name].default) != common
    ]
    return "; ".join([f"{common:g}", *others])
