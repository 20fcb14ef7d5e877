"""Where documents come from, without a network, and how many bytes their tokens stand for."""

import itertools

import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from eval import data
from eval.documents import byte_counts, gather, join, read

SAMPLE = "naïve café — 東京タワー 😀😀 done.\n\n  Ελλάδα, 東京 again"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(merges=0, trim=False, bos=False):
    """A byte-level tokenizer, with merges learned from the sample: they join parts of characters too."""
    vocabulary = {letter: index for index, letter in enumerate([*LETTERS, "<s>"])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if merges:
        trainer = trainers.BpeTrainer(
            vocab_size=256 + merges, initial_alphabet=LETTERS, special_tokens=["<s>"], show_progress=False
        )
        backend.train_from_iterator([SAMPLE], trainer)
    if bos:
        place = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=place)
    elif trim:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def byte_fallback():
    """As Llama 2's: a mark for spaces, one more at the start of the text, and bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "▁", *"abcdefghinoprtuvw.,—", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def complete(prefix):
    """Bytes of the whole characters that a prefix of UTF-8 holds."""
    return len(prefix.decode("utf-8", errors="ignore").encode())


def expected_counts(pieces):
    """By the bytes of every token, from the whole characters that the tokens so far hold."""
    so_far = [complete(b"".join(pieces[:count])) for count in range(len(pieces) + 1)]
    return [after - before for before, after in itertools.pairwise(so_far)]


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("merges", [0, 10, 25])
def test_bytes_of_tokens_that_split_characters(merges, trim):
    tokenizer = byte_level(merges, trim)
    ids = tokenizer(SAMPLE, add_special_tokens=False).input_ids
    ends = list(itertools.accumulate(map(len, tokenizer.convert_ids_to_tokens(ids))))  # a letter is a byte
    pieces = [SAMPLE.encode()[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    assert ends[-1] == len(SAMPLE.encode()) and len(set(map(len, pieces))) > bool(merges)
    assert any(complete(piece) < len(piece) for piece in pieces)
    assert byte_counts(tokenizer, SAMPLE, ids) == expected_counts(pieces)


class Marking(ByT5Tokenizer):
    """A slow tokenizer that decodes a character that is not complete to a mark; ByT5's leaves it out."""

    def decode(self, ids, **options):
        return bytes(index - 3 for index in ids).decode("utf-8", errors="replace")


TOKENIZERS = {
    "fast": byte_level(),
    "trimmed": byte_level(trim=True),
    "slow": ByT5Tokenizer(),
    "slow, marking": Marking(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_one_token_per_byte(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    found = byte_counts(tokenizer, text, ids)
    if name == "trimmed":  # such offsets do not say which of two tokens a blank belongs to
        assert sum(found) == len(text.encode())
    else:
        assert found == expected_counts([bytes([byte]) for byte in text.encode()])


def test_bytes_under_byte_fallback_and_a_mark_that_is_not_in_the_text():
    tokenizer, text = byte_fallback(), "a東 b"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁", "a", "<0xE6>", "<0x9D>", "<0xB1>", "▁", "b"]
    assert byte_counts(tokenizer, text, ids) == [0, 1, 0, 0, 3, 1, 1]


def test_a_slow_tokenizer_that_loses_the_text():
    tokenizer = ByT5Tokenizer()
    assert byte_counts(tokenizer, "abc", tokenizer("abd", add_special_tokens=False).input_ids) is None


def test_a_document_has_its_bos_once():
    tokenizer = byte_level(bos=True)
    document = read(tokenizer, "aé")
    assert document.sizes.tolist() == [0, 1, 0, 2] and document.ids[0] == tokenizer.bos_token_id
    assert read(tokenizer, "aé", start=False).ids.tolist() == document.ids[1:].tolist()
    joined = join([document, document], bos=True)
    assert joined.ids.tolist() == [*document.ids.tolist(), *document.ids[1:].tolist()]
    assert joined.sizes.tolist() == [0, 1, 0, 2, 1, 0, 2] and len(document[1:3].ids) == 2


@pytest.fixture
def folder(tmp_path):
    for name, text in {"b.txt": "second " * 5, "a.md": "first " * 9, "sub/c.rst": "third", "d.bin": "no"}.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "texts"


def test_a_folder_is_a_document_per_text_file(folder):
    assert list(data.documents(str(folder)).items()) == [
        (f"{folder}/a.md", "first " * 9), (f"{folder}/b.txt", "second " * 5), (f"{folder}/sub/c.rst", "third")
    ]  # fmt: skip
    assert list(data.documents(str(folder), 1)) == [f"{folder}/a.md"]
    assert data.documents(str(folder / "b.txt")) == {str(folder / "b.txt"): "second " * 5}
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"no \.txt, \.md, \.rst file.*dataset:{folder}/empty"):
        data.documents(str(folder / "empty"))


def rows(texts, column="text"):
    return Dataset.from_dict({"number": list(range(len(texts))), column: texts})


def test_data_sets_of_files_and_folders(tmp_path):
    rows(["one", "two", "three"], "body").to_json(tmp_path / "rows.jsonl")
    source = f"dataset:json:data_files={tmp_path / 'rows.jsonl'},column=body"
    assert data.documents(source, 2) == {f"{source}#0": "one", f"{source}#1": "two"}
    rows(["one", "two"]).save_to_disk(tmp_path / "saved")
    assert list(data.documents(f"dataset:{tmp_path / 'saved'}", 9).values()) == ["one", "two"]
    DatasetDict({"train": rows(["one"]), "test": rows(["two"])}).save_to_disk(tmp_path / "splits")
    source = f"dataset:{tmp_path / 'splits'}:split=test"
    assert data.documents(source, 1) == {f"{source}#0": "two"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("dataset:{}/splits", "has the splits train, test: choose one"),
        ("dataset:{}/splits:split=dev", "no split dev; choose one of train, test"),
        ("dataset:{}/splits:split=test,column=body", "no text in column 'body'; its columns: number, text"),
        ("dataset:{}/splits:part=test", "config, split, column, data_files, not part"),
        ("dataset:{}/splits:split", "not split"),
        ("dataset:", "should read dataset:NAME"),
        ("dataset:json:data_files={}/nothing.jsonl", "cannot load dataset:json"),
        ("dataset:{}/nothing", "cannot load dataset:"),
        ("{}/nothing", "neither a file, nor a folder"),
    ],
)
def test_sources_that_cannot_be_read(tmp_path, source, words):
    DatasetDict({"train": rows(["one"]), "test": rows(["two"])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=words):
        data.documents(source.format(tmp_path), 1)


def test_a_data_set_is_read_no_further_than_asked(tmp_path, monkeypatch):
    taken = []

    def endless(asked):
        for number in itertools.count():
            taken.append(number)
            yield f"{asked.source}#{number}", "x" * (4 if number % 2 else 9)

    monkeypatch.setattr(data.rows, "read", endless)
    assert len(data.documents("dataset:any", 3)) == 3 and taken == [0, 1, 2]
    with pytest.raises(ValueError, match="--documents: it may be endless"):
        data.documents("dataset:any")


def test_short_rows_are_skipped_and_counted(tmp_path):
    rows(["long one", "short", "long two", "", "long three"]).save_to_disk(tmp_path / "saved")
    source, tokenizer = f"dataset:{tmp_path / 'saved'}", byte_level()
    corpus = gather(tokenizer, [source], 8, count=2)
    assert list(corpus.documents) == [f"{source}#0", f"{source}#2"] and corpus.skipped == 1
    assert gather(tokenizer, [source], 8, count=3).skipped == 2
    with pytest.raises(ValueError, match="has 3 documents of 8 tokens, not 4"):
        gather(tokenizer, [source], 8, count=4)
    with pytest.raises(ValueError, match="--documents"):
        gather(tokenizer, [source], 8)


def test_equal_texts_are_taken_once(folder):
    (folder / "z.txt").write_text("first " * 9)
    corpus = gather(byte_level(), [str(folder), str(folder), str(folder / "b.txt")], 20)
    assert [name.rpartition("/")[2] for name in corpus.documents] == ["a.md", "b.txt", "c.rst"]
    assert corpus.repeated == [f"{folder}/z.txt", f"{folder}/b.txt"]


def test_documents_that_are_too_short_are_named(folder):
    corpus = gather(byte_level(), [str(folder)], 30, tokens=40)
    assert [len(document.ids) for document in corpus.documents.values()] == [40, 35, 5]
    assert torch.equal(corpus.documents[f"{folder}/a.md"].sizes, torch.ones(40, dtype=torch.long))
    with pytest.raises(ValueError, match=r"5 of .*c\.rst are there"):
        gather(byte_level(), [str(folder)], 30, whole=True)
    with pytest.raises(ValueError, match=r"54 of .*a\.md are there"):
        gather(byte_level(), [str(folder)], 55)
    (folder / "e.txt").write_text("")
    with pytest.raises(ValueError, match=r"e\.txt has 0 tokens"):
        gather(byte_level(), [str(folder)], 30)
