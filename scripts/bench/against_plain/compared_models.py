"""Twenty models as users have them, small and with random weights, and their examples.

pd-train finds them by name: `compared_models:make` and `compared_models:examples`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipedream.capture.errors.user_code import import_torchvision

WORDS, LENGTH, CLASSES = 96, 12, 10
Examples = Sequence[Any]


@dataclass(frozen=True)
class Compared:
    """`make()` is the model; `examples(count)` its data, as a user's dataset gives them; `loss` as
    a run config names it. `shard`: parameters that the devices of a mesh divide among them.
    `batched`: whether an example's loss depends on the others of its minibatch.
    """

    make: Callable[[], nn.Module]
    examples: Callable[[int], Examples]
    loss: str
    shard: Mapping[str, str] = field(default_factory=dict)
    batched: bool = False


def make(name: str) -> nn.Module:
    return MODELS[name].make()


def examples(name: str, count: int) -> tuple[Examples, None]:
    return MODELS[name].examples(count), None


def next_words(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def library(name: str) -> Any:
    """Imported when a model of it is made."""
    import_torchvision()  # where torch is a build without its operators, others fail to import it
    return importlib.import_module(name)


def _transformers(kind: str, head: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make_one() -> nn.Module:
        hf = library("transformers")
        hf.logging.set_verbosity_error()
        config = getattr(hf, f"{kind}Config")(**sizes)
        model: nn.Module = getattr(hf, f"{kind}{head}")(config)
        return model

    return make_one


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _words(count: int, length: int = LENGTH) -> Tensor:
    """Without 0 and 1, which are for padding and the beginning."""
    return torch.randint(2, WORDS, (count, length), generator=_generator())


def sentences(count: int) -> Examples:
    """Some labels are left out, more in some sentences than in others."""
    words = _words(count)
    kept = torch.arange(LENGTH) < torch.arange(count)[:, None] % 5 + LENGTH - 4
    labels = torch.where(kept, words, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(words, labels, strict=True)]


def padded(count: int) -> Examples:
    """With a mask of the words that are there."""
    made = []
    for number, example in enumerate(sentences(count)):
        there = torch.arange(LENGTH) < LENGTH - number % 5
        labels = torch.where(there, example["labels"], -100)
        made.append({"input_ids": example["input_ids"], "attention_mask": there.long()})
        made[-1]["labels"] = labels
    return made


def translations(count: int) -> Examples:
    words = _words(count, 2 * LENGTH)
    return [{"input_ids": x[:LENGTH], "labels": x[LENGTH + 3 :]} for x in words]


def sounds(count: int) -> Examples:
    heard = torch.randn(count, 8, 32, generator=_generator())
    return [
        {"input_features": x, "labels": y} for x, y in zip(heard, _words(count, 6), strict=True)
    ]


def labelled_images(count: int) -> Examples:
    return [{"pixel_values": x, "labels": y} for x, y in images(32)(count)]


def images(side: int) -> Callable[[int], Examples]:
    def make_images(count: int) -> Examples:
        draw = _generator()
        pixels = torch.randn(count, 3, side, side, generator=draw)
        classes = torch.randint(0, CLASSES, (count,), generator=draw)
        return list(zip(pixels, classes, strict=True))

    return make_images


def segmented(count: int) -> Examples:
    """A class for each pixel."""
    return [(x, x.mean(0).gt(0).long()) for x, _ in images(32)(count)]


def texts(count: int) -> Examples:
    return [(x[:-1], x[1:]) for x in _words(count, LENGTH + 1)]


def lines(count: int) -> Examples:
    """Short ones, for models that take them word by word."""
    return [(x[:-1], x[1:]) for x in _words(count, 6)]


class Recurrent(nn.Module):
    """A language model of two layers of nn.GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 24)
        self.layers = nn.GRU(24, 24, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layers(self.words(x))
        return self.head(self.norm(states))


class StepByStep(nn.Module):
    """Another, of cells that a loop of its own steps: nn.LSTM has no bfloat16 on many CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 24)
        self.first, self.second = nn.LSTMCell(24, 24), nn.LSTMCell(24, 24)
        self.head = nn.Linear(24, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x)
        first = second = (words.new_zeros(len(x), 24), words.new_zeros(len(x), 24))
        states = []
        for place in range(x.shape[1]):
            first = self.first(words[:, place], first)
            second = self.second(first[0], second)
            states.append(second[0])
        return self.head(torch.stack(states, 1))


class Stock(nn.Module):
    """torch's own TransformerEncoder, which sees the words before each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Parameter(torch.zeros(LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))
        self.head = nn.Linear(32, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask.to(self.places.dtype)
        return self.head(self.layers(self.words(x) + self.places, mask=mask, is_causal=True))


def _twice(before: int, after: int) -> nn.Sequential:
    layers = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two levels down and up again, with links across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_twice(3, 8), _twice(8, 16)])
        self.middle = _twice(16, 32)
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)]
        )
        self.up = nn.ModuleList([_twice(32, 16), _twice(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for level in self.down:
            x = level(x)
            across.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, level in zip(self.grow, self.up, strict=True):
            x = level(torch.cat((across.pop(), grow(x)), 1))
        return self.head(x)


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
_HEADS = {"num_attention_heads": 4}
_BERT = {**_SIZE, **_HEADS, **_NO_DROPOUT}
_DECODER = {**_SIZE, **_HEADS, "num_key_value_heads": 2, "vocab_size": WORDS, "use_cache": False}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
_TWO_SIDED = {
    **_TOKENS,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    "vocab_size": WORDS,
    "d_model": 32,
    "dropout": 0.0,
    "use_cache": False,
}
_PICTURES = {"image_size": 32, "num_labels": CLASSES, **_BERT}


_GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 16,
    "vocab_size": WORDS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
}
_T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
    "use_cache": False,
}
_BART = {**_TWO_SIDED, "max_position_embeddings": 32, "forced_eos_token_id": None}
_WHISPER = {
    **_TWO_SIDED,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "begin_suppress_tokens": None,
}
_SWIN = {
    "image_size": 32,
    "window_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "drop_path_rate": 0.0,
    "num_labels": CLASSES,
    **_NO_DROPOUT,
}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 4}


def _resnet() -> nn.Module:
    resnet = library("timm.models.resnet")
    sizes = {"channels": (8, 12, 16, 24), "stem_width": 8, "num_classes": CLASSES}
    model: nn.Module = resnet.ResNet(resnet.BasicBlock, (1, 1, 1, 1), **sizes)
    return model


def _regnet() -> nn.Module:
    regnet = library("torchvision.models.regnet")
    sizes = {"depth": 4, "w_0": 8, "w_a": 8.0, "w_m": 2.0, "group_width": 8, "se_ratio": 0.25}
    blocks = regnet.BlockParams.from_init_params(**sizes)
    model: nn.Module = regnet.RegNet(blocks, num_classes=CLASSES, stem_width=8)
    return model


def _densenet() -> nn.Module:
    models = library("torchvision.models")
    model: nn.Module = models.DenseNet(8, (2, 2, 2), 16, num_classes=CLASSES)
    return model


def _mixer() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "num_blocks": 3, "embed_dim": 32}
    mixer = library("timm.models.mlp_mixer")
    model: nn.Module = mixer.MlpMixer(num_classes=CLASSES, **sizes)
    return model


_UP = {"*up_proj.weight": "S(0)", "*gate_proj.weight": "S(0)"}
_DENSE = {"*intermediate.dense.weight": "S(0)"}
_QUERIES = {f"*{name}_proj.weight": "S(0)" for name in "qkv"}
_NEXT_WORDS = "compared_models:next_words"
_FC1 = {"*fc1.weight": "S(0)"}


def _causal(kind: str, **more: Any) -> Callable[[], nn.Module]:
    return _transformers(kind, "ForCausalLM", **_DECODER, **more)


def _two_sided(kind: str, sizes: Mapping[str, Any]) -> Callable[[], nn.Module]:
    return _transformers(kind, "ForConditionalGeneration", **sizes)


def _of_images(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    return _transformers(kind, "ForImageClassification", **sizes)


MODELS: Mapping[str, Compared] = {
    "gpt2": Compared(
        _transformers("GPT2", "LMHeadModel", **_GPT2), padded, "output", {"*c_fc.weight": "S(1)"}
    ),
    "llama": Compared(_causal("Llama"), padded, "output", _UP),
    "gemma2": Compared(_causal("Gemma2", head_dim=8, sliding_window=4), sentences, "output", _UP),
    "qwen3": Compared(_causal("Qwen3", head_dim=8), sentences, "output", _UP),
    "mistral": Compared(_causal("Mistral", sliding_window=4), sentences, "output", _UP),
    "mixtral": Compared(_causal("Mixtral", **_MIXTRAL), sentences, "output", _QUERIES),
    "t5": Compared(_two_sided("T5", _T5), translations, "output", {"*wi.weight": "S(0)"}),
    "bart": Compared(_two_sided("Bart", _BART), translations, "output", _FC1),
    "whisper": Compared(_two_sided("Whisper", _WHISPER), sounds, "output", _FC1),
    "bert": Compared(
        _transformers("Bert", "ForMaskedLM", **_BERT, vocab_size=WORDS), padded, "output", _DENSE
    ),
    "vit": Compared(
        _of_images("ViT", **_PICTURES, patch_size=8), labelled_images, "output", _DENSE
    ),
    "swin": Compared(_of_images("Swin", **_SWIN), labelled_images, "output", _DENSE),
    "mixer": Compared(_mixer, images(32), "cross_entropy", {"*mlp_channels.fc1.weight": "S(0)"}),
    "resnet": Compared(_resnet, images(64), "cross_entropy", {"*conv1.weight": "S(0)"}, True),
    "regnet": Compared(_regnet, images(64), "cross_entropy", {"stem.0.weight": "S(0)"}, True),
    "densenet": Compared(_densenet, images(64), "cross_entropy", {"*conv1.weight": "S(0)"}, True),
    "unet": Compared(UNet, segmented, "cross_entropy", {"middle.0.weight": "S(0)"}, True),
    "gru": Compared(Recurrent, lines, _NEXT_WORDS, {"head.weight": "S(0)"}),
    "lstm": Compared(StepByStep, lines, _NEXT_WORDS, {"head.weight": "S(0)"}),
    "encoder": Compared(Stock, texts, _NEXT_WORDS, {"*linear1.weight": "S(0)"}),
}
