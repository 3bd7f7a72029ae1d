"""Saved states of private steps."""

from collections.abc import Mapping
from typing import Any, TypedDict, cast

from torch import Tensor

from dpmac_cli.dp.clipping.batches import map_rows
from dpmac_cli.errors import InputError
from dpmac_cli.runs.step_engine import StepEngine
from dpmac_cli.training.lineage import Training


class SavedStep(TypedDict):
    """State of a :class:`.PrivateStep`, with tensors on the CPU. No key is in it.

    ``trainings`` are those of the network, the last of which is the one that was saved.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    trainings: list[dict[str, Any]]
    structure: Any
    public: Any
    lr: float


def state_of(engine: StepEngine, earlier: tuple[Training, ...], lr: float) -> SavedStep:
    """Return what is saved of a private step."""
    state, structure = engine.descent.state, engine.structure
    return {
        "tensors": {name: t.detach().cpu().clone() for name, t in state.tensors().items()},
        "numbers": state.numbers(),
        "trainings": [training.as_json() for training in (*earlier, engine.training)],
        "structure": map_rows(Tensor.cpu, structure.template),
        "public": structure.keep,
        "lr": lr,
    }


def checked_state(given: object) -> SavedStep:
    """Return a state of :class:`.PrivateStep`. Raises InputError if it is not one."""
    known = SavedStep.__required_keys__
    missing = sorted(known - given.keys()) if isinstance(given, Mapping) else sorted(known)
    if missing:
        raise InputError(
            f"This is not a state of PrivateStep: it has no {', '.join(missing)}. Pass what "
            "step.state_dict() returned, or what torch.load read of it. The state_dict of a "
            "network goes to network.load_state_dict(...), which does not know what its training "
            "cost."
        )
    return cast(SavedStep, given)
