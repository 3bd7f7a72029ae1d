"""Fine-tuning of networks with public weights: which parameters move, and by which gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from dpmac_cli.data.registry import DATASETS
from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.models.features import LoraLinear, freeze
from dpmac_cli.models.registry import PARTS, Trained
from dpmac_cli.models.weights import adopt, published
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.run import finish, resume, train
from tests.digits_runs import after, digits_config, refused, train_digits
from tests.helpers import trained_names
from tests.tiers import rest_long

SHAPE = DATASETS["digits"].shape
#: A vision transformer as timm writes them, and a residual network with batch norms, both small.
NETWORKS = """
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, 2)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, shape, classes, width=16):
        super().__init__()
        self.patches = nn.Conv2d(shape[0], width, 4, stride=4)
        self.pos_embed = nn.Parameter(torch.randn(1, 4, width) / 10)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.norm(self.blocks(x)).mean(1))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class ResNet(nn.Module):
    def __init__(self, shape, classes, width=8):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(shape[0], width, 3, padding=1), nn.BatchNorm2d(width)
        self.layers = nn.Sequential(*(Residual(width) for _ in range(3)))
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.layers(self.bn(self.stem(x)).relu()).mean((2, 3)))
"""


#: Blocks of the ViT.
BLOCKS = 2
#: The ResNet has no linear layer besides its head. Only text encoders have a last block.
PARTS_OF = [("ViT", part) for part in PARTS if part != "last"]
PARTS_OF += [("ResNet", part) for part in PARTS if part not in ("lora", "last")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETWORKS)
    return path


def network(name: str, shape: tuple[int, ...] = SHAPE) -> Any:
    """One of the networks, with random weights and statistics."""
    known: dict[str, Any] = {}
    exec(NETWORKS, known)
    torch.manual_seed(0)
    model = known[name](shape, 10)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.weight.data, part.bias.data = torch.randn(2, part.num_features)
            part.running_mean, part.running_var = torch.rand(2, part.num_features) + 0.5
    return model


@pytest.fixture(params=rest_long(["ResNet", "ViT"]))
def pretrained(request: pytest.FixtureRequest, file: Path) -> dict[str, Any]:
    """Settings of a run from public weights of a network."""
    weights = file.with_name("weights.safetensors")
    save_file(network(request.param).state_dict(), weights)
    return {"model": f"{file}:{request.param}", "pretrained": str(weights)}


@pytest.mark.privacy
@pytest.mark.parametrize(("name", "part"), PARTS_OF)
def test_only_the_chosen_part_is_trained(name: str, part: str) -> None:
    model = network(name)
    whole = {n for n, _ in model.named_parameters()}
    freeze(model, Trained(part, rank=3), SHAPE)
    head = {"head.weight", "head.bias"} if name == "ViT" else {"fc.weight", "fc.bias"}
    found = trained_names(model)
    expected = {
        "all": whole,
        "head": head,
        "norm": head | {n for n in whole if "norm" in n or n.startswith("bn.")},
        "lora": head
        | {
            f"blocks.{i}.{layer}.{side}.weight"
            for i in range(BLOCKS)
            for layer in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
            for side in ("down", "up")
        },
    }
    assert found == expected[part]


@pytest.mark.privacy
@pytest.mark.parametrize(("name", "part"), PARTS_OF)
def test_gradients_are_those_of_vmap(name: str, part: str) -> None:
    model = network(name).double()
    freeze(model, Trained(part, rank=3), SHAPE)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.up.weight)
    x, y = torch.randn(6, *SHAPE).double(), torch.arange(6)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (sample.unsqueeze(0),))
        return cross_entropy(logits, label.unsqueeze(0))

    values = {n: p.detach() for n, p in trained.items()}
    with sdpa_kernel(SDPBackend.MATH):  # the others have no batching rule
        by_name = vmap(grad(loss), (None, 0, 0))(values, x, y)
    expected = torch.cat([by_name[n].flatten(1) for n in trained], 1)
    per_sample = PerSample(model, Structure(x[:1]))
    assert per_sample.vmapped, per_sample.notes
    flatten_parameters(per_sample.layers)
    gradients = ClippedChunkSum(per_sample).gradients(x, y, ball=True)
    for row in range(6):
        weights, out = torch.zeros(6).double(), torch.empty(expected.shape[1]).double()
        weights[row] = 1
        for layer, form in gradients:
            form.weighted_sum(weights, None, out[layer.start : layer.stop])
        assert torch.allclose(out, expected[row], atol=1e-10)


def test_an_addition_is_zero_at_first_and_can_be_merged() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(7, 5)
    layer, x = LoraLinear(plain, Trained("lora", 2, 4.0)), torch.randn(3, 7)
    assert torch.equal(layer(x), plain(x))
    nn.init.normal_(layer.up.weight)
    assert not torch.allclose(layer(x), plain(x))
    whole = nn.Sequential(layer)
    assert published(whole).keys() == {"0.weight", "0.bias"}
    merged = nn.functional.linear(x, published(whole)["0.weight"], plain.bias)
    assert torch.allclose(merged, layer(x), atol=1e-5)
    assert layer.scale == 2


@pytest.mark.privacy
@pytest.mark.parametrize("part", rest_long(["norm", "all"]))
def test_a_run_changes_the_chosen_part_and_is_scored_as_it_was(
    part: str, pretrained: dict[str, Any]
) -> None:
    finished = train_digits(**pretrained, train=part, steps=3, batch_size=32, out="run")
    before, after_it = load_file(pretrained["pretrained"]), load_file("run/model.safetensors")
    assert before.keys() == after_it.keys()  # loads into the network that it came from
    moved = {name for name in before if not torch.equal(before[name], after_it[name])}
    model = network(pretrained["model"].rpartition(":")[2])
    freeze(model, Trained(part), SHAPE)
    assert moved == trained_names(model)
    told = finished.report["model"]["public_part"]
    assert told["train"] == part
    assert told["trained_parameters"] == sum(before[name].numel() for name in moved)
    assert (PARTS[part] in told["statement"]) == (part != "all")
    loaded = load_model("run", factory=pretrained["model"]).model
    assert loaded(torch.randn(2, *SHAPE)).shape == (2, 10)


@pytest.mark.privacy
@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize("pretrained", ["ViT"], indirect=True)
def test_lora_is_published_merged_and_resumed(pretrained: dict[str, Any]) -> None:
    settings = {
        **pretrained,
        "train": "lora",
        "lora_rank": 2,
        "steps": 6,
        "batch_size": 32,
        "seed": 3,
    }
    whole = train_digits(**settings, out="whole")
    list(train(digits_config(**settings, out="cut"), after(2)))
    assert finish(list(resume("cut", {"model": pretrained["model"]}))).state == "finished"
    assert load_file("cut/model.safetensors").keys() == load_file("whole/model.safetensors").keys()
    before, after_it = load_file(pretrained["pretrained"]), load_file("whole/model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after_it[name])}
    layers = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
    linear = {f"blocks.{i}.{layer}.weight" for i in range(BLOCKS) for layer in layers}
    assert moved == linear | {"head.weight", "head.bias"}
    assert before.keys() == after_it.keys()
    part = whole.report["model"]["public_part"]
    assert (part["lora_rank"], part["lora_alpha"]) == (2, 16)
    load_model("whole", factory=pretrained["model"])


def test_lora_leaves_out_layers_that_share_their_weights() -> None:
    """The update of one, merged into its weight, would change the others, too."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.own = (nn.Linear(64, 64) for _ in range(3))
            self.second.weight = self.first.weight
            self.fc = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.second(self.first(x.flatten(1)).relu()).relu()
            out: Tensor = self.fc(self.own(hidden).relu())
            return out

    model, x = Tied(), torch.randn(3, *SHAPE)
    freeze(model, Trained("lora", 2), SHAPE)
    assert trained_names(model) == {"own.down.weight", "own.up.weight", "fc.weight", "fc.bias"}
    nn.init.normal_(model.own.get_submodule("up").get_parameter("weight"))
    loaded = Tied()
    adopt(loaded, published(model))
    assert torch.allclose(loaded(x), model(x), atol=1e-5)


@pytest.mark.long
def test_a_pickle_is_refused_with_the_line_that_converts_it(file: Path) -> None:
    path = Path("weights.pth")
    torch.save(network("ViT").state_dict(), path)
    chosen = ("--model", f"{file}:ViT", "--train", "norm", "--pretrained")
    text = refused(*chosen, str(path))
    _, line = text.split("in Python: ")
    exec(f"import torch, safetensors.torch\n{line}")
    said: dict[str, Any] = {
        "model": f"{file}:ViT",
        "pretrained": "weights.safetensors",
        "train": "norm",
    }
    train_digits(**said, seed=1, steps=1, out="run")
