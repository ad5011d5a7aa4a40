"""The GNMT run: data to turn round, and a translator of the published shape that learns to."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from pipedream.capture.export import capture


def test_the_decoder_reads_the_target_one_place_late(gnmt: ModuleType) -> None:
    train, held_out = gnmt.data(length=5, examples=100)
    (source, read), target = train[0]
    assert source.dtype == torch.int64
    assert target.tolist() == source.tolist()[::-1]
    assert read.tolist() == [gnmt.BEGIN, *target.tolist()[:-1]]
    assert len(train) + len(held_out) <= 100
    trained = {tuple(train[index][0][0].tolist()) for index in range(len(train))}
    tried = {tuple(held_out[index][0][0].tolist()) for index in range(len(held_out))}
    assert len(trained) == len(train)
    assert not trained & tried


def test_the_large_one_has_the_published_layers(gnmt: ModuleType) -> None:
    """Eight layers of 1024 on each side: the LSTMs' sizes follow from what each layer reads."""
    with torch.device("meta"):
        model = gnmt.model(vocabulary=32000, width=1024, layers=8, dropout=0.2)
    width, gates = 1024, 4 * 1024

    def lstm(inputs: int) -> int:
        return gates * (inputs + width) + 2 * gates

    encoder = 2 * lstm(width) + lstm(2 * width) + 6 * lstm(width)
    decoder = lstm(width) + 7 * lstm(2 * width)
    attention = 2 * width * width + 2 * width
    words = 2 * 32000 * width + 32000 * (2 * width + 1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == encoder + decoder + attention + words
    assert [layer.skip for layer in model.encoder.layers] == [False, *[True] * 6]
    assert [layer.skip for layer in model.decoder.layers] == [False, *[True] * 6]


def test_no_word_sees_what_follows_it_and_each_sees_the_whole_source(gnmt: ModuleType) -> None:
    torch.manual_seed(0)
    model = gnmt.model(width=16).eval()
    (source, read), _ = gnmt.data()[0][0]
    source, read = source.unsqueeze(0), read.unsqueeze(0)
    logits = model(source, read)
    later, other = read.clone(), source.clone()
    later[0, 4:] = 9
    other[0, -1] = other[0, -1] % 10 + 1
    torch.testing.assert_close(model(source, later)[:, :4], logits[:, :4])
    assert not torch.allclose(model(source, later)[:, 4:], logits[:, 4:])
    assert (model(other, read) - logits).abs().amax(-1).gt(0).all()


@pytest.mark.thorough
def test_each_layer_is_a_node(gnmt: ModuleType) -> None:
    (source, read), _ = gnmt.data()[0][0]
    inputs = source.expand(2, -1), read.expand(2, -1)
    nodes = capture(gnmt.model(layers=4, dropout=0.1), inputs).graph.nodes.values()
    kinds = [node.description.partition("(")[0] for node in nodes]
    assert kinds.count("LSTM") == 8
    assert kinds.count("Embedding") == 2


def test_a_few_steps_learn(gnmt: ModuleType) -> None:
    torch.manual_seed(0)
    model = gnmt.model(width=32, layers=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train, _ = gnmt.data(length=3, examples=400)
    examples = [train[index] for index in range(128)]
    source, read, target = (
        torch.stack(each) for each in zip(*((*pair, told) for pair, told in examples), strict=True)
    )
    losses = []
    for _ in range(60):
        loss = gnmt.loss(model(source, read), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < losses[0] / 2
