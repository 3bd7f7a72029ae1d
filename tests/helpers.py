"""A tiny task, and trainers for it with every random choice in a test's hands."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kstest
from torch import Tensor, nn

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.places import overflow_of, places_of
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.facts import DataFacts, InMemoryData, PrivateNotes, published_facts
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.plan import optimizer_of as optimizer_of_settings
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Dataset, Declaration
from dpmac_cli.data.dataset import Split as Records
from dpmac_cli.data.published import read_published
from dpmac_cli.data.read import read_own
from dpmac_cli.data.table_schema import TableSchema
from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, PrivateMean, SecureMechanism
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.models.dataset import Data, Split, on_device
from dpmac_cli.optim import OPTIMIZERS, Optimizer
from dpmac_cli.randomness.keystream import Keys, generator, make_keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise, SeededNormals
from dpmac_cli.randomness.sampling import KeyedSampler, RandomPlaces, Sampler
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.training.data_sum import DataSum
from dpmac_cli.training.distributed import Ranks

CLASSES, SIDE, WIDTH = 4, 3, 5
#: The number of parameters of :func:`tiny_model`.
DIMENSION = (SIDE**2 + 1) * WIDTH + (WIDTH + 1) * CLASSES


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of all optimizers on the tiny task, by the paper's symbols."""

    lr: float = 0.05
    clip_norm: float = 2.5  # some samples of the tiny task are clipped by it and some are not
    beta1: float = 0.9
    beta2: float = 0.99
    gamma: float = 1e-8
    gamma_prime: float = 1e-4
    h1: float = 1e-6
    h2: float = 1e-2
    kappa: str = "paper"
    phi: str = "paper"


HYPER = Hyperparameters()
MECHANISM = GaussianMechanism(1.0, 8)
#: The norm that small steps are clipped to.
CLIP_LIMIT = clip_limit(1)


def planned(*, steps: int = 20, steps_per_epoch: int = 5, unit: str = "", **given: Any) -> Plan:
    """A plan of some settings, without a schedule, averages or views unless they are given."""
    settings = Settings.model_validate({"recipe": "paper", "physical_batch": 1000, **given})
    facts = DataFacts(**vars(DATASETS["digits"]), name="digits", typed="digits", unit=unit)
    settings = completed(settings.replace(dataset="digits"), facts)
    event = TrainingEvent(0.2, 1.0, steps, steps_per_epoch=steps_per_epoch)
    return Plan(settings, facts, event, optimizer_of_settings(settings))


PLAN = planned()


def tiny_data(dtype: torch.dtype = torch.float64, *, records: int = 40, seed: int = 0) -> Data:
    """Random images, standardised to [-2, 2]; half as many to test on."""
    rng = np.random.default_rng(seed)

    def split(count: int) -> Split:
        images = rng.integers(0, 256, (count, 1, SIDE, SIDE), dtype=np.uint8)
        return Split(torch.from_numpy(images), torch.from_numpy(rng.integers(0, CLASSES, count)))

    gain, offset = torch.full((1, 1, 1), 1 / 64), torch.full((1, 1, 1), -2.0)
    constants = gain.to(dtype), offset.to(dtype)
    return Data(split(records), split(records // 2), *constants, class_task(CLASSES))


def class_task(count: int) -> Classification:
    """The task with classes 0, 1, 2 and so on."""
    return Classification(tuple(map(str, range(count))))


def tiny_model(dtype: torch.dtype = torch.float64, *layers: nn.Module) -> nn.Sequential:
    """A small MLP, always with the same parameters, behind some layers without any."""
    model = nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(SIDE**2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5, generator=generator)
    return model.to(dtype)


class Through(nn.Module):
    """A function of the whole batch as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def trained_names(model: nn.Module) -> set[str]:
    """The names of the parameters that are trained."""
    return {name for name, p in model.named_parameters() if p.requires_grad}


def without(batch: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    """A batch without one of its records."""
    return {name: torch.cat([t[:row], t[row + 1 :]]) for name, t in batch.items()}


def a_key(seed: int) -> bytes:
    """Return a key of 32 bytes."""
    return generator(bytes(32), seed).bytes(32)


@contextmanager
def equal_keys(seed: int = 0) -> Iterator[None]:
    """Give every training of a program that is created meanwhile the keys of a seed.

    A program cannot: two trainings with the same keys add the same noise.
    """

    def of_seed(_: None, base: int = 0) -> Keys:
        return make_keys(seed, base)

    with (
        patch("dpmac_cli.training.private_program.make_keys", of_seed),
        patch("dpmac_cli.training.private_step.make_keys", of_seed),
    ):
        yield


class Batches:
    """Hands out given batches, over and over, whatever the step."""

    def __init__(self, *batches: Sequence[int] | NDArray[np.int64]) -> None:
        self._batches = itertools.cycle(batches)

    def draw(self, step: int) -> NDArray[np.int64]:
        del step
        return np.asarray(next(self._batches), dtype=np.int64)


class KeptNoise(Noise):
    """Seeded noise that keeps what it drew."""

    def __init__(self) -> None:
        super().__init__(a_key(0))
        self.drawn: list[Tensor] = []

    def at(self, step: int) -> SeededNormals:
        normals = super().at(step)
        standard_normal = normals.standard_normal

        def kept(like: Tensor) -> Tensor:
            self.drawn.append(standard_normal(like))
            return self.drawn[-1].clone()

        normals.standard_normal = kept  # type: ignore[method-assign]
        return normals


def copied(region: Ellipsoid) -> Ellipsoid:
    """A region in memory of its own: the next step reuses that of a run."""
    return Ellipsoid(region.centre.clone(), region.inverse.clone(), region.factor.clone())


def place(trainer: Trainer, region: Ellipsoid) -> None:
    """Have the next step clip to a region."""
    trainer.state.region = copied(region)


@dataclass(frozen=True)
class Spy(GaussianMechanism):
    """A mechanism that keeps, step by step, the regions it was given and what it released."""

    regions: list[Ellipsoid] = field(default_factory=list)
    released: list[PrivateMean] = field(default_factory=list)

    def release(self, clipped: Tensor, region: Ellipsoid, noise: SeededNormals) -> PrivateMean:
        private = super().release(clipped, region, noise)
        # The next step reuses the memory of all of them.
        self.regions.append(copied(region))
        self.released.append(PrivateMean(private.value.clone(), region.scale, private.noise_ratio))
        return private

    def whitened_sum(self, step: int = -1) -> Tensor:
        """The noisy sum of a step, in the space where its sensitivity is 1; shape (d,)."""
        region, private = self.regions[step], self.released[step]
        return (private.value - region.centre) / region.scale * self.expected_batch


@dataclass(frozen=True)
class SecureSpy(Spy, SecureMechanism):
    """The same of a mechanism on a grid, with the noisy sums as they are there, in order."""

    sums: list[Tensor] = field(default_factory=list)

    def whitened(self, clipped: Tensor, b: Tensor, noise: SeededNormals) -> Tensor:
        total = super().whitened(clipped, b, noise)
        self.sums.append(total.clone())
        return total


def optimizer_of(name: str, **hyper: Any) -> Optimizer:
    """An optimizer with the hyperparameters of :data:`HYPER`, some of them changed."""
    kind, known = OPTIMIZERS[name], vars(HYPER) | hyper
    # Without limits: tests set rates of 0 and of infinity.
    return kind.model_construct(**{f: known[f] for f in kind.used() if f in known})


def make_trainer(
    name: str,
    mechanism: GaussianMechanism = MECHANISM,
    *,
    plan: Plan = PLAN,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    data: Data | None = None,
    model: nn.Module | None = None,
    sampler: Sampler | None = None,
    noise: Noise | None = None,
    ranks: Ranks | None = None,
    **hyper: Any,
) -> Trainer:
    """A trainer of the tiny task, fresh; ``hyper`` changes some of :data:`HYPER`."""
    # Where other processes run, two threads on tensors this small take seventy times as long.
    torch.set_num_threads(1)
    data, keys = data or tiny_data(dtype), make_keys(seed)
    records, batch = data.train.size, int(mechanism.expected_batch)
    leads = ranks is None or ranks.leads
    drawn = plan.settings.augment is not None or data.train.units
    layers = LayerDraws(keys.layers) if drawn else None
    plan = replace(plan, optimizer=optimizer_of(name, **hyper))
    rate = min(1.0, batch / records)
    overflow = overflow_of(plan.settings.delta)
    event = TrainingEvent(rate, mechanism.noise_multiplier, 10**6, overflow=overflow)
    ranks_of = ranks or Ranks()
    sampler = sampler or KeyedSampler(event, size=records, key=keys.sampler)
    count = places_of(event, records, ranks_of.size)
    places = RandomPlaces(keys.layers, count, ranks_of.rank)
    with full_float32():
        return Trainer(
            DataSum(
                model or tiny_model(dtype), data, plan, mechanism.expected_batch, layers, places
            ),
            plan=plan,
            steps=plan.event.steps,
            mechanism=mechanism,
            sampler=sampler if leads else None,
            noise=(noise or Noise(keys.noise)) if leads else None,
            account=Account(event=event, seeded=True, secure=False),
            ranks=ranks,
        )


def assert_deviation_of(samples: NDArray[np.float64], sigma: float, least: float = 0.001) -> None:
    """That noise is N(0, sigma^2), by a test that tells two thirds of it and one and a half.

    ``least`` is the probability of failing for noise that every run draws again.
    """
    assert kstest(samples / sigma, "norm").pvalue > least
    for factor in (2 / 3, 3 / 2):
        assert kstest(samples / (sigma * factor), "norm").pvalue < 1e-6


def walk(trainer: Trainer, steps: int) -> Tensor:
    """Take steps; theta after each of them, shape (steps, d)."""
    thetas = []
    for _ in range(steps):
        trainer.step()
        thetas.append(trainer.state.theta.clone())
    return torch.stack(thetas)


def in_chunks_of(physical_batch: int) -> Plan:
    """The plan with another physical batch."""
    return planned(physical_batch=physical_batch)


def per_sample_gradients(theta: NDArray[np.float64], data: Data, rows: Any) -> NDArray[np.float64]:
    """The gradients of the tiny model, worked out by hand; shape (rows, d)."""
    x = data.standardised(data.train.images[rows]).double().flatten(1).numpy()
    right = np.eye(CLASSES)[data.train.labels[rows].numpy()]
    w1, b1, w2, b2 = np.split(theta, np.cumsum([SIDE**2 * WIDTH, WIDTH, WIDTH * CLASSES]))
    w1, w2 = w1.reshape(WIDTH, SIDE**2), w2.reshape(CLASSES, WIDTH)
    hidden = np.tanh(x @ w1.T + b1)
    logits = hidden @ w2.T + b2
    odds = np.exp(logits - logits.max(1, keepdims=True))
    delta2 = odds / odds.sum(1, keepdims=True) - right
    delta1 = delta2 @ w2 * (1 - hidden**2)
    by_w1 = (delta1[:, :, None] * x[:, None, :]).reshape(-1, SIDE**2 * WIDTH)
    by_w2 = (delta2[:, :, None] * hidden[:, None, :]).reshape(-1, WIDTH * CLASSES)
    return np.concatenate([by_w1, delta1, by_w2, delta2], axis=1)


def numbers(*shape: int) -> Structure:
    """The structure of a sample of float32 numbers."""
    return Structure(torch.zeros(1, *shape))


Arrays = tuple[NDArray[Any], NDArray[np.int64]]


def declared(
    path: Path | str = "",
    test_fraction: float = 0.2,
    *,
    schema: TableSchema | None = None,
    texts: TextReader | None = None,
    in_memory: InMemoryData | None = None,
    **given: Any,
) -> Declaration:
    """A dataset of your own as settings declare it: a path, or records in memory."""
    given = {n: ",".join(map(str, v)) if isinstance(v, tuple) else v for n, v in given.items()}
    given = {n: v if v is None or isinstance(v, bool) else str(v) for n, v in given.items()}
    settings = {"dataset": in_memory or str(path), "test_fraction": str(test_fraction), **given}
    return Declaration(Settings.model_validate(settings), schema, texts)


def with_settings(of: Declaration, **settings: Any) -> Declaration:
    """A dataset with other settings."""
    return replace(of, settings=of.settings.replace(**settings))


def notes_on(of: Declaration) -> PrivateNotes:
    """Private notes on a dataset of your own."""
    return read_own(of).notes


def inspect(of: Declaration) -> DataFacts:
    """Facts of a dataset of your own."""
    return read_own(of).facts


def records_of(of: Declaration) -> tuple[Records, Records]:
    """Training and test records of a dataset of your own, with their units."""
    train, test = read_own(of).splits
    return train, test


def load_data(name: str, folder: Path, device: torch.device) -> Data:
    """A registered dataset on a device."""
    train, test = read_published(name, folder)
    return on_device(Dataset(train, test, published_facts(name)), device)


def load(of: Declaration) -> tuple[Arrays, Arrays]:
    """Training and test records of a dataset of your own, read from their file."""
    (x, y, _), (x_test, y_test, _) = records_of(of)
    records = (part.read() if isinstance(part, Rows) else part for part in (x, x_test))
    return (next(records), y), (next(records), y_test)


def unread() -> NoReturn:
    """Stand for the network of a run that a test makes up, which nothing reads."""
    raise AssertionError("no network was written")
