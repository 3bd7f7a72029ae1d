"""Time that a run will take, measured on generated records: no record of the dataset is read."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpmac_cli.config.plan import AuditPlan, TrainPlan
from dpmac_cli.data.dataset import Data, Split, standardisation
from dpmac_cli.models import build
from dpmac_cli.models.registry import UserModel
from dpmac_cli.models.validation import form_of
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import PreparedRun, cut_network, forms_of, independence_of
from dpmac_cli.runs.setup import make_trainer

#: Seconds besides training, scoring and features: start, validation and the files of the run.
AROUND = 15.0
#: Chunks in the longer of two steps that are timed, and how often each is timed.
CHUNKS, ROUNDS = 3, 3
#: Images whose features are timed at a time.
IMAGES = 64


@dataclass(frozen=True)
class Duration:
    """Estimated seconds of a run: ``before`` the first step and after the last, and per epoch."""

    before: float
    epoch: float

    def epochs_within(self, minutes: float, most: int) -> int:
        """Return the number of epochs that fit, at least 1 and at most ``most``."""
        fit = (60 * minutes - self.before) / self.epoch
        return max(1, min(most, int(fit)))


def duration(plan: TrainPlan) -> Duration:
    """Return how long a run would take, from a few steps on generated records.

    The run takes place on the same device, with the same network, features and chunks. Raises the
    errors of :func:`~dpmac_cli.runs.setup.make_trainer`.
    """
    device, facts, run = choose_device(plan.run.device), plan.data.facts, plan.run
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        chunk = min(run.physical_batch_on(device.type), plan.privacy.batch_size)
        short, _ = _step(plan, chunk, device)
        long, score = _step(plan, CHUNKS * chunk, device)
        per_record = max(0.0, long - short) / ((CHUNKS - 1) * chunk)
        per_step = max(0.0, short - chunk * per_record)
        features = _features(plan, device) * (facts.train_size + facts.test_size)
    records = facts.train_size * plan.recipe.inputs
    epoch = records * per_record + plan.privacy.steps_per_epoch * per_step + facts.test_size * score
    return Duration(AROUND + features, epoch)


def _step(plan: TrainPlan, records: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step on N records, and those of scoring one."""
    found = replace(plan.data.found, facts=replace(plan.data.facts, train_size=records), unit="")
    small = replace(
        plan,
        data=replace(plan.data, found=found),
        privacy=replace(
            plan.privacy,
            batch_size=records,
            event=replace(plan.privacy.event, sampling_rate=1.0, steps_per_epoch=1),
            scores=None,
            audit=AuditPlan(),
        ),
        recipe=replace(plan.recipe, records=1),
    )
    task = _task(small, records, device)
    trainer = make_trainer(small, steps=ROUNDS + 1, device=device, keys=make_keys(0), task=task)
    return _seconds(trainer.step), _seconds(trainer.evaluate) / records


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call, after one that is not timed."""
    call()
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _network(plan: TrainPlan, device: torch.device) -> torch.nn.Module:
    """Return the network of a plan, with random weights."""
    network = plan.network
    return build.build_model(
        network.model,
        plan.data.facts.signature,
        0,
        fix_norm=network.fix_norm,
        features=network.features,
        trained=network.trained if network.starts_public else None,
        isolated=network.isolate,
    ).to(device)


def _task(plan: TrainPlan, records: int, device: torch.device) -> PreparedRun:
    """Return network and generated records, or generated features of them."""
    model = _network(plan, device)
    facts, task = plan.data.facts, plan.data.facts.task
    own = isinstance(plan.network.model, UserModel)
    form = form_of(model, forms_of(plan, own=own), task.outputs)
    gain, offset = torch.ones(1, 1, 1, device=device), torch.zeros(1, 1, 1, device=device)
    parts = cut_network(plan.network, facts, model)
    if parts is None:
        trained, x = model, _images(plan, records, device).reshape(records, *form)
    else:
        like = parts.features(_images(plan, 2, device))
        trained, x = parts.head, torch.randn(records, *like.shape[1:], device=device)
    kind, why = independence_of(plan.network, facts, model, parts, form, own=own)
    targets = task.examples()[1]
    split = Split(x, targets[torch.arange(records) % len(targets)].to(device))
    return PreparedRun(
        model=model,
        trained=trained,
        data=Data(split, split, gain, offset, task),
        independence=kind,
        why=why,
    )


def _images(plan: TrainPlan, records: int, device: torch.device) -> Tensor:
    """Return generated records, standardised."""
    facts = plan.data.facts
    gain, offset = standardisation(facts.levels, facts.mean, facts.std, device)
    pixels = torch.rand(records, *facts.shape, device=device) * facts.levels
    return torch.addcmul(offset, pixels, gain)


def _features(plan: TrainPlan, device: torch.device) -> float:
    """Return the seconds that the features of a record take; 0 without features."""
    model = _network(plan, device)
    parts = cut_network(plan.network, plan.data.facts, model)
    if parts is None:
        return 0.0
    images = _images(plan, IMAGES, device)
    return _seconds(lambda: parts.features(images)) / IMAGES
