"""From a checked configuration to a trainer: device, data, model, optimizer and secrets."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from dpmac_cli import config as configuration
from dpmac_cli.canaries import Canaries, GradientCanaries, ImageCanaries, Recipe
from dpmac_cli.config import TrainConfig
from dpmac_cli.data import Data, load_data
from dpmac_cli.diagnostics import Diagnostics
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.engine import Hyperparameters, Plan, Trainer
from dpmac_cli.errors import InputError
from dpmac_cli.forward_draws import LayerDraws
from dpmac_cli.models import build_model
from dpmac_cli.noise import noise_source, stream_seeds
from dpmac_cli.sampling import make_sampler


def choose_device(name: str) -> torch.device:
    """The device of a name; "auto" is CUDA where there is one.

    Raises:
        InputError: it is not there.
    """
    pattern, meaning = configuration.DEVICE
    if not re.fullmatch(pattern, name):
        raise InputError(f"--device must be {meaning}, not '{name}'.")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: CUDA devices here: {torch.cuda.device_count()}. "
            "Use --device cpu or auto."
        )
    return device


def make_trainer(
    config: TrainConfig,
    steps: int,
    device: torch.device,
    diagnostics: Diagnostics | None = None,
    branch: int = 0,
    data: Data | None = None,
) -> Trainer:
    """Data, model, optimizer and secrets of a run or a branch, ready for its first step."""
    seeds = stream_seeds(config.seed, branch)
    data = data or load_data(config.data, data_folder(config.data_dir), device)
    facts, word = config.facts, _word(seeds["init"])
    model = build_model(config.model, facts, word, fix_norm=config.fix_norm).to(device)
    canaries = _canaries(config, model, data, seeds)
    if isinstance(canaries, ImageCanaries):
        data = canaries.data
    mechanism = SecureMechanism if config.secure else GaussianMechanism
    return Trainer(
        model,
        data,
        config.method,
        hyperparameters(config),
        mechanism(config.sigma or 0.0, config.batch_size),
        Plan(
            steps,
            config.steps_per_epoch,
            config.physical_batch,
            not config.no_dp,
            config.compile,
            config.recipe,
        ),
        make_sampler(
            config.sampler,
            config.facts.train_size + (config.canaries or 0),
            config.batch_size,
            seeds["sampler"],
            config.secure,
            config.sampling_rate,
        ),
        noise_source(seeds["noise"], config.secure),
        diagnostics.observe if diagnostics else None,
        canaries,
        # Networks of ours draw nothing; what a person's own does in its forward, nobody can tell.
        LayerDraws(seeds["layers"]) if ":" in config.model or config.augment else None,
    )


def hyperparameters(config: TrainConfig) -> Hyperparameters:
    """The settings of the update rule and the clipping."""
    return Hyperparameters(
        lr=config.lr,
        clip_norm=config.clip_norm,
        beta1=config.beta1,
        beta2=config.beta2,
        gamma=config.gamma,
        gamma_prime=config.gamma_prime,
        h1=config.h1,
        h2=config.h2,
        kappa=cast(Literal["paper", "exact", "tracked"], config.kappa),
        phi=config.phi,
    )


def _canaries(
    config: TrainConfig,
    model: nn.Module,
    data: Data,
    seeds: Mapping[str, np.random.SeedSequence],
) -> Canaries | None:
    """What an audit run adds to the records; None in any other."""
    facts = config.facts
    if config.canaries is None:
        return None
    recipe = Recipe(config.canaries, seeds["canaries"], seeds["coins"], data.gain.device)
    if config.canary_kind == "images":
        return ImageCanaries(data, facts.levels, len(facts.classes), recipe)
    parameters = sum(p.numel() for p in model.parameters())
    return GradientCanaries(parameters, config.sampling_rate, len(data.train), recipe)


def data_folder(chosen: Path | None) -> Path:
    """Where data sets lie: the flag, the environment, or a cache in the home folder."""
    if chosen is not None:
        return chosen
    named = os.environ.get("DPMAC_DATA_DIR")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "dpmac"


def environment(device: torch.device) -> dict[str, Any]:
    """What must be the same for a resumed run to compute the same bits."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _word(seed: np.random.SeedSequence) -> int:
    return int(seed.generate_state(1, np.uint32)[0])


def device_name(device: torch.device) -> str:
    """What the device is called, for reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
