"""Model registry, and validation: models that mix samples are rejected."""

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from dpmac_cli.data.registry import DATASETS
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from dpmac_cli.models import architectures
from dpmac_cli.models.build import build_model
from dpmac_cli.models.registry import MODELS, BuiltIn
from dpmac_cli.models.validation import check_model
from tests.helpers import Through, numbers

IMAGE = (4, 6, 6)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def classifier(*middle: nn.Module) -> nn.Module:
    """A small network over IMAGE with layers under test in its middle."""
    return nn.Sequential(nn.Conv2d(4, 4, 1), *middle, nn.Flatten(), nn.Linear(144, 3))


def assert_is_refused(model: nn.Module) -> None:
    """It computes something else for a batch, so it is not what would be trained."""
    with pytest.raises(ModelError, match="for a batch than for one sample at a time"):
        check_model(model, IMAGE, 3)
    check_model(model, IMAGE, 3, isolated=True)


def test_the_catalog_names_what_can_be_built_and_loaded() -> None:
    assert all(callable(getattr(architectures, kind.builder)) for kind in MODELS.values())
    assert {name for name, facts in DATASETS.items() if not facts.torchvision} == {"digits"}
    assert {facts.defaults.model for facts in DATASETS.values()} <= MODELS.keys()


@pytest.mark.parametrize(
    ("model", "dataset", "count"), [("mlp", "mnist", 795_010), ("cnn", "cifar10", 582_346)]
)
def test_parameter_counts_of_the_paper(model: str, dataset: str, count: int) -> None:
    built = build_model(BuiltIn(model), DATASETS[dataset].signature, seed=0)
    assert sum(p.numel() for p in built.parameters() if p.requires_grad) == count


@pytest.mark.parametrize(
    ("name", "dataset"),
    [(name, "digits") for name in MODELS]
    + [(facts.defaults.model, dataset) for dataset, facts in DATASETS.items()],
)
def test_models_fit_the_smallest_images_and_their_own_data_set(name: str, dataset: str) -> None:
    facts = DATASETS[dataset]
    logits = build_model(BuiltIn(name), facts.signature, seed=0)(torch.randn(2, *facts.shape))
    assert logits.shape == (2, len(facts.task.names))


def test_the_seed_decides_the_weights() -> None:
    def weights(seed: int) -> Tensor:
        model = build_model(BuiltIn("mlp-small"), DATASETS["digits"].signature, seed)
        return nn.utils.parameters_to_vector(model.parameters())

    first = weights(1)
    torch.randn(10)  # where the global generator stands must not matter
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    build_model(BuiltIn("cnn"), DATASETS["digits"].signature, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.privacy
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm, nn.LazyBatchNorm2d])
def test_batch_norm_is_refused_by_name_with_its_remedy(norm: Callable[..., nn.Module]) -> None:
    layer = norm() if norm is nn.LazyBatchNorm2d else norm(4)
    model = classifier(nn.Sequential(nn.ReLU(), layer))
    with pytest.raises(ModelError, match=rf"1\.1 is a {type(layer).__name__}.*GroupNorm"):
        check_model(model, IMAGE, 3)


@pytest.mark.privacy
def test_batch_norm_is_refused_in_evaluation_mode_and_without_statistics() -> None:
    flat = nn.BatchNorm1d(144, track_running_stats=False)
    model = nn.Sequential(nn.Flatten(), flat, nn.Linear(144, 3)).eval()
    with pytest.raises(ModelError, match="1 is a BatchNorm1d"):
        check_model(model, IMAGE, 3)


@pytest.mark.privacy
def test_running_statistics_are_refused() -> None:
    keeps = nn.InstanceNorm2d(4, track_running_stats=True)
    with pytest.raises(ModelError, match=r"1\.running_mean was.*track_running_stats=False"):
        check_model(classifier(keeps), IMAGE, 3)
    check_model(classifier(nn.InstanceNorm2d(4, affine=True)), IMAGE, 3)


@pytest.mark.privacy
@pytest.mark.parametrize(
    "mix",
    [
        pytest.param(lambda x: x - x.mean(0), id="mean"),
        pytest.param(lambda x: x / x.norm(), id="norm"),
        pytest.param(lambda x: x.softmax(0), id="softmax"),
        pytest.param(lambda x: x.sort(0).values, id="sort"),
        pytest.param(lambda x: x.cumsum(0), id="running sum"),
        pytest.param(lambda x: x.roll(1, 0), id="roll"),
        pytest.param(lambda x: x + x.flip(0), id="flip"),
        pytest.param(lambda x: x.flatten().roll(1).view_as(x), id="wrong reshape"),
        pytest.param(lambda x: x - x[-1:], id="last sample"),
        pytest.param(lambda x: x.flip(0).cumsum(0).flip(0), id="running sum from the end"),
        pytest.param(lambda x: x * (1 + torch.arange(len(x)).view(-1, 1, 1, 1)), id="position"),
        pytest.param(lambda x: x / len(x), id="batch size"),
        pytest.param(lambda x: x[torch.randperm(len(x))], id="permutation"),
    ],
)
def test_functions_that_depend_on_the_batch_are_refused(mix: Callable[[Tensor], Tensor]) -> None:
    assert_is_refused(classifier(Through(mix)))


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(nn.functional.dropout, id="dropout"),
        pytest.param(nn.functional.feature_alpha_dropout, id="feature-dropout"),
        pytest.param(lambda x: x + torch.randn_like(x), id="noise"),
        pytest.param(lambda x: x + x.new_empty(x.shape).normal_(1, 2).float(), id="normal"),
        pytest.param(lambda x: x + x.new_empty(x.shape).uniform_(1, 2), id="uniform"),
        pytest.param(lambda x: x * torch.bernoulli(x.sigmoid()), id="bernoulli"),
        pytest.param(lambda x: x * (0.9 + torch.rand(len(x), 1, 1, 1)).floor(), id="drop-path"),
        pytest.param(
            lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
            id="attention",
        ),
    ],
)
def test_draws_by_torch_are_supported(draw: Callable[[Tensor], Tensor]) -> None:
    check_model(classifier(Through(draw)), IMAGE, 3)


@pytest.mark.privacy
def test_numbers_that_are_drawn_in_place_differ_between_samples() -> None:
    """So stochastic depth is written in torchvision."""
    dropped = Through(lambda x: x * torch.empty(len(x), 1, 1, 1).bernoulli_(0.5))
    per_sample = PerSample(classifier(dropped), numbers(*IMAGE))
    assert per_sample.vmapped, per_sample.notes
    losses, _ = per_sample(torch.randn(1, *IMAGE).expand(40, -1, -1, -1), torch.zeros(40).long())
    assert 5 < int((losses == losses[0]).sum()) < 35
    assert len(torch.unique(losses)) == 2


def remembering() -> Callable[[Tensor], Tensor]:
    kept: list[Tensor] = []

    def remember(x: Tensor) -> Tensor:
        kept.append(x.mean((2, 3), keepdim=True)[:1])
        return x + len(kept)

    return remember


def drawing() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda x: x + torch.randn(x.shape, generator=generator)


@pytest.mark.privacy
@pytest.mark.parametrize(
    "function",
    [lambda x: x * random.random(), drawing(), remembering()],
    ids=["python", "a generator of its own", "memory"],
)
def test_other_outputs_for_the_same_sample_are_refused(
    function: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(ModelError, match="Use only torch for random"):
        check_model(classifier(Through(function)), IMAGE, 3, isolated=True)


@pytest.mark.privacy
def test_a_buffer_that_a_forward_pass_moves_is_named() -> None:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))
    with pytest.raises(ModelError, match=r"changes the network: 1\.parametrizations"):
        check_model(classifier(spectral), IMAGE, 3)


class Recentred(torch.autograd.Function):
    """What goes forwards treats samples apart; what comes back does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        [g] = gradients
        return g - g.mean(0)


def _hooked(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if x.requires_grad:
            # torch gives this method no types.
            x.register_hook(change)  # type: ignore[no-untyped-call]
        return x

    return forward


@pytest.mark.privacy
@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(_hooked(lambda g: g / g.norm()), id="norm"),
        pytest.param(_hooked(lambda g: g - g.mean(0)), id="mean"),
        pytest.param(_hooked(lambda g: g.flip(0)), id="order"),
        pytest.param(Recentred.apply, id="function"),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_network_that_mixes_samples_backwards_sees_one_at_a_time(
    forward: Callable[[Tensor], Tensor],
) -> None:
    """Each sample's gradient would be clipped, and all of them changed by one record more."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), Through(forward), nn.Linear(8, 3))
    check_model(model, IMAGE, 3)
    per_sample = PerSample(model, numbers(*IMAGE))
    theta, x, y = flatten_parameters(per_sample.layers), torch.randn(6, *IMAGE), torch.arange(6) % 3
    clipped, metric = ClippedChunkSum(per_sample, 6), RegionMetric(ball(1.0, theta))
    sums = [torch.empty_like(theta) for _ in range(2)]
    for row in range(6):
        kept = torch.arange(6) != row
        clipped.of(x, y, metric, sums[0])
        clipped.of(x[kept], y[kept], metric, sums[1])
        assert float((sums[0].double() - sums[1].double()).norm()) <= 1


def test_hooks_that_treat_samples_apart_are_fine() -> None:
    scaled = _hooked(lambda g: g / g.norm(dim=1, keepdim=True))
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), Through(scaled), nn.Linear(8, 3))
    check_model(model, IMAGE, 3)


def _of_one(x: Tensor) -> Tensor:
    if len(x) == 1:
        raise ValueError("more than one sample")
    return x


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: nn.LazyLinear(3), "shape of 1.weight is unknown"),
        (lambda: nn.Sequential(nn.Linear(144, 3), Through(Tensor.long)), "torch.int64 numbers"),
        (lambda: nn.Sequential(nn.Linear(144, 3), Through(Tensor.log)), None),
        (lambda: nn.Sequential(nn.Linear(144, 3), Through(lambda x: x / 0 * 0)), "NaN or infinity"),
        (lambda: nn.Sequential(nn.Linear(144, 3), Through(_of_one)), "samples, including one"),
        (lambda: nn.Sequential(nn.Linear(144, 3), Through(Tensor.detach)), "nothing would be tr"),
    ],
)
def test_what_training_would_fail_on_is_found_by_validation(
    build: Callable[[], nn.Module], said: str | None
) -> None:
    model = nn.Sequential(nn.Flatten(), build())
    with pytest.raises(ModelError, match=said) if said else nullcontext():
        check_model(model, IMAGE, 3)


def test_weights_that_begin_as_nan_are_named() -> None:
    linear = nn.Linear(144, 3)
    nn.init.constant_(linear.bias, torch.nan)
    model = nn.Sequential(nn.Flatten(), linear)
    with pytest.raises(ModelError, match=r"1\.bias contains NaN"):
        check_model(model, IMAGE, 3)


class LastOf(nn.Module):
    """What a recurrent layer says of the last row of an image."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.recur = kind(24, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        every, _ = self.recur(x.transpose(1, 2).flatten(2))
        out: Tensor = self.head(every[:, -1])
        return out


class Packed(LastOf):
    """A recurrent layer that is given sequences of several lengths at once."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 6)
        _, (last, _) = self.recur(
            pack_padded_sequence(x.transpose(1, 2).flatten(2), lengths, batch_first=True)
        )
        out: Tensor = self.head(last[0])
        return out


class TimeFirst(LastOf):
    """A recurrent layer that takes samples for time steps."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__(kind)
        self.recur.batch_first = False


@pytest.mark.parametrize("model", [LastOf, Packed])
def test_recurrent_layers_are_supported(model: type[LastOf]) -> None:
    net = model(nn.LSTM)
    net.recur = nn.LSTM(24, 4, 2, batch_first=True, dropout=0.5)
    check_model(net, IMAGE, 3)
    assert net.recur.dropout == 0.5, "trials use copies"


@pytest.mark.privacy
def test_a_recurrent_layer_over_the_batch_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"The LSTM recur computes something.*batch_first=True"):
        check_model(TimeFirst(nn.LSTM), IMAGE, 3)


def _raises(x: Tensor) -> Tensor:
    raise ValueError(f"cannot take {x.ndim} dimensions\nof that kind")


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (
            _raises,
            r"failed on samples of shape \(4, 6, 6\) in float64: ValueError at "
            r"test_models\.py, line \d+: cannot take 4 dimensions\. It must accept",
        ),
        (
            lambda x: x + torch.zeros(7, dtype=torch.float64),
            "in float64: RuntimeError at test_models",
        ),
        (lambda x: sys.exit(0), "in float64: SystemExit at test_models"),
        (lambda x: x.matmul(torch.zeros(6, 6)), "use the dtype and device of its inputs"),
    ],
)
def test_a_network_that_fails_is_refused_with_what_it_raised(
    forward: Callable[[Tensor], Tensor], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        check_model(classifier(Through(forward)), IMAGE, 3)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda x: (x, x), "returns a tuple"),
        (lambda x: {"logits": x}, "returns a dict"),
        (lambda x: x[:, :2], r"returns \(5, 2\).*one column per class"),
        (lambda x: torch.cat([x, x], 1), r"returns \(5, 6\)"),
    ],
)
def test_logits_that_do_not_fit_the_classes_are_refused(
    forward: Callable[[Tensor], Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        check_model(nn.Sequential(classifier(), Through(forward)), IMAGE, 3)


@pytest.mark.privacy
@pytest.mark.parametrize("shape", [(-1,), (-1, 12, 3)], ids=["1-D", "3-D"])
def test_an_output_that_is_not_a_row_a_sample_is_refused(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Flatten(), Through(lambda x: x.reshape(shape)))
    with pytest.raises(ModelError):
        check_model(model, IMAGE, 3)


@pytest.mark.parametrize(
    "middle",
    [
        (nn.GroupNorm(2, 4), nn.ReLU()),
        (nn.LayerNorm((6, 6)), nn.GELU()),
        (nn.InstanceNorm2d(4),),
        (nn.ReLU(), nn.Dropout(0.5)),
        (nn.Softmax(1), nn.Conv2d(4, 4, 3, padding=1)),
        (nn.MaxPool2d(1), nn.LocalResponseNorm(2)),
    ],
    ids=lambda middle: type(middle[0]).__name__,
)
def test_models_that_keep_samples_apart_pass(middle: tuple[nn.Module, ...]) -> None:
    check_model(classifier(*middle), IMAGE, 3)


@pytest.mark.parametrize("training", [True, False])
def test_the_check_leaves_no_trace(training: bool) -> None:
    model = classifier(nn.Dropout(0.5)).train(training)
    before: dict[str, Any] = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    check_model(model, IMAGE, 3)
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
