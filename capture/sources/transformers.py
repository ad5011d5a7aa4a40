"""`transformers:NAME`: an architecture of transformers with random weights, and its inputs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipedream.capture.errors.user_code import accepts, blaming, close_matches, import_torchvision
from pipedream.capture.sources.minibatch import examples
from pipedream.graph.errors import UserError

_LONGEST = 128

# The heads that models are usually trained with; the first that supports the type is used. BERT
# also has a causal head, so masked comes before causal.
_ENCODER_DECODER_HEADS = (
    ("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("SpeechSeq2Seq", "SPEECH_SEQ_2_SEQ"),
)
_HEADS = (
    ("MaskedLM", "MASKED_LM"),
    ("CausalLM", "CAUSAL_LM"),
    ("ImageClassification", "IMAGE_CLASSIFICATION"),
)


def load_transformers(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Creates the architecture `name` (`gpt2`, `bert`, `llama`, ...), configured by `args`.

    Downloads nothing. The model returns logits and no cache. Raises UserError.
    """
    source = f"transformers:{name}"
    config = make_config(name, source, args)
    auto = importlib.import_module("transformers.models.auto")
    head = _head(name, config, auto)
    with blaming(source):
        model = getattr(auto, head).from_config(config)
    assert isinstance(model, nn.Module)
    return model


def take_labels(model: nn.Module, source: str) -> nn.Module:
    """Makes the model take `labels`, for its own loss, as last input, or raises UserError."""
    kind = type(model)
    if not accepts(kind.forward, "labels"):
        raise UserError(f"loss output: {source} takes no labels: name a loss of its logits")

    def forward(self: nn.Module, *inputs: Tensor) -> Any:
        return kind.forward(self, *inputs[:-1], labels=inputs[-1])

    # A class of its own and no module around it: parameters keep their names.
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def transformers_inputs(
    model: nn.Module, source: str, batch_size: int, inputs: tuple[str, ...]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Example arguments for the model: token ids [batch_size, T], or images.

    T is 128, or the number of positions of the model if that is less. `inputs` (see `--input`)
    override the defaults. The second input of an encoder-decoder is the decoder's token ids. Raises
    UserError.
    """
    config: Any = model.config
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or 2
    both = getattr(config, "is_encoder_decoder", False)
    if not inputs:
        inputs = (_shape(model, config, source),)
    if both and len(inputs) == 1:
        inputs = (*inputs, _tokens(config))
    tensors = examples(inputs, batch_size, vocabulary)
    if not both:
        return tensors, {}
    return (tensors[0], *tensors[2:]), {"decoder_input_ids": tensors[1]}


def _shape(model: nn.Module, config: Any, source: str) -> str:
    takes = getattr(model, "main_input_name", "input_ids")
    if takes == "input_ids":
        return _tokens(config)
    if takes == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        return f"{getattr(config, 'num_channels', 3)}x{height}x{width}"
    raise UserError(f"{source} takes {takes}: give their shape, such as --input 80x3000")


def _tokens(config: Any) -> str:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return f"{min(_LONGEST, positions or _LONGEST)}:int64"


def _import() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UserError("transformers is not installed: pip install 'pipedream[models]'")
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()  # transformers imports it too, and fails if it is broken
    # It warns of special token ids outside a small vocabulary, which are not used here.
    importlib.import_module("transformers.utils.logging").set_verbosity_error()


def make_config(name: str, source: str, args: Mapping[str, Any]) -> Any:
    """Returns the configuration of the architecture `name`, changed by `args`. Raises UserError."""
    _import()
    auto = importlib.import_module("transformers.models.auto")
    known = importlib.import_module("transformers.models.auto.configuration_auto")
    if name not in known.CONFIG_MAPPING_NAMES:
        family = _architecture_of(name)
        if family is not None:
            raise UserError(
                f"{source}: {name} is a class of the architecture {family}: write {family}"
            )
        raise UserError(
            f"{source}: transformers has no architecture of this name (models of the hub are not "
            f"downloaded){close_matches(name, known.CONFIG_MAPPING_NAMES)}"
        )
    plain = auto.AutoConfig.for_model(name)
    for key in args:  # transformers would ignore an unknown name silently
        if not hasattr(plain, key):
            raise UserError(
                f"{source}: its configuration has no {key!r}{close_matches(key, plain.to_dict())}"
            )
    with blaming(source):
        config = auto.AutoConfig.for_model(name, **args)
    config.architectures = config.architectures or []  # it takes the first of several heads
    _forget(config)
    return config


def without_cache(model: nn.Module) -> None:
    """Has models of transformers, this one and those inside it, return no cache of keys and values,
    which training does not need and capturing refuses.
    """
    for module in model.modules():
        if any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__):
            _forget(getattr(module, "config", None))


def _forget(config: Any) -> None:
    text: Any = getattr(config, "get_text_config", lambda: None)()
    for part in (config, text):
        if hasattr(part, "use_cache"):
            part.use_cache = False


def _architecture_of(name: str) -> str | None:
    """The architecture that has a class of this name."""
    mappings = vars(importlib.import_module("transformers.models.auto.modeling_auto"))
    known = [
        str(architecture)
        for variable, mapping in mappings.items()
        if variable.endswith("_MAPPING_NAMES") and isinstance(mapping, Mapping)
        for architecture, classes in mapping.items()
        if name == classes or (isinstance(classes, (tuple, list)) and name in classes)
    ]
    same = (each for each in known if name.lower().startswith(each.replace("_", "")))
    return next(same, known[0] if known else None)


def _head(name: str, config: Any, auto: Any) -> str:
    """The Auto class that creates this type of model."""
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    both = getattr(config, "is_encoder_decoder", False)
    for head, mapping in _ENCODER_DECODER_HEADS if both else _HEADS:
        if name in getattr(mappings, f"MODEL_FOR_{mapping}_MAPPING_NAMES"):
            return f"AutoModelFor{head}"
    return "AutoModel"
