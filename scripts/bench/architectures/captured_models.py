"""Which models can be captured, and do they then compute what the plain model computes?

`python scripts/bench/architectures/captured_models.py` tries each in a process of its own, with a
time limit, and writes docs/reference/coverage.md; `... captured_models.py NAME ...` tries those and
prints. A model counts as captured where the outputs, the gradients of all parameters and the
buffers after one training pass, run node by node as pieces of their own, are those of the plain
model.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedream.capture.captured import Captured, flatten_inputs
from pipedream.capture.errors.user_code import import_torchvision
from pipedream.capture.export import capture
from pipedream.capture.segment import segment
from pipedream.capture.sources.load import load
from pipedream.graph.errors import UserError

TABLE = Path(__file__).parents[3] / "docs" / "reference" / "coverage.md"
BATCH = 2
LIMIT = 90.0  # seconds for one model
CLOSE = 1e-5  # of the largest value of each tensor


@dataclass(frozen=True)
class Case:
    """`noted` are those arguments without which it is not captured."""

    source: str
    args: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    noted: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        told = ", ".join(f"{key}={value}" for key, value in self.noted.items())
        return f"{self.source} ({told})" if told else self.source


@dataclass(frozen=True)
class Result:
    nodes: int = 0
    seconds: float = 0.0
    reason: str = ""


def images(library: str, side: int, names: str, **args: Any) -> list[Case]:
    return [Case(f"{library}:{name}", args, (f"3x{side}x{side}",)) for name in names.split()]


def clips(names: str, shape: str) -> list[Case]:
    return [Case(f"torchvision:{name}", {}, (shape,)) for name in names.split()]


TORCHVISION = [
    *images(
        "torchvision",
        64,
        "alexnet vgg11 vgg16_bn resnet18 resnet34 resnet50 resnet101 "
        "resnet152 resnext50_32x4d resnext101_32x8d wide_resnet50_2 densenet121 densenet169 "
        "squeezenet1_0 squeezenet1_1 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large "
        "mnasnet0_5 mnasnet1_0 shufflenet_v2_x0_5 shufflenet_v2_x1_0 efficientnet_b0 "
        "efficientnet_b4 efficientnet_v2_s regnet_x_400mf regnet_y_400mf regnet_y_8gf googlenet "
        "convnext_tiny convnext_base swin_t swin_v2_t",
    ),
    *images("torchvision", 299, "inception_v3", init_weights=False),
    *images("torchvision", 64, "vit_b_16 vit_b_32", image_size=64),
    *images("torchvision", 224, "maxvit_t"),
    *images(
        "torchvision",
        64,
        "fcn_resnet50 fcn_resnet101 deeplabv3_resnet50 deeplabv3_mobilenet_v3_large "
        "lraspp_mobilenet_v3_large",
    ),
    *clips("r3d_18 mc3_18 r2plus1d_18", "3x8x56x56"),
    *clips("swin3d_t", "3x8x64x64"),
    *clips("s3d mvit_v1_b", "3x16x224x224"),
    *images("torchvision", 64, "fasterrcnn_resnet50_fpn ssd300_vgg16"),
]

TIMM = [
    *images(
        "timm",
        64,
        "resnet18 resnet50d seresnet50 resnest26d convnext_atto convnextv2_atto efficientnet_lite0 "
        "mobilenetv3_small_100 mobilenetv4_conv_small regnetz_b16 res2net50_26w_4s cspresnet50 "
        "dla34 hrnet_w18_small ghostnet_100 repvgg_a0 tf_efficientnet_b0 nfnet_f0 mixnet_s dpn68 "
        "vovnet39a fasternet_t0 starnet_s1 xception41",
    ),
    *images("timm", 128, "inception_v4"),
    *images(
        "timm",
        64,
        "vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 "
        "mixer_s16_224 pit_ti_224 cait_xxs24_224 eva02_tiny_patch14_224",
        img_size=64,
    ),
    *images(
        "timm",
        224,
        "swin_tiny_patch4_window7_224 coat_tiny levit_128s poolformer_s12 mobilevit_xxs "
        "efficientformer_l1 edgenext_xx_small tiny_vit_5m_224",
    ),
]

WIDTH = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 100}
DEPTH = {"num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**WIDTH, **DEPTH}
DECODER = {**ENCODER, "num_key_value_heads": 2}
TWO_SIDED = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
PICTURES = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, **DEPTH}
SMALL_SWIN = {"image_size": 32, "window_size": 2, "embed_dim": 16, "depths": [1, 1]}
SOUND = {"hidden_size": 32, "intermediate_size": 64, **DEPTH}
TRANSFORMERS = [
    Case(f"transformers:{name}", args, inputs)
    for name, args, *inputs_ in (
        ("bert", ENCODER),
        ("roberta", ENCODER),
        ("albert", {**ENCODER, "embedding_size": 16}),
        ("electra", {**ENCODER, "embedding_size": 16}),
        ("mpnet", ENCODER),
        ("deberta-v2", ENCODER),
        ("modernbert", {**ENCODER, "pad_token_id": 0}),
        (
            "distilbert",
            {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100},
        ),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}),
        (
            "gpt_neo",
            {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "vocab_size": 100,
                "attention_types": [[["global", "local"], 1]],
            },
        ),
        ("gpt_neox", ENCODER),
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "rotary_dim": 8}),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}),
        (
            "opt",
            {
                **DEPTH,
                "hidden_size": 32,
                "ffn_dim": 64,
                "word_embed_proj_dim": 32,
                "vocab_size": 100,
            },
        ),
        ("llama", DECODER),
        ("mistral", DECODER),
        ("qwen2", DECODER),
        ("qwen3", {**DECODER, "head_dim": 8}),
        ("gemma", {**DECODER, "head_dim": 8}),
        ("gemma2", {**DECODER, "head_dim": 8}),
        ("phi", DECODER),
        ("falcon", {**DEPTH, "hidden_size": 32, "vocab_size": 100}),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100}),
        ("mixtral", DECODER),
        (
            "qwen2_moe",
            {
                **DECODER,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
                "num_experts": 4,
            },
        ),
        ("t5", T5),
        ("mt5", T5),
        ("bart", TWO_SIDED),
        ("pegasus", TWO_SIDED),
        ("marian", {**TWO_SIDED, "pad_token_id": 0}),
        ("vit", PICTURES),
        ("deit", PICTURES),
        ("beit", PICTURES),
        ("dinov2", {"hidden_size": 32, "image_size": 28, **DEPTH}),
        (
            "swin",
            {
                "image_size": 32,
                "window_size": 2,
                "embed_dim": 16,
                "depths": [1, 1],
                "num_heads": [2, 2],
            },
        ),
        ("convnext", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32}),
        ("segformer", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}, "3x64x64"),
        ("whisper", {**TWO_SIDED, "num_mel_bins": 8, "pad_token_id": 0}, "8x3000", "8:int64"),
    )
    for inputs in [tuple(inputs_)]
]
TRANSFORMERS += [
    Case(f"transformers:{name}", SOUND, ("4000",), noted)
    for name in ("wav2vec2", "hubert")
    for noted in ({}, {"layerdrop": 0.0, "mask_time_prob": 0.0})
]


@dataclass(frozen=True)
class Trial:
    """A model as captured in so many `seconds`, other `inputs` than those of the capture, and what
    the plain model computes of these.
    """

    captured: Captured
    inputs: Sequence[Tensor]
    expected: dict[str, Tensor]
    seconds: float

    @staticmethod
    def of(case: Case) -> Trial:
        """Loads and captures the model. Raises what goes wrong."""
        torch.manual_seed(0)
        loaded = load(case.source, {**case.args, **case.noted}, BATCH, case.inputs)
        args, kwargs = pytree.tree_map(lambda value: value.flip(-1), (loaded.args, loaded.kwargs))
        before = {name: buffer.clone() for name, buffer in loaded.model.named_buffers()}
        expected = plain_pass(loaded.model, args, kwargs)
        with torch.no_grad():
            for name, buffer in loaded.model.named_buffers():
                buffer.copy_(before[name])
        start = time.perf_counter()
        captured = capture(loaded.model, loaded.args, loaded.kwargs)
        seconds = time.perf_counter() - start
        return Trial(captured, flatten_inputs(args, kwargs), expected, seconds)

    def difference(self, found: dict[str, Tensor]) -> str:
        """Says what is not as expected; empty if all is."""
        for name, value in self.expected.items():
            if name in found and not close(found[name], value):
                return f"computes another {name}"
        missing = [n for n in self.expected if n not in found and n.startswith("gradient")]
        return f"loses the {missing[0]}" if missing else ""


def try_out(case: Case) -> Result:
    """Compares the captured model with the plain one. Raises what goes wrong."""
    trial = Trial.of(case)
    reason = trial.difference(captured_pass(trial.captured, trial.inputs))
    return Result(len(trial.captured.graph.nodes), trial.seconds, reason)


def plain_pass(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    leaves = pytree.tree_leaves(model(*args, **kwargs))
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    parameters = dict(model.named_parameters())
    return books(outputs, parameters, dict(model.named_buffers()))


def captured_pass(captured: Captured, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Every graph node as a module of its own, one after another."""
    values = dict(zip(captured.inputs, inputs, strict=True))
    torch.manual_seed(1)
    for node in captured.graph.order:
        if not captured.graph.nodes[node].is_input:
            piece = segment(captured, [node], captured.outputs)
            made = piece.module(*(values[name] for name in piece.inputs))
            values |= dict(zip(piece.outputs, made, strict=True))
    outputs = [values[name] for name in captured.outputs]
    parameters = dict(captured.module.named_parameters())
    return books(outputs, parameters, dict(captured.module.named_buffers()))


def books(
    outputs: Sequence[Tensor], parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs, gradients for fixed gradients of the outputs, and buffers, by name."""
    torch.manual_seed(2)
    begun = [output for output in outputs if output.requires_grad]
    given = [torch.randn_like(output) for output in begun]
    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(begun, list(wanted.values()), given, allow_unused=True)
    return {
        **{f"output {index}": output.detach() for index, output in enumerate(outputs)},
        **{
            f"gradient of {name}": gradient
            for name, gradient in zip(wanted, gradients, strict=True)
            if gradient is not None
        },
        **{f"buffer {name}": buffer.clone() for name, buffer in buffers.items()},
    }


def close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    largest = expected.abs().max() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=0, atol=float(largest) * CLOSE, equal_nan=True)


def guarded(case: Case) -> Result:
    found = apart(report, case, LIMIT)
    return Result(reason=found) if isinstance(found, str) else Result(**found)


def apart(
    report: Callable[[Case, Connection], None], case: Case, limit: float
) -> dict[str, Any] | str:
    """Returns what `report` sends as JSON from a process of its own, which may take so many
    seconds, or why it sends nothing.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(case, send))
    process.start()
    send.close()
    try:
        if not receive.poll(limit):
            return f"took more than {limit:.0f} s"
        found: dict[str, Any] = json.loads(receive.recv())
        return found
    except EOFError:
        return "its process died"
    finally:
        process.kill()
        process.join()


def report(case: Case, send: Connection) -> None:
    try:
        result = try_out(case)
    except UserError as error:
        result = Result(reason=" ".join(error.message.split()))
    except Exception as error:
        result = Result(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    send.send(json.dumps(vars(result)))


def run(cases: Iterable[Case]) -> dict[str, Result]:
    results = {}
    for case in cases:
        start = time.perf_counter()
        result = results[case.name] = guarded(case)
        passed = time.perf_counter() - start
        told = result.reason or f"{result.nodes} nodes, captured in {result.seconds:.1f} s"
        print(f"{case.name:45} {passed:5.1f} s  {told}", flush=True)
    return results


def write_table(results: dict[str, Result]) -> None:
    lines = []
    for library in ("torchvision", "timm", "transformers"):
        theirs = {name: each for name, each in results.items() if name.startswith(f"{library}:")}
        good = sum(not each.reason for each in theirs.values())
        lines += [f"\n## {library}: {good} of {len(theirs)}\n"]
        lines += ["| model | nodes | seconds | captured |", "|---|---|---|---|"]
        for name, each in theirs.items():
            told = each.reason.replace("|", "\\|") or "yes"
            nodes, seconds = (each.nodes, f"{each.seconds:.1f}") if each.nodes else ("", "")
            lines.append(f"| {name.partition(':')[2]} | {nodes} | {seconds} | {told} |")
    good = sum(not each.reason for each in results.values())
    TABLE.write_text(f"{HEAD.format(good=good, all=len(results))}\n" + "\n".join(lines) + "\n")


HEAD = """# Models that are captured

{good} of {all} architectures, tried by
`python scripts/bench/architectures/captured_models.py`: each with
random weights on two small examples, in training mode; those of transformers in small
configurations. *Captured* means that the nodes, each run as a module of its own, together give
the outputs, the gradients of all parameters and the buffers of the plain model, on inputs other
than those of the capture, dropout included. *Seconds* are those of the capture, on one core of a
machine that had other work.

Arguments after a name are those that the model is captured with (`--arg layerdrop=0.0`): by default
speech models leave out layers, and mask stretches, by random numbers that Python decides on."""


def import_libraries() -> None:
    """Once, for all the processes that are forked off."""
    import_torchvision()
    importlib.import_module("timm")
    importlib.import_module("transformers.models.auto.modeling_auto")
    load("transformers:gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2}, 1)


def main() -> None:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import_libraries()
    cases = [*TORCHVISION, *TIMM, *TRANSFORMERS]
    if names := sys.argv[1:]:
        run(case for case in cases if any(name in case.source for name in names))
        return
    write_table(run(cases))


if __name__ == "__main__":
    main()
