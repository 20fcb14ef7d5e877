"""Perplexity against a forward per token and a loop over windows, and chunked losses against the model's own."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
)

from eval.likelihood import token_losses
from eval.perplexity import perplexity, plan

torch.set_num_threads(1)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=2.0),
    "cohere": CohereConfig(**SIZES, **SPECIAL, logit_scale=0.3),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0),
    "gpt2": GPT2Config(
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, bos_token_id=1,
        eos_token_id=2,
    ),
    "opt": OPTConfig(
        vocab_size=128, hidden_size=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, init_std=0.2, **SPECIAL,
    ),
}  # fmt: skip


def build(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval().float()


def tokens(*shape, seed=1):
    torch.manual_seed(seed)
    return torch.randint(0, 128, shape)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def full_losses(model, ids):
    with torch.no_grad():
        return cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_losses_are_the_full_ones(name):
    model, ids = build(name), tokens(2, 40)
    expected = full_losses(model, ids)
    torch.testing.assert_close(token_losses(model, ids, chunk=7), expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(token_losses(model, ids, chunk=7, first=33), expected[:, 32:], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "opt"])
def test_no_forward_holds_more_logits_than_a_chunk(name):
    model, seen = build(name), []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    token_losses(model, tokens(1, 40), chunk=7)
    assert max(seen) == 7 and sum(seen) >= 39


def test_the_body_runs_once_and_comes_back(llama):
    runs, body = [], llama.model
    hook = body.register_forward_hook(lambda *arguments: runs.append(1))
    token_losses(llama, tokens(1, 40), chunk=7)
    hook.remove()
    assert runs == [1] and llama.model is body


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    model, ids = build(name), tokens(1, 30)
    pads, mask = torch.full((1, 6), 5), torch.ones(1, 30, dtype=torch.long)
    parts, masks = ([pads, ids], [0 * pads, mask]) if side == "left" else ([ids, pads], [mask, 0 * pads])
    losses = token_losses(model, torch.cat(parts, 1), torch.cat(masks, 1), chunk=9)
    losses = losses[:, 6:] if side == "left" else losses[:, :29]
    torch.testing.assert_close(losses, full_losses(model, ids), atol=1e-5, rtol=1e-5)


def test_losses_under_a_lora_adapter(llama):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    ids = tokens(1, 40)
    losses = token_losses(model, ids, chunk=7)
    torch.testing.assert_close(losses, full_losses(model, ids), atol=2e-6, rtol=1e-6)
    assert (losses - full_losses(llama, ids)).abs().max() > 0.1


@pytest.mark.parametrize(("stride", "expected"), [(8, 417.284), (7, 472.801), (4, 419.688)])
@pytest.mark.parametrize("batch_size", [1, 3, 20])
@pytest.mark.parametrize("side", ["left", "right"])
def test_known_values(llama, stride, expected, batch_size, side):
    found = perplexity(llama, tokens(1, 50), window=16, stride=stride, batch_size=batch_size, padding_side=side)
    assert found.scored == 49
    assert found.perplexity == pytest.approx(expected, abs=6e-4)


def test_one_window_is_the_models_own_loss(llama):
    ids = tokens(1, 50)
    own = float(llama(ids, labels=ids).loss)
    assert perplexity(llama, ids).loss == pytest.approx(own, abs=1e-5)
    assert perplexity(llama, ids, mode="prefix").loss == pytest.approx(own, abs=1e-5)


def test_tokens_weigh_alike_over_documents_of_unequal_length(llama):
    documents = [tokens(50)[:50].tolist(), tokens(9, seed=2).tolist(), tokens(23, seed=3).tolist()]
    losses = torch.cat([full_losses(llama, torch.tensor([document]))[0] for document in documents])
    for batch_size in (1, 3):
        found = perplexity(llama, documents, batch_size=batch_size)
        assert found.scored == 49 + 8 + 22
        assert found.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-5)


def test_padded_documents_score_as_without_padding(llama):
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, :10] = 0
    mask[1, 22:] = 0
    expected = perplexity(llama, [ids[0, 10:].tolist(), ids[1, :22].tolist()])
    found = perplexity(llama, ids, attention_mask=mask)
    assert (found.scored, found.loss) == (19 + 21, pytest.approx(expected.loss, abs=1e-6))


def test_loss_by_position(llama):
    ids = tokens(1, 50)
    bands = perplexity(llama, ids, mode="prefix").by_position([0, 20, 50, 60])
    losses = full_losses(llama, ids)[0]
    assert [band.tokens for band in bands] == [19, 30, 0]
    assert bands[0].loss == pytest.approx(float(losses[:19].mean()), abs=1e-5)
    assert bands[1].loss == pytest.approx(float(losses[19:].mean()), abs=1e-5)
    assert bands[2].loss is None


DOCUMENTS = [tokens(50)[:50].tolist(), tokens(33, seed=2).tolist(), tokens(41, seed=3).tolist()]
BOS = 7
MODES = {
    "sliding": {"window": 16, "stride": 5},
    "sliding by half": {"window": 16},
    "sliding by all but one": {"window": 16, "stride": 15},
    "nonoverlap": {"window": 16, "mode": "nonoverlap"},
    "prefix": {"window": 30, "mode": "prefix"},
    "tail": {"window": 13, "mode": "tail", "tail": 4},
    "tail of longer samples": {"window": 13, "mode": "tail", "tail": 4, "sample": 20},
}


def contexts(document, bos, window, mode="sliding", stride=None, tail=None, sample=None):
    """By the words of each mode: every scored token and exactly the tokens that stand before it."""
    found = {}
    for token in range(1, len(document)):
        if mode == "prefix":
            start = 0 if token < window else None
        elif mode == "tail":
            sample = sample or window
            end = (token // sample + 1) * sample
            start = end - window if end - tail <= token and end <= len(document) else None
        elif mode == "nonoverlap" and bos is not None:
            start = max(0, (token - 1) // (window - 1) * (window - 1))
        elif mode == "nonoverlap":
            start = token // window * window
        else:
            step = stride or window // 2
            start = next(start for start in range(0, token, step) if token < start + window)
        if start is None or start == token:
            continue
        found[token] = document[start:token] if bos is None or start == 0 else [bos, *document[start + 1 : token]]
    return found


def loss_of(model, context, token):
    with torch.no_grad():
        return -float(model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1)[token])


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("name", MODES)
def test_every_mode_against_a_forward_per_token(llama, name, bos):
    documents = [[BOS, *document[1:]] if bos is not None else document for document in DOCUMENTS]
    expected = {
        (number, token): loss_of(llama, context, document[token])
        for number, document in enumerate(documents)
        for token, context in contexts(document, bos, **MODES[name]).items()
    }
    for batch_size, side in [(1, "right"), (2, "right"), (3, "right"), (2, "left"), (3, "left")]:
        scores = perplexity(llama, documents, bos=bos, batch_size=batch_size, padding_side=side, **MODES[name]).scores
        found = [
            ((score.window.document, token), float(loss))
            for score in scores
            for token, loss in zip(range(score.window.first, score.window.end), score.losses, strict=True)
        ]
        assert len(found) == len(expected) and dict(found).keys() == expected.keys()
        assert dict(found) == pytest.approx(expected, abs=1e-5)


def test_positions_count_the_bos(llama):
    document = [BOS, *DOCUMENTS[0][1:]]
    found = perplexity(llama, [document], window=10, mode="nonoverlap", bos=BOS)
    counted = {band.low: band.tokens for band in found.by_position(range(11))}
    assert counted == {0: 0, **dict.fromkeys(range(1, 5), 6), **dict.fromkeys(range(5, 10), 5)}


def test_all_lengths_score_the_same_tail():
    plans = [plan([50, 41], window, mode="tail", tail=4, sample=20) for window in (5, 13, 20)]
    scored = [[(window.document, window.first, window.end) for window in windows] for windows in plans]
    assert scored[0] == [(0, 16, 20), (0, 36, 40), (1, 16, 20), (1, 36, 40)] and scored[1:] == scored[:1] * 2
    assert [[window.end - window.start for window in windows] for windows in plans] == [[5] * 4, [13] * 4, [20] * 4]


def test_yarn_averages_the_means_of_windows(llama):
    ids = tokens(1, 50)
    found = perplexity(llama, ids, window=16, stride=8, published="yarn")
    assert found.perplexity == pytest.approx(425.07, abs=6e-3)
    token_weighted = perplexity(llama, ids, window=16, stride=8)
    assert token_weighted.perplexity == pytest.approx(417.284, abs=6e-4)
    assert found.bits_per_byte(100) == token_weighted.bits_per_byte(100)
    means = []
    for start in range(0, 49, 8):
        window = ids[:, start : start + 16]
        fresh = 15 if start == 0 else min(start + 16, 50) - (start + 8)
        means.append(full_losses(llama, window)[0, -fresh:].double().mean())
        if start + 16 >= 50:
            break
    assert found.loss == pytest.approx(float(sum(means)) / len(means), abs=1e-6)


def test_longlora_scores_whole_windows_of_the_joined_documents(llama):
    found = perplexity(llama, DOCUMENTS, window=16, stride=6, published="longlora", batch_size=3)
    joined = torch.tensor([[*DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2]]])
    starts = list(range(0, 124 - 16, 6))[:-1]
    losses = [full_losses(llama, joined[:, start : start + 16]).double().mean() for start in starts]
    assert [score.window.start for score in found.scores] == starts and found.scored == 15 * len(starts)
    assert found.loss == pytest.approx(float(sum(losses)) / len(losses), abs=1e-6)


@pytest.mark.parametrize("length", [2, 15, 16, 17, 50, 64])
@pytest.mark.parametrize("stride", [1, 5, 8, 15])
def test_windows_score_every_token_but_the_first_once(length, stride):
    windows = plan([length], 16, stride)
    scored = [token for window in windows for token in range(window.first, window.end)]
    assert scored == list(range(1, length))
    assert all(0 <= window.start < window.first < window.end <= window.start + 16 for window in windows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 16, "stride": 17}, "stride 17"),
        ({"window": 16, "stride": 0}, "stride 0"),
        ({"window": 1}, "at least 2"),
        ({"window": 16, "mode": "slide"}, "sliding, nonoverlap, prefix, tail"),
        ({"window": 51, "mode": "prefix"}, "take a longer one"),
        ({"window": 16, "padding_side": "both"}, "left or right"),
        ({"window": 16, "batch_size": 0}, "at least 1"),
        ({"window": 16, "bos": 5}, "must start with that token"),
        ({"window": 16, "stride": 8, "mode": "nonoverlap"}, "leave it out"),
        ({"window": 16, "mode": "tail", "tail": 16}, "shorter than the length 16"),
        ({"window": 16, "mode": "tail", "tail": 0}, "1 or more"),
        ({"window": 16, "mode": "tail", "tail": 2, "sample": 15}, "samples of 15 tokens"),
        ({"window": 16, "mode": "tail", "tail": 2, "sample": 51}, "take a longer one"),
        ({"window": 16, "published": "press"}, "yarn, longlora"),
        ({"window": 16, "published": "longlora", "mode": "tail", "tail": 2}, "are sliding windows"),
        ({"window": 48, "published": "longlora"}, "nothing to score"),
    ],
)
def test_wrong_arguments(llama, arguments, words):
    with pytest.raises(ValueError, match=words):
        perplexity(llama, tokens(1, 50), **arguments)
