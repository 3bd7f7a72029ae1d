"""Model validation: reject networks that cannot be trained on each record alone, or published.

A network in training sees one record at a time (:mod:`dpmac_cli.dp.clipping.per_sample`), so it
cannot mix records. One that computes something else for a batch than for one record is trained on
other values than its author meant, so it is rejected, as are networks that store information about
records. All checks run on made-up samples and on copies of the network. They find mistakes; they
prove nothing about a network that means to cheat.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpmac_cli.dp.clipping.batches import Batch, map_rows, parts_by_name, tensors_in
from dpmac_cli.dp.torch_errors import (
    DIFFERENTIATED,
    HELD_DTYPE,
    differentiates,
    mixes_dtypes,
    what_failed,
)
from dpmac_cli.errors import DpmacError, ModelError
from dpmac_cli.models.checked_parts import ROUNDING, check_parts, computed_tensor
from dpmac_cli.models.fingerprint import Fingerprint
from dpmac_cli.models.mixing import FEW, check_alone
from dpmac_cli.models.modes import evaluating
from dpmac_cli.models.trial_samples import NAMED, Trial, device_of, dtype_of

#: Layers whose random draws are handled in training and do not depend on samples.
DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
#: Remedy for a network that a forward pass changes.
STORED = (
    "It would store information about private records without noise. Turn this off (for "
    "normalisation layers, track_running_stats=False) and keep nothing from one batch to the next."
)
#: Namespaces of torch's operations between processes.
COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
#: Words of torch's and Python's messages on shapes.
OF_SHAPES = ("size", "shape", "imension", "channels", "to unpack")
#: Remedies for failures on made-up samples.
OWN_TENSORS = "Tensors that it creates must use the dtype and device of its inputs (x.new_zeros)."
WRITE_SHAPE = (
    "A network gets records in the shape of their array, images with channels first: in its "
    "forward, write x.flatten(1) for rows of numbers, or x[:, None] to add a dimension of channels."
)
TARGETS = (
    "For one output per record, outputs have shape (records, 1) and targets (records,): write "
    "model(x).squeeze(1). "
)
RANGES = (
    "If its numbers must be in a range, pass example= with rows that are public: its numbers are "
    "used where random ones fail. "
)


def check_model(
    model: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    *,
    frozen: bool = False,
    isolated: bool = False,
    built_in: bool = False,
    example: Tensor | None = None,
) -> None:
    """Reject a classifier that mixes or stores samples, or cannot be trained.

    Args:
        model: maps (samples, *shape) to logits, (samples, classes). It is not changed.
        shape, classes: shape of one sample, number of classes.
        frozen: only the last layer, a linear one, is trained. The rest is checked in evaluation
            mode, in which it is also run: batch norm is a public constant there.
        isolated: the network may compute something else for a batch than for each sample alone.
        built_in: the network is built in, so only its output is checked.
        example: made-up samples to try it on, shape (rows, *shape); None for random numbers.

    Raises:
        ModelError: names the layer and the remedy.
    """
    trial = Trial.of(model, shape, classes, example)
    check_trial(model, trial, frozen=frozen, isolated=isolated, built_in=built_in)


def check_trial(
    model: nn.Module,
    trial: Trial,
    *,
    frozen: bool = False,
    isolated: bool = False,
    built_in: bool = False,
) -> None:
    """Reject a model on any samples; it may return its own losses.

    Checked are, in this order: layers and tensors; the output for several samples and for one;
    precision and other processes; that a pass changes nothing and can be repeated; and that a
    batch gives what its samples give alone.

    Args:
        model: maps a batch to logits, shape (samples, classes), or to one loss per sample, shape
            (samples,), or to the mean loss of the batch, shape (). It is not changed, except as in
            :func:`keep_constants`.
        trial: made-up samples, and the number of classes; None for a model that returns losses.
        frozen: whether only the last layer is trained, and the others are in evaluation mode.
        isolated: whether the model may compute something else for a batch than for each sample.
        built_in: whether the model is built in, so that only its output is checked.

    Raises:
        ModelError: names the layer and the remedy.
    """
    check_parts(model, frozen)
    if trial.classes is None:
        keep_constants(model, trial)
    try:
        probe = copy.deepcopy(model)
    except (Exception, SystemExit) as failure:
        name = computed_tensor(model)
        why = f"{name} was computed from parameters: compute it in forward." if name else ""
        raise ModelError(
            f"The model cannot be copied, and validation works on a copy. "
            f"{why or what_failed(failure)}"
        ) from failure
    with explained(trial, model):
        with torch.no_grad():
            probe = probe if trial.inputs.keep_dtype else probe.double()
            with evaluating(probe):
                _check_output(probe, trial, FEW, scored=True)
            prepared(probe, frozen)
            for count in (1,) if isolated else (FEW, 1):
                _check_output(probe, trial, count)
        if built_in:
            return
        if not frozen:
            check_precision(model, trial)
        randomise_zeros(probe)
        _check_forward(probe, trial)
        if not isolated:
            check_alone(probe, trial)


def keep_constants(model: nn.Module, trial: Trial) -> None:
    """Let a network make the constants that it makes when it first runs, before it is validated.

    A network that changes itself in training is refused, because it could carry a record to the
    next step. Networks of transformers change once: they write the kind of their loss, a text, to
    ``config.problem_type``. So a value that is None becomes what it is after a pass on a made-up
    sample, if it is a number or a text, and the same after a pass on zeros. Neither is a record, so
    the value depends on none. Every other change is left for :class:`.Fingerprint` to notice.

    Args:
        model: the network with its loss, whose attributes are changed in place. Two copies of it
            run, on one sample each.
        trial: made-up samples.
    """
    try:
        sample = trial.samples(1)
        first = _constants_after(model, sample, trial)
        second = _constants_after(model, map_rows(torch.zeros_like, sample), trial)
    except (Exception, SystemExit):  # noqa: BLE001  (of any kind: validation says why)
        return
    for path, holder in list(_holders(model)):
        values = vars(holder)
        for name, value in list(values.items()):
            if value is not None:
                continue
            constant, other = first.get((*path, name)), second.get((*path, name))
            if constant is not None and type(other) is type(constant) and other == constant:
                values[name] = constant


def _constants_after(model: nn.Module, x: Batch, trial: Trial) -> dict[tuple[str, ...], Any]:
    """Return the numbers and texts that a copy of a network holds after a pass, by path."""
    network = copy.deepcopy(model)
    network = network if trial.inputs.keep_dtype else network.double()
    with torch.no_grad(), same_draws():
        network(x)
    constants = dict[tuple[str, ...], Any]()
    for path, holder in _holders(network):
        for name, value in vars(holder).items():
            if isinstance(value, bool | int | float | str):
                constants[*path, name] = value
    return constants


def _holders(network: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the modules of a network, and objects in their attributes such as a config, by path."""
    for name, module in network.named_modules():
        yield (name, ""), module
        for attribute, value in vars(module).items():
            if hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type):
                yield (name, attribute), value


class _Permitted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Reject operations that read other processes, or whose results have fewer than 32 bits.

    The latter is so under autocast.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVE:
            raise ModelError(
                f"The model or its loss calls torch.distributed ({func.overloadpacket.__name__}), "
                "by which a record changes what other processes compute of their records. Remove "
                "that: dpmac adds up the gradients of several processes itself."
            )
        result = func(*args, **(kwargs or {}))
        for value in () if func.is_view else tensors_in(result):  # a record may be in float16
            if value.is_floating_point() and value.itemsize < 4:
                raise ModelError(
                    f"The model computes {func.overloadpacket.__name__} in {value.dtype}, as under "
                    f"torch.autocast. {ROUNDING} Remove autocast and casts to half precision."
                )
        return result


@torch.enable_grad()
def check_precision(model: nn.Module, trial: Trial) -> None:
    """Reject a network that reads other processes, or computes in fewer than 32 bits on its device.

    Args:
        model: network with its loss, on the device to train on. A copy of it runs.
        trial: made-up samples.

    Raises:
        ModelError: names the operation.
    """
    x = trial.inputs.to(device_of(model)).made_up(1)
    network = copy.deepcopy(model)
    trained = [p for p in network.parameters() if p.requires_grad]
    with torch.random.fork_rng(), _Permitted():  # type: ignore[no-untyped-call]
        loss = trial.losses(network(x)).sum()
        if loss.requires_grad and trained:
            torch.autograd.grad(loss, trained, allow_unused=True)


@contextlib.contextmanager
def explained(trial: Trial, model: nn.Module) -> Iterator[None]:
    """Convert exceptions of user code on made-up samples to ModelError, for a ``with`` block.

    Samples are not private, so the message quotes the exception.

    Args:
        trial: made-up samples on which it runs.
        model: network with its loss, for the remedy.

    Raises:
        ModelError: in place of any other exception of the block.
    """
    try:
        yield
    except (Exception, SystemExit) as failure:
        reason = failure.__cause__ if isinstance(failure, DpmacError) else failure
        if reason is None:
            raise
        raise ModelError(
            f"The model failed on samples of shape {trial.inputs}"
            f"{'' if trial.inputs.keep_dtype else ' in float64'}: "
            f"{what_failed(reason)} {_remedy(reason, trial, model)}"
        ) from failure


def _remedy(reason: BaseException, trial: Trial, model: nn.Module) -> str:
    """Return what to do about a failure on made-up samples."""
    if differentiates(reason):
        return DIFFERENTIATED
    if mixes_dtypes(reason):
        return _other_dtypes(trial, model)
    message = str(reason)
    of_shapes = any(word in message for word in OF_SHAPES)
    if trial.classes is not None:
        remedy = WRITE_SHAPE if of_shapes else OWN_TENSORS
    else:
        remedy = (TARGETS if of_shapes else RANGES) + OWN_TENSORS
    return f"It must accept any number of such samples, including one. {remedy}"


def _other_dtypes(trial: Trial, model: nn.Module) -> str:
    """Return which parts of a batch or a network have another dtype, and a remedy.

    Args:
        trial: made-up samples in the shapes and dtypes of the records.
        model: network with its loss.
    """
    wanted, in_float64 = dtype_of(model), list[str]()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype == torch.float64:
            in_float64.append(name.removeprefix("network."))
    dtypes = dict[str, torch.dtype]()
    for name, part in parts_by_name(trial.inputs.template).items():
        if isinstance(part, Tensor) and part.is_floating_point() and part.dtype != wanted:
            dtypes[name] = part.dtype
    if in_float64 and (wanted != torch.float64 or dtypes):
        if len(in_float64) > NAMED:
            in_float64 = [*in_float64[:NAMED], "..."]
        return (
            f"These parts of the network are torch.float64, and others or the records are not: "
            f"{', '.join(in_float64)}. Add this line before training: network.float()"
        )
    if dtypes:
        parts = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        first, *_ = dtypes
        return f"{parts}, and the network {wanted}. Write {first}.to({wanted}) in the loss."
    return f"{HELD_DTYPE} {OWN_TENSORS}"


def _check_output(model: nn.Module, trial: Trial, count: int, *, scored: bool = False) -> None:
    """Reject a model whose output is of another shape, or no real numbers.

    Args:
        model: the model or a copy of it.
        trial: made-up samples; its number of classes, or None, tells what the output should be.
        count: number of samples in the batch.
        scored: whether the model is in evaluation mode, in which outputs may be integers or NaN.

    Raises:
        ModelError: tells the shape that was returned, and the one to return.
    """
    logits: Any = model(trial.samples(count))
    if trial.classes is None and isinstance(logits, Tensor) and logits.ndim == 0:
        logits = logits.expand(count)  # the mean loss of the batch: see check_alone
    if not isinstance(logits, Tensor):
        returned = f"a {type(logits).__name__}"
    elif logits.shape != ((count,) if trial.classes is None else (count, trial.classes)):
        returned = f"{tuple(logits.shape)}"
    elif not logits.is_floating_point() and not scored:
        returned = f"{logits.dtype} numbers"
    elif not bool(logits.isfinite().any()) and not scored:
        returned = "only NaN or infinity"
    else:
        return
    if trial.classes is None:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
        raise ModelError(
            f"The loss returns {returned} for a batch of {count} samples. Return one real loss per "
            "sample, a tensor of shape (samples,): cross_entropy(output, target, reduction='none'),"
            f" or for tokens, (losses * mask).sum(1).{_on_shape(shape, count)}"
        )
    flat = ""
    if isinstance(logits, Tensor) and logits.ndim > 2:
        flat = " For one row of numbers per sample, write x.flatten(1) in its forward."
    raise ModelError(
        f"The model returns {returned} for {count} samples of shape {trial.inputs}. Return one "
        f"tensor of real logits of shape (samples, {trial.classes}), with one column per class."
        f"{flat}"
    )


def _on_shape(shape: tuple[int, ...], count: int) -> str:
    """Return what a shape of losses tells of the shapes of outputs and targets, as a sentence."""
    if count > 1 and shape == (count, count):
        return (
            f" Outputs of shape ({count}, 1) and targets of shape ({count},) give a loss for every "
            "pair of samples: write model(x).squeeze(1)."
        )
    if shape == (count, 1):
        return (
            f" Outputs of shape ({count}, 1) give losses of that shape: write model(x).squeeze(1)."
        )
    return ""


def prepared(model: nn.Module, frozen: bool) -> nn.Module:
    """Turn off the dropout of a network, so that its outputs have no random draws; return it.

    So what a sample changes in another's outputs is not hidden.

    Args:
        model: a copy of the network, which is changed in place.
        frozen: whether only the last layer is trained; the copy is then set to evaluation mode.
    """
    if frozen:
        model.eval()
    for module in model.modules():
        if type(module) in DROPOUT:
            module.forward = lambda x: x  # still in its mode, which other code may check
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    return model


@torch.no_grad()
def randomise_zeros(model: nn.Module) -> None:
    """Randomise zero parameters, which would hide the effects of earlier layers, in place.

    A last layer that begins at zero has one output for all inputs, so that a network that mixes
    samples would look as if it did not. The values are the same in each call.

    Args:
        model: a copy of the network that is only validated. Parameters of which any value is not 0
            stay as they are; others become normal with standard deviation 0.1.
    """
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.is_floating_point() and not p.any():
            values = torch.empty(p.shape, dtype=p.dtype)
            values.normal_(std=0.1, generator=generator)
            p.data = values.to(p.device)


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Seed torch's global generator of the CPU with 0 in a ``with`` block, and restore it after.

    So a network draws the same numbers in two blocks; in training, the seed is secret.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@torch.no_grad()
def _check_forward(model: nn.Module, trial: Trial) -> None:
    """Reject a model that changes itself, or whose outputs differ for the same sample.

    It runs twice on one sample, with the same seed of torch's generator. A model that keeps
    something of the first pass, or draws from another generator, gives another output.

    Args:
        model: a copy, :func:`prepared`, in float64 where that is possible.
        trial: made-up samples.

    Raises:
        ModelError: tells what has changed.
    """
    x = trial.samples(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = Fingerprint(model, list(map(id, trained)))
    outputs = list[Tensor]()
    for _ in range(2):
        with same_draws():
            outputs.append(model(x))
        changes = before.changed(STORED)
        if changes:
            raise ModelError(f"A forward pass changes the network: {changes}")
    first, again = outputs
    if not torch.allclose(again, first, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise ModelError(
            "The model returns different outputs for the same sample. Use only torch for random "
            "numbers (nn.Dropout, torch.rand, torch.bernoulli), because its seed is secret. If the "
            "model stores information about its inputs, remove that: inputs are private records."
        )
