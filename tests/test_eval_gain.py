"""Gain against a loop over tokens with exactly their contexts, LongPPL by hand, and the command on tiny models."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from test_eval_results import TEXT, build, characters, only
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from eval.__main__ import app, main
from eval.commands import gain as commands
from eval.gain import Gain, Reading, gain, near_windows
from eval.key_tokens import Alignment, align
from eval.models import applied, load

torch.set_num_threads(1)


def tokens(count, seed=1):
    torch.manual_seed(seed)
    return torch.randint(0, 256, (count,))


@torch.no_grad()
def loss_given(model, context, token):
    return float(cross_entropy(model(context[None]).logits[:, -1].float(), token[None]))


@pytest.mark.parametrize(
    ("near", "stride", "length", "head"), [(8, 3, 50, 0), (8, 3, 45, 1), (5, 1, 20, 0), (7, 9, 17, 2)]
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_token_sees_what_it_should(near, stride, length, head, batch_size):
    model, ids = build(), tokens(50)
    found = gain(model, ids, length=length, near=near, stride=stride, head=head, batch_size=batch_size)
    seen = [near + index % stride for index in range(length - near - stride)]
    for index, count in enumerate(seen):
        place = near + stride + index
        context = torch.cat([ids[:head], ids[place - count : place]])
        assert float(found.readings[0].near[index]) == pytest.approx(loss_given(model, context, ids[place]), abs=1e-4)
        assert float(found.readings[0].full[index]) == pytest.approx(
            loss_given(model, ids[:place], ids[place]), abs=1e-4
        )
    assert len(found.gains) == len(seen) and found.gains.abs().max() > 0.1


def test_without_a_stride_it_is_a_quarter():
    ids = tokens(40)
    assert torch.equal(gain(build(), ids, near=8).gains, gain(build(), ids, near=8, stride=2).gains)
    assert near_windows(3, 1)[0].first == 2


def test_documents_are_read_apart_and_their_tokens_weigh_alike():
    model, documents = build(), [tokens(40), tokens(25, seed=2)]
    apart = [gain(model, document, near=8, stride=4) for document in documents]
    both = gain(model, [document.tolist() for document in documents], near=8, stride=4)
    torch.testing.assert_close(both.gains, torch.cat([one.gains for one in apart]))
    assert both.mean == pytest.approx((28 * apart[0].mean + 13 * apart[1].mean) / 41, rel=1e-6)
    assert both.positions.tolist() == [*range(12, 40), *range(12, 25)]


def sliding(layers, window=8):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=window, initializer_range=0.2,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize(("layers", "near", "blind"), [(1, 8, True), (1, 5, False), (3, 22, True), (3, 8, False)])
def test_a_model_that_sees_near_tokens_only_gains_nothing(layers, near, blind):
    """Through its layers the last token that it reads sees layers × (window − 1) tokens before it."""
    largest = float(gain(sliding(layers), tokens(60), near=near, stride=4).gains.abs().max())
    assert largest < 2e-5 if blind else largest > 1e-2


class Copier(torch.nn.Module):
    """Expects, with probability 0.9, what followed the last occurrence of the token it has read; else all alike."""

    def __init__(self):
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(()))
        self.config = SimpleNamespace()

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        logits = torch.zeros(*input_ids.shape, 256)
        for row, ids in enumerate(input_ids.tolist()):
            for place, token in enumerate(ids):
                earlier = [index for index in range(place) if ids[index] == token]
                if earlier:
                    logits[row, place, ids[earlier[-1] + 1]] = math.log(0.9 / 0.1 * 255)
        return SimpleNamespace(logits=logits)


def test_what_must_be_copied_from_afar_is_worth_what_it_saves():
    period = torch.randperm(256)[:40]
    found = gain(Copier(), period.repeat(3), near=16, stride=4)
    expected = torch.full((100,), math.log(256 * 0.9), dtype=torch.float64)
    expected[: 41 - 20] = 0  # token 40 is the first to come again, token 41 the first that can be copied
    torch.testing.assert_close(found.gains, expected, atol=1e-4, rtol=0)
    assert found.share() == pytest.approx(0.79)
    position = found.by_position([0, 20, 41, 120, 200])
    assert [band[2] for band in position] == [0, 21, 79, 0] and position[0][3] is None
    assert [position[1][3], position[2][3]] == pytest.approx([0, math.log(256 * 0.9)], abs=1e-4)
    new, close, afar = found.by_distance([0, 1, 20, 80])
    assert (new[2], close[2], afar[2]) == (20, 0, 80)
    assert afar[3] == pytest.approx(math.log(256 * 0.9) * 79 / 80, abs=1e-4)
    near = gain(Copier(), period[:10].repeat(6), near=16, stride=4)
    assert near.gains.abs().max() < 1e-5


def test_long_perplexity_by_hand():
    one = Reading(torch.arange(7), torch.tensor([5.0, 5.0, 3.0, 4.5]), torch.tensor([1.0, 2.5, 1.5, 1.9]))
    other = Reading(torch.arange(5), torch.tensor([9.0]), torch.tensor([0.1]))
    assert one.first == 3 and one.keys.tolist() == [True, False, False, True] and other.keys.tolist() == [True]
    evaluated = Gain([Reading(one.ids, one.near, torch.tensor([2.0, 9.0, 9.0, 3.0])), other])
    assert evaluated.long_perplexity([one.keys, other.keys]) == pytest.approx(math.exp((2 + 3 + 0.1) / 3))
    none = [torch.zeros(4, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)]
    assert evaluated.long_perplexity(none) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [({"length": 10}, "longer length"), ({"length": 41}, "take a longer one"), ({"near": 0}, "near=0"),
     ({"stride": 0}, "stride=0"), ({"stride": 32}, "less near")],
)  # fmt: skip
def test_wrong_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        gain(build(), tokens(40), **{"near": 8, "stride": 2, **options})


def words_tokenizer():
    """A BPE with words as tokens and a first BOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", add_bos_token=True)


def test_key_tokens_share_a_character_with_those_of_the_evaluator():
    aligned = Alignment([(0, 0), (0, 3), (3, 8), (8, 10)], [(0, 2), (2, 4), (4, 8), (8, 9), (9, 10)])
    carried = [aligned.carry_over(torch.arange(4) == index).tolist() for index in range(4)]
    yes, no = True, False
    assert carried == [[no] * 5, [yes, yes, no, no, no], [no, yes, yes, no, no], [no, no, no, yes, yes]]
    assert [aligned.covering(length) for length in (1, 2, 3, 4, 5)] == [2, 3, 3, 4, 4]


def test_alignment_of_two_tokenizers():
    aligned = align(words_tokenizer(), characters(), TEXT)
    assert aligned.mine == [(place, place + 1) for place in range(len(TEXT))]
    assert aligned.theirs[0] == (0, 0) and max(end - begin for begin, end in aligned.theirs) > 5
    for index in (1, 20, 60):
        begin, end = aligned.theirs[index]
        carried = aligned.carry_over(torch.arange(len(aligned.theirs)) == index).nonzero()[:, 0].tolist()
        assert carried == list(range(begin, end))
    with pytest.raises(ValueError, match="fast tokenizers"):
        align(SimpleNamespace(is_fast=False), characters(), TEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build().save_pretrained(path)
    characters().save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def arguments(folder, root, *more):
    given = ("gain", "--model", folder, "--text", folder / "text.txt", "--dtype", "float32", "--near", 16,
             "--stride", 8, "--results", root, *more)  # fmt: skip
    return [str(argument) for argument in given]


def invoke(folder, root, *more):
    done = CliRunner().invoke(app, arguments(folder, root, *more), catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


BOTH = ("--posenc", "none", "--posenc", "pi:factor=2", "--lengths", "60,100")


def test_gain_command(folder, tmp_path):
    output = invoke(folder, tmp_path, *BOTH)
    assert "pi:factor=2" in output and "No key tokens in 60, so no LongPPL" in output and "nan" not in output
    assert "reads past its trained length, 64" in " ".join(output.split())
    found = only(tmp_path)
    content = json.loads((found / "scores.json").read_text())
    assert (content["trained_length"], content["evaluator"]["posenc"]) == (64, "none")
    table = {(score["posenc"], score["length"]): score for score in content["scores"]}
    assert list(table) == [("none", 60), ("none", 100), ("pi:factor=2", 60), ("pi:factor=2", 100)]
    model, ids = build(), torch.tensor(characters()(TEXT).input_ids)
    for (posenc, length), score in table.items():
        with applied(model, posenc):
            expected = gain(model, ids, length=length, near=16, stride=8)
        assert (score["gain"], score["loss"]) == pytest.approx((expected.mean, expected.loss), abs=1e-5)
        inside = expected.gains[: 64 - 24]
        assert score["gain_within"] == pytest.approx(float(inside.mean()), abs=1e-5)
        beyond = expected.gains[64 - 24 :] if length > 64 else None
        assert score["gain_beyond"] == (None if beyond is None else pytest.approx(float(beyond.mean()), abs=1e-5))
        assert (score["tokens"], score["tokens_beyond"]) == (length - 24, max(0, length - 64))
        assert (score["key_tokens"], score["long_perplexity"]) == (0, None)
        for name in ("by_position", "by_distance"):
            assert sum(band["tokens"] for band in score[name]) == length - 24
    assert abs(table["none", 100]["gain"] - table["pi:factor=2", 100]["gain"]) > 1e-3
    assert (found / "plot.png").stat().st_size > 5000


def test_only_what_is_missing_is_read(folder, tmp_path, monkeypatch):
    invoke(folder, tmp_path, "--lengths", "60")
    samples = only(tmp_path) / "samples.jsonl"
    whole = samples.read_text().splitlines()
    assert [json.loads(line)["part"] for line in whole] == ["near"] * 5 + ["full"]
    samples.write_text("\n".join(whole[:3]) + "\n")
    read, original = [], commands.near_losses

    def counted(model, document, windows, head, batch_size):
        read.extend(window.start for window in windows)
        return original(model, document, windows, head, batch_size)

    monkeypatch.setattr(commands, "near_losses", counted)
    invoke(folder, tmp_path, "--lengths", "60,100")
    assert read == [32, 40, 48, 56, 64, 72, 80]
    scores = json.loads((only(tmp_path) / "scores.json").read_text())["scores"]
    assert [score["length"] for score in scores] == [60, 100]


def edit(path, change):
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**sample, "losses": change(sample)}) + "\n" for sample in samples))


def known(sample):
    """Near losses of 6, and full losses that make each tenth token a key token for `none`, the evaluator."""
    places = range(sample["first"], sample["first"] + len(sample["losses"]))
    if sample["part"] == "near":
        return [6.0 for _ in places]
    full = {"none": 1.0, "pi:factor=2": 1.5}[sample["posenc"]]
    return [full if place % 10 == 0 else 4.0 for place in places]


def test_long_perplexity_of_every_encoding_is_over_the_evaluators_key_tokens(folder, tmp_path):
    invoke(folder, tmp_path, *BOTH)
    edit(only(tmp_path) / "samples.jsonl", known)
    output = invoke(folder, tmp_path, "--posenc", "pi:factor=2", "--lengths", "60,100")
    assert "No key tokens" not in output
    for score in json.loads((only(tmp_path) / "scores.json").read_text())["scores"]:
        assert score["key_tokens"] == (3 if score["length"] == 60 else 7)  # 30, 40, 50; to 90
        assert score["long_perplexity"] == pytest.approx(math.exp(1.0 if score["posenc"] == "none" else 1.5))


def test_the_evaluators_encoding_need_not_be_one_that_is_compared(folder, tmp_path):
    output = invoke(folder, tmp_path, "--posenc", "none", "--lengths", "100", "--evaluator-posenc", "pi:factor=2")
    assert "LongPPL: no loss" in output and "under pi:factor=2" in output and "past its trained" not in output
    path = only(tmp_path) / "samples.jsonl"
    edit(
        path,
        lambda sample: [5.0 - (sample["posenc"] != "none") * 4 * (sample["part"] == "full")] * len(sample["losses"]),
    )
    invoke(folder, tmp_path, "--posenc", "none", "--lengths", "100", "--evaluator-posenc", "pi:factor=2")
    content = json.loads((only(tmp_path) / "scores.json").read_text())
    assert [(s["posenc"], s["key_tokens"]) for s in content["scores"]] == [("none", 76), ("pi:factor=2", 76)]
    loaded = load(str(folder), "float32", "cpu")
    text = str(folder / "text.txt")
    results = commands.run(*loaded, str(folder), ["pi:factor=2"], [100], [text], near=16, stride=8, root=tmp_path)
    assert results.folder == only(tmp_path)
    scores = commands.scores_of(results)
    assert [(s["key_tokens"], s["long_perplexity"]) for s in scores] == [(0, None), (0, None)]  # by `none`
    carried = commands.scores_of(results, commands.keys_of(results, "pi:factor=2"))
    assert carried == content["scores"] and carried[0]["long_perplexity"] == pytest.approx(math.exp(5))
    unknown = commands.scores_of(results, commands.keys_of(results, "yarn:factor=2"))
    assert {score["key_tokens"] for score in unknown} == {None}


@pytest.mark.parametrize("tokenizer", [characters(), words_tokenizer()])
def test_another_evaluator_is_filed_once_and_apart(folder, tmp_path, tokenizer):
    judge = build(seed=1)
    judge.resize_token_embeddings(len(tokenizer))
    run = {"near": 16, "stride": 8, "evaluator": (judge, tokenizer, "judge"), "root": tmp_path / "r"}
    text, model = str(folder / "text.txt"), build()
    commands.run(model, characters(), "tiny", ["none"], [400], [text], **run)
    theirs, mine = sorted((tmp_path / "r").iterdir(), key=lambda path: "judge" not in path.name)
    before = (theirs / "samples.jsonl").read_text()
    assert {json.loads(line)["posenc"] for line in before.splitlines()} == {"none"}
    full = next(json.loads(line) for line in before.splitlines() if '"full"' in line)
    aligned = align(tokenizer, characters(), TEXT)
    assert aligned.theirs[full["length"] - 1][0] < 400 <= aligned.theirs[full["length"] - 1][1]
    edit(theirs / "samples.jsonl", known)
    results = commands.run(model, characters(), "tiny", ["none", "pi:factor=2"], [400], [text], **run)
    assert len((theirs / "samples.jsonl").read_text().splitlines()) == len(before.splitlines())
    keys = [place for index in range(30, full["length"], 10) for place in range(*aligned.theirs[index])]
    keys = [place for place in keys if 24 <= place < 400]
    for score in json.loads((mine / "scores.json").read_text())["scores"]:
        (sample,) = results.select(posenc=score["posenc"], part="full")
        losses = [sample["losses"][place - 24] for place in keys]
        assert score["key_tokens"] == len(keys) > 10
        assert score["long_perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


@pytest.mark.parametrize(
    ("more", "words"),
    [(["--lengths", "24"], "longer length"), (["--lengths", "99999"], "longer text"), (["--near", "0"], "near=0"),
     (["--text", "no-such-text"], "paradise_lost"), (["--evaluator-posenc", "yran"], "yarn"),
     (["--evaluator", "nowhere", "--lengths", "60"], "cannot load 'nowhere'")],
)  # fmt: skip
def test_wrong_input_is_one_line(folder, tmp_path, monkeypatch, capsys, more, words):
    monkeypatch.setattr("sys.argv", ["eval", *arguments(folder, tmp_path), "--lengths", "60", *more])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    output = " ".join(capsys.readouterr().out.split())
    assert words in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())
