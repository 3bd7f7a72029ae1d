"""Base class of optimizers, types of hyperparameters, and the registry.

An optimizer is a rule for the update of theta from the private mean, and the name of the region to
which gradients are clipped. It sees no record and no gradient of one, so nothing in an optimizer
has a privacy cost. Sampling, clipping and noise are those of :class:`dpmac_cli.training.step.Step`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeVar

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from torch import Tensor

    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments

#: Learning rate, or a clipping norm. Squares and fourth roots of this and the next type, and
#: quotients by them, fit into float32.
Scale = Annotated[float, Field(ge=1e-10, le=1e10)]
#: Variance per coordinate.
Variance = Annotated[float, Field(ge=1e-30, le=1e10)]
#: Decay rate of a running average.
Decay = Annotated[float, Field(ge=0, lt=1)]
#: Stability constant, added to a root.
Stability = Annotated[float, Field(ge=0, le=1)]


class Optimizer(BaseModel, frozen=True, extra="forbid"):
    """Base class of optimizers. Hyperparameters are the fields of a subclass.

    It has no privacy cost, because it only sees the private mean. A subclass declares each
    hyperparameter as a field, with its type and limits. A field without a default gets that of the
    dataset. Instances are frozen: the state of training is theta and the moments.

    Attributes:
        lr: learning rate eta.

    Raises:
        pydantic.ValidationError: a hyperparameter is missing, unknown or out of range.

    Example:
        >>> from typing import ClassVar
        >>> @register_optimizer("dp-sign")
        ... class DPSign(InBall, frozen=True):
        ...     '''Fixed clipping norm, descent along the sign of the running mean.'''
        ...
        ...     keeps: ClassVar[str] = "m"
        ...     lr: Scale = 1e-3
        ...     beta1: Decay = 0.9
        ...
        ...     def update(self, theta, eta, private, moments):
        ...         moments.update(private.value, self.beta1, beta2=0.0)
        ...         theta.sub_(moments.m_hat(self.beta1).sign(), alpha=eta)
        >>> DPSign(clip_norm=1.0).lr
        0.001
        >>> del OPTIMIZERS["dp-sign"]  # as it was, for other examples
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
        """Return the names of the hyperparameters that have an effect, in alphabetical order.

        Args:
            private: with clipping and noise; otherwise those in :attr:`of_privacy` have none.
        """
        names = set(cls.model_fields)
        if not private:
            names -= cls.of_privacy
        return sorted(names)

    @classmethod
    def default(cls, name: str, otherwise: float) -> float:
        """Return the default of a hyperparameter.

        Args:
            name: name of a hyperparameter of any optimizer.
            otherwise: result if this one lacks the hyperparameter, or has no default for it.
        """
        field = cls.model_fields.get(name)
        if field is None or field.is_required():
            return otherwise
        default: float = field.default
        return default

    @classmethod
    def default_lr(cls, dataset: str) -> float:
        """Return the default learning rate on a dataset.

        Args:
            dataset: name of a dataset. For those that are not in :attr:`lr_on`, it is the default
                of the field.
        """
        return cls.lr_on.get(dataset, cls.model_fields["lr"].default)

    def with_lr(self, rate: float) -> Self:
        """Return a copy of the optimizer with another learning rate.

        Args:
            rate: the new rate; its limits are not checked.
        """
        return self.model_copy(update={"lr": float(rate)})

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Update theta and the moments with the private mean of step ``moments.step``, in place.

        Lines 12 to 15 of Algorithm 1 for DP-MacAdam. The vectors are blocks of those of the run, so
        that they stay in cache. So each coordinate must be updated by itself: a norm or a sum over
        coordinates would be that of a block.

        Args:
            theta: parameters theta_(t-1), shape (block,), which become theta_t.
            eta: ``lr`` times the factor of the schedule.
            private: private mean g-tilde_t, shape (block,), with the variance of its noise.
            moments: moments m_(t-1) and v_(t-1), those named in :attr:`keeps`, which the method
                updates. ``moments.step`` is t already.
        """
        raise NotImplementedError


class InBall(Optimizer, frozen=True):
    """Optimizer whose gradients are clipped to a ball around the origin, a base class.

    Attributes:
        clip_norm: clipping norm C, the radius.
    """

    of_privacy: ClassVar[frozenset[str]] = frozenset({"clip_norm"})

    clip_norm: Scale  # C


Registered = TypeVar("Registered", bound=type[Optimizer])

#: Optimizers by name, in the order of help and tables.
OPTIMIZERS: dict[str, type[Optimizer]] = {}


def register_optimizer(
    name: str, *, lr_on: Mapping[str, float] | None = None, paper: bool = False
) -> Callable[[Registered], Registered]:
    """Register a class of optimizers by its name, for ``--optimizer``.

    The first line of the class's docstring is its summary in help. See :class:`Optimizer` for an
    example.

    Args:
        name: name in help, reports and tables. An earlier optimizer of the name is replaced.
        lr_on: default learning rates by dataset, where they differ from that of the field.
        paper: whether it is one of the DP-MacAdam paper's.

    Returns:
        A decorator, which returns its class.
    """

    def register(kind: Registered) -> Registered:
        kind.name = name
        kind.paper = paper
        kind.lr_on = lr_on or {}
        first_line, _, _ = (kind.__doc__ or "").partition("\n")
        kind.summary = first_line.rstrip(".")
        OPTIMIZERS[name] = kind
        return kind

    return register


def defaults_of(name: str) -> str:
    """Return the defaults of a hyperparameter for help, the most common one first.

    Args:
        name: a hyperparameter that has a default in all optimizers which have it.

    Example:
        >>> import dpmac_cli.optim
        >>> defaults_of("beta1")
        '0.9; adaclip 0.99'
    """
    defaults = dict[str, float]()
    for kind in OPTIMIZERS.values():
        if name in kind.model_fields:
            defaults[kind.name] = kind.model_fields[name].default
    [(common, _)] = Counter(defaults.values()).most_common(1)
    parts = [f"{common:g}"]
    for optimizer, value in defaults.items():
        if value != common:
            parts.append(f"{optimizer} {value:g}")
    return "; ".join(parts)
