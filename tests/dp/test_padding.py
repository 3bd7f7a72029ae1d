"""The row of an embedding that ``padding_idx`` names is no coordinate of the mechanism."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as looked_up

from dpmac_cli import Poisson, PrivateStep, clipped_grad, make_private, resume
from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.clipping.layers import blocks, skipped_by
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.losses import plain, returned
from dpmac_cli.dp.mechanism import GaussianMechanism, ball, ellipsoid
from dpmac_cli.errors import ModelError
from dpmac_cli.models.trial_samples import Objective
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.randomness.noise import Noise, SeededNormals
from dpmac_cli.release.train import train_plan
from dpmac_cli.runs import checkpoint
from dpmac_cli.runs.session import Started
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.distributed import Ranks
from tests.digits_runs import after, digits_config, weights
from tests.helpers import Batches, a_key, make_trainer, planned, walk
from tests.test_ranks import together
from tests.tiers import rest_long

WORDS, SIZE, CLASSES = 7, 3, 4


def tokens(x: Tensor, words: int = WORDS) -> Tensor:
    """The records of the tiny task as tokens, among them every word; (samples, 9)."""
    return ((x.flatten(1) + 2) * 16).long() % words


class Reading(nn.Module):
    """Embeds tokens, and classifies the mean of their vectors."""

    def __init__(self, *embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(embeddings)
        self.head = nn.Linear(SIZE, CLASSES)

    def vectors(self, words: Tensor) -> Tensor:
        found: Tensor = sum((part(words) for part in self.embeddings), torch.zeros(()))
        return found

    def forward(self, x: Tensor) -> Tensor:
        found = self.vectors(tokens(x))
        out: Tensor = self.head(found.mean(1) if found.ndim == 3 else found)
        return out


class Rowless(nn.Module):
    """An embedding whose padding is a constant, so that only the other rows are parameters."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        row = embedding.padding_idx or 0
        weight = embedding.weight.detach().clone()
        self.row = row
        self.padding = nn.Buffer(weight[row : row + 1])
        self.table = nn.Parameter(torch.cat([weight[:row], weight[row + 1 :]]))

    def forward(self, words: Tensor) -> Tensor:
        table = torch.cat([self.table[: self.row], self.padding, self.table[self.row :]])
        return looked_up(words, table)


def embedding(row: int | None, kind: type[Any] = nn.Embedding, **more: Any) -> Any:
    """An embedding with a padding that is not 0, which a step could change."""
    torch.manual_seed(3)
    made = kind(WORDS, SIZE, padding_idx=row, **more).double()
    nn.init.normal_(made.weight)
    return made


def reading(*rows: int | None, kind: type[Any] = nn.Embedding) -> Reading:
    torch.manual_seed(4)
    return Reading(*(embedding(row, kind) for row in rows)).double()


class Prepared(Noise):
    """Noise that hands out the numbers of a step in order, in whatever blocks."""

    def __init__(self) -> None:
        super().__init__(a_key(0))

    def at(self, step: int) -> SeededNormals:
        normals, begin = super().at(step), 0
        z = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(step))

        def standard_normal(like: Tensor) -> Tensor:
            nonlocal begin
            begin += len(like)
            return z[begin - len(like) : begin].to(like.dtype)

        normals.standard_normal = standard_normal  # type: ignore[method-assign]
        return normals


#: Steps with decay of the weights and an average.
DECAYING = planned(weight_decay=0.1, ema=0.9, physical_batch=7)


def trainer_of(name: str, model: nn.Module, **more: Any) -> Trainer:
    given: dict[str, Any] = {"plan": DECAYING, "noise": Prepared(), **more}
    batches = Batches(range(0, 20), range(15, 40), [], range(5, 15))
    return make_trainer(name, model=model, sampler=batches, **given)


@pytest.mark.promise("mean")
@pytest.mark.parametrize(
    ("name", "rows"),
    rest_long(
        [(name, rows) for rows in ((0,), (2,), (WORDS - 1,), (2, 0)) for name in OPTIMIZERS],
        short=len(OPTIMIZERS),
    ),
)
def test_other_rows_are_trained_as_if_the_padding_did_not_exist(
    name: str, rows: tuple[int, ...]
) -> None:
    model = reading(*rows)
    oracle = Reading(*map(Rowless, model.embeddings)).double()  # type: ignore[arg-type]
    oracle.head.load_state_dict(model.head.state_dict())
    before = [part.get_parameter("weight").detach().clone() for part in model.embeddings]
    ours, theirs = trainer_of(name, model), trainer_of(name, oracle)
    trained = ours.sums.trained_mask
    assert ours.sums.size == theirs.sums.size == theirs.sums.theta.numel()
    for _ in range(8):
        ours.step()
        theirs.step()
        for key, tensor in ours.state.tensors().items():
            expected = theirs.state.tensors()[key]
            found = tensor[trained] if tensor.shape == trained.shape else tensor
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)
    for row, part, was in zip(rows, model.embeddings, before, strict=True):
        assert part.get_parameter("weight")[row].equal(was[row])
    average = ours.state.average
    assert average is not None
    assert average[~trained].equal(ours.state.theta[~trained])


# The declaration decides, and who else reads the weight.


class Net(nn.Module):
    """A function of its modules as a network: of ``part``, an embedding, and of tokens."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], part: nn.Module, **more: Any):
        super().__init__()
        self.function, self.part, self.head = function, part, nn.Linear(SIZE, 2)
        for name, module in more.items():
            self.add_module(name, module)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.function(self, words).tanh())
        return out


class Scaled(nn.Embedding):
    """An embedding with a forward of its own."""

    def forward(self, words: Tensor) -> Tensor:
        return 2 * super().forward(words)


def mean(net: Any, words: Tensor) -> Tensor:
    found: Tensor = net.part(words).mean(1)
    return found


def by_length(net: Any, words: Tensor) -> Tensor:
    """Something that only a loop can run."""
    return mean(net, words) if int(words.sum()) >= 0 else words


def sharing(row: int | None, kind: type[Any] = nn.Embedding) -> Callable[[], nn.Module]:
    """A network of two embeddings with one weight, the first of which has 1 as padding."""

    def make() -> nn.Module:
        first, second = embedding(1), embedding(row, kind)
        second.weight = first.weight
        return Net(lambda net, x: mean(net, x) + net.second(x).sum(-2), first, second=second)

    return make


def tied() -> nn.Module:
    net = Net(mean, embedding(1))
    net.head = nn.Linear(SIZE, WORDS, bias=False)
    net.head.weight = net.part.weight  # type: ignore[assignment]
    return net


#: Networks, and the row that is not trained.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "an embedding": (lambda: Net(mean, embedding(1)), 1),
    "none": (lambda: Net(mean, embedding(None)), None),
    "counted from the end": (lambda: Net(mean, embedding(-1)), WORDS - 1),
    "sparse": (lambda: Net(mean, embedding(1, sparse=True)), 1),
    "a bag": (lambda: Net(lambda net, x: net.part(x), embedding(1, nn.EmbeddingBag)), 1),
    "a forward of its own": (lambda: Net(mean, embedding(1, Scaled)), 1),
    "in a loop": (lambda: Net(by_length, embedding(1)), 1),
    "facts of the weight": (
        lambda: Net(lambda net, x: mean(net, x).to(net.part.weight.dtype), embedding(1)),
        1,
    ),
    "the weight without gradients": (
        lambda: Net(lambda net, x: mean(net, x) + net.part.weight.detach().sum(0), embedding(1)),
        1,
    ),
    "shared, of the same padding": (sharing(1), 1),
    "shared with a bag": (sharing(1, nn.EmbeddingBag), 1),
    "shared, without padding": (sharing(None), None),
    "shared, of another padding": (sharing(2), None),
    "a tied head": (tied, None),
    "the weight itself": (
        lambda: Net(lambda net, x: mean(net, x) + net.part.weight[:1].cos(), embedding(1)),
        None,
    ),
    "the weight itself, in a loop": (
        lambda: Net(lambda net, x: by_length(net, x) + net.part.weight[1], embedding(1)),
        None,
    ),
    "the weight by a function": (
        lambda: Net(
            lambda net, x: mean(net, x) * looked_up(x[:, 0], net.part.weight),
            embedding(1),
        ),
        None,
    ),
    "a function with the same padding": (
        lambda: Net(
            lambda net, x: mean(net, x) * looked_up(x[:, 0], net.part.weight, 1),
            embedding(1),
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_row_is_trained_where_something_else_reads_the_weight(name: str) -> None:
    make, row = NETWORKS[name]
    words = Structure(torch.zeros(1, 4, dtype=torch.long))
    found = PerSample(make(), words)
    assert "loop" not in name or not found.vmapped
    [layer] = [layer for layer in found.layers if layer.name.startswith("part")]
    whole = WORDS * SIZE
    if row is None:
        assert (layer.size, skipped_by(found.layers)) == (whole, [])
    else:
        at = layer.start + SIZE * row
        assert (layer.size, skipped_by(found.layers)) == (whole - SIZE, [slice(at, at + SIZE)])


def test_a_loss_that_reads_the_weight_trains_the_row() -> None:
    def loss(network: Any, words: Tensor) -> Tensor:
        losses: Tensor = network(words).sum(1) + network.part.weight.square().sum()
        return losses

    net = Objective(Net(mean, embedding(1)), loss)
    found = PerSample(net, Structure(torch.zeros(1, 4, dtype=torch.long)), loss=returned)
    assert skipped_by(found.layers) == []


def test_a_sequence_of_known_layers_has_its_row_untrained() -> None:
    net = nn.Sequential(embedding(1), nn.Flatten(), nn.Linear(4 * SIZE, 2).double())
    words = Structure(torch.zeros(1, 4, dtype=torch.long))
    found = PerSample(net, words, loss=plain, rowwise=True)
    assert found._chain is not None
    assert skipped_by(found.layers) == [slice(SIZE, 2 * SIZE)]


def test_a_sequence_of_known_layers_has_a_tied_head() -> None:
    net = nn.Sequential(embedding(1), nn.Flatten(), nn.Linear(SIZE, WORDS, bias=False).double())
    net[2].weight = net[0].weight
    words = Structure(torch.zeros(1, 1, dtype=torch.long))
    found = PerSample(net, words, loss=plain, rowwise=True)
    assert found._chain is not None
    assert skipped_by(found.layers) == []


@pytest.mark.parametrize("known", [False, True])
def test_a_network_of_padding_alone_is_refused(known: bool) -> None:
    only = nn.Embedding(1, SIZE, padding_idx=0)
    net = nn.Sequential(only) if known else Net(lambda net, x: net.part(0 * x).sum(1), only)
    words = Structure(torch.zeros(1, 4, dtype=torch.long))
    if not known:
        net.get_submodule("head").requires_grad_(False)
    with pytest.raises(ModelError, match="nothing would be trained"):
        PerSample(net, words, rowwise=known)


def test_blocks_have_every_coordinate_that_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmac_cli.dp.clipping.layers.BLOCK", 10)
    for skipped in ([], [slice(0, 3)], [slice(4, 9), slice(9, 12)], [slice(40, 47)]):
        for device in ("cpu", "meta"):
            found = blocks(47, torch.device(device), skipped)
            covered = [at for part in found for at in range(47)[part]]
            gone = {at for gap in skipped for at in range(47)[gap]}
            assert covered == [at for at in range(47) if at not in gone]
            assert all(part.start < part.stop for part in found)


# A record moves the sum by at most C, on the coordinates that exist.


def at_will(net: Any, words: Tensor) -> Tensor:
    """Reads the padding where a record has the last word, which made-up ones never have."""
    found = mean(net, words)
    return found + net.part.weight[1] if bool((words == WORDS - 1).any()) else found


def bag(net: Any, words: Tensor) -> Tensor:
    found: Tensor = net.part(words)
    return found


#: Networks with 1 as padding.
PADDED: dict[str, Callable[[], nn.Module]] = {
    "an embedding": lambda: Net(mean, embedding(1)).double(),
    "a bag": lambda: Net(bag, embedding(1, nn.EmbeddingBag)).double(),
    "read at will": lambda: Net(at_will, embedding(1)).double(),
}


def sum_of_outputs(network: Any, words: Tensor) -> Tensor:
    found: Tensor = 9 * network(words).sum(1)
    return found


def records(count: int = 12) -> Tensor:
    return torch.randint(0, WORDS, (count, 5), generator=torch.Generator().manual_seed(2))


@pytest.mark.promise("one")
@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
@pytest.mark.parametrize("name", PADDED)
def test_a_record_moves_the_sum_by_at_most_the_region(name: str, kind: str) -> None:
    """Also where its gradient, or the centre, is not 0 at the padding."""
    clipped = clipped_grad(PADDED[name](), sum_of_outputs, ball(1.0), batch_size=12)
    words = records()
    clipped.prepare(words[:1])
    size, gap = len(clipped.theta), slice(SIZE, 2 * SIZE)
    assert (clipped.trained == 0).nonzero().flatten().tolist() == list(range(size)[gap])
    m, b = torch.full((size,), 0.1).double(), torch.full((size,), 0.5).double()
    if kind == "ellipsoid":
        clipped.region = ellipsoid(m, b)
    else:
        m, b = torch.zeros(()), torch.ones(())
    whole, lengths = clipped(words), []
    assert not whole[gap].any()
    for row in range(len(words)):
        rest = clipped(torch.cat([words[:row], words[row + 1 :]]))
        assert not rest[gap].any()
        lengths.append(float(((whole - rest) / b).norm()))
    limit = clip_limit(clipped.prepare(words[:1]).clipped_sum._capacity)
    # The clipped ones have the length of the others' clipped ones: nothing else is in their norm.
    torch.testing.assert_close(max(lengths), limit, rtol=1e-6, atol=0)
    assert sum(length > 0.999 for length in lengths) > len(words) // 2


def test_an_update_of_the_padding_is_noticed() -> None:
    clipped = clipped_grad(PADDED["an embedding"](), sum_of_outputs, ball(1.0), batch_size=12)
    total, mechanism = clipped(records()), GaussianMechanism(1.0, 12)
    private = mechanism.release(total, clipped.region, Noise(a_key(1)).at(1))
    before = clipped.theta.clone()
    clipped.theta.sub_(private.value * clipped.trained)
    gap = slice(SIZE, 2 * SIZE)
    assert clipped.theta[gap].equal(before[gap])
    assert not clipped.theta.eq(before)[clipped.trained > 0].any()
    clipped(records())
    clipped.theta.sub_(private.value)
    with pytest.raises(ModelError, match=r"part\.weight that padding_idx names was changed"):
        clipped(records())


# At every door.


MIXED = PADDED["an embedding"]
PAIRED: dict[str, Any] = {"sigma": 6, "steps": 6, "weight_decay": 0.5}


class Texts(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        return records(60)[index]


def started(**more: Any) -> PrivateStep:
    sampling = Poisson(n=60, batch_size=12)
    return PrivateStep(MIXED(), sum_of_outputs, sampling=sampling, **{**PAIRED, **more})


def table(network: nn.Module) -> Tensor:
    return network.get_parameter("part.weight").detach().clone()


@pytest.mark.promise("mean")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_program_never_changes_the_padding(optimizer: str) -> None:
    step = started(optimizer=optimizer, secure=optimizer == "dp-macadam")
    before = table(step.model)
    state: dict[str, Any] = {}
    for batch in step.loader(Texts()):
        if step(batch) == 3:
            state = copy.deepcopy(step.state_dict())
    again = started(optimizer=optimizer)
    again.load_state_dict(state, taken=3)
    for batch in again.loader(Texts()):
        again(batch)
    for trained in (step, again):
        changed = trained.model.get_parameter("part.weight") != before
        assert changed.all(1).tolist() == [row != 1 for row in range(WORDS)]
        assert not changed[1].any()
        size = sum(p.numel() for p in trained.model.parameters())
        assert f"{size - SIZE} parameters are trained" in repr(trained)


@pytest.mark.promise("noise")
def test_the_padding_of_a_tied_head_has_noise_as_every_row() -> None:
    step = PrivateStep(
        tied().double(), sum_of_outputs, sampling=Poisson(n=60, batch_size=12), **PAIRED
    )
    before = table(step.model)
    for batch in step.loader(Texts()):
        step(batch)
    assert bool((step.model.get_parameter("part.weight") != before).all())


#: A network of digits whose pixels are words, the darkest of which is padding.
PIXELS = """
import torch
from torch import nn

class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(17, 4, padding_idx=0)
        self.head = nn.Linear(64 * 4, 10)

    def forward(self, x):
        words = (x.flatten(1) * 8 + 8).round().long().clamp(0, 16)
        return self.head(self.words(words).flatten(1))

def make(shape, classes):
    torch.manual_seed(0)
    net = Pixels()
    with torch.no_grad():
        net.words.weight[0] = 0.25
    return net
"""


@pytest.fixture
def pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The factory of a network, as it is typed."""
    monkeypatch.chdir(tmp_path)
    Path("net_padded.py").write_text(PIXELS)
    yield "net_padded.py:make"
    for name in [name for name in sys.modules if name.startswith(("dpmac_model_", "net_padded"))]:
        del sys.modules[name]


def is_kept(folder: str) -> bool:
    """Whether a published network has its padding, and other rows than at the start."""
    words = weights(Path(folder))["words.weight"]
    return bool((words[0] == 0.25).all()) and not (words[1:] == 0.25).any()


@pytest.mark.promise("mean")
def test_a_run_never_changes_the_padding(pixels: str) -> None:
    """Also after it is resumed, with an average and decay of the weights."""
    named: dict[str, Any] = {"model": pixels, "out": "run", "weight_decay": 0.5, "ema": 0.5}
    plan = digits_config(steps=6, physical_batch=20, **named)
    begun, *_ = train_plan(plan, after(3))
    whole = 17 * 4 + (64 * 4 + 1) * 10
    assert isinstance(begun, Started)
    assert begun.parameters == (whole - 4, whole)
    tensors = checkpoint.read(Path("run")).tensors
    assert bool((tensors["theta"][:4] == 0.25).all())
    assert not any(bool(tensors[name][:4].any()) for name in ("m", "v", "centre", "inverse", "s"))
    resume(Path("run"), {"model": pixels})
    assert is_kept("run")


def test_a_network_of_a_program_keeps_its_padding(pixels: str) -> None:
    del pixels
    namespace: dict[str, Any] = {}
    exec(PIXELS, namespace)
    settings: dict[str, Any] = {"sigma": 6, "steps": 3, "batch_size": 128}
    private = make_private(namespace["make"]((), 10), "digits", device="cpu", **settings)
    list(private)
    assert bool((private.model.get_parameter("words.weight")[0] == 0.25).all())
    private.publish(Path("out"))
    assert is_kept("out")


@pytest.mark.promise("ranks")
def test_no_rank_changes_the_padding() -> None:
    def work(ranks: Ranks) -> Tensor:
        sampler = Batches([0, 3, 7, 9], [], [5], list(range(23)))
        trainer = make_trainer("dp-macadam", model=reading(2), sampler=sampler, ranks=ranks)
        return walk(trainer, 4).clone()

    first, second = together(2, work)
    assert first.equal(second)
    before = reading(2).state_dict()["embeddings.0.weight"]
    for row in range(WORDS):
        same = first[:, row * SIZE : (row + 1) * SIZE].eq(before[row])
        assert bool(same.all() if row == 2 else not same.any())
