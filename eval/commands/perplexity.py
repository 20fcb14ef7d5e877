"""`python -m eval perplexity`."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from eval import data, models, report
from eval.commands import (
    CHECK,
    Check,
    Device,
    DType,
    Lengths,
    ModelName,
    PosEncs,
    Root,
    cells,
    console,
    file_manifest,
    identity,
    progress,
    sha256,
)
from eval.documents import Corpus, Document, gather, join
from eval.perplexity import Perplexity, Score, Window, plan, score
from eval.results import Results
from eval.windows import MODES, PUBLISHED, TAIL, check

BANDS = 96  # of the loss-by-position curve: divides by 6, 8 and 12, as the table may need
SHOWN, KEY = ("model", "text", "mode", "dtype"), ("posenc", "length", "text", "start")
BOS = ("document", "window", "none")
TEXT_HELP = (
    "A file; a folder, each text file of which is a document; a data set, dataset:NAME[:key=value,...], as in "
    "dataset:emozilla/pg19:split=test, dataset:json:data_files=books.jsonl,column=body or dataset:FOLDER of "
    f"save_to_disk (keys: config, split, column, data_files); or one of {', '.join(data.text_names())}. "
    "Repeat for several."
)


@dataclass(frozen=True)
class Options:
    """How texts are read and scored.

    Args:
        mode, stride, tail, published: as in `eval.windows`.
        bos: one of `BOS`: who starts with a BOS, where the tokenizer puts one.
        tokens: how much of each document is read, the same for all lengths, in all modes but `prefix`.
        documents: at most how many of each source.
    """

    mode: str = "sliding"
    stride: int | None = None
    tail: int = TAIL
    bos: str = "document"
    published: str | None = None
    tokens: int = 16384
    documents: int | None = None

    def check(self, lengths: Sequence[int], texts: Sequence[str]) -> None:
        """Refuses, with a ValueError, what can be refused before a model is loaded."""
        if self.bos not in BOS:
            raise ValueError(f"bos {self.bos!r} is unknown; choose one of {', '.join(BOS)}")
        for length in lengths:
            check(length, self.stride, self.mode, tail=self.tail, published=self.published)
        for source in texts:
            data.check_source(source, self.documents)

    def gather(self, tokenizer: Any, lengths: Sequence[int], texts: Sequence[str]) -> tuple[Corpus, int | None]:
        """The documents, and the BOS that every window is to have."""
        start, together = self.bos != "none", self.published == "longlora"
        special = models.bos_of(tokenizer)
        if self.bos == "window" and special is None:
            raise ValueError("the tokenizer puts no BOS before a text: choose bos document or none")
        corpus = gather(
            tokenizer, texts, 2 if together else max(lengths), count=self.documents, start=start,
            tokens=None if self.mode == "prefix" else self.tokens, whole=self.mode in ("prefix", "tail"),
        )  # fmt: skip
        if together:
            joined = join(list(corpus.documents.values()), start and special is not None)
            corpus.documents = {"+".join(dict.fromkeys(texts)): joined}
        return corpus, special if self.bos == "window" else None


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = (models.NONE,),
    lengths: Lengths = ("2048,4096",),
    text: Annotated[list[str], typer.Option(help=TEXT_HELP)] = ("alice",),
    documents: Annotated[
        int | None,
        typer.Option(help="How many of each --text, from the first that is long enough. A data set needs it.", min=1),
    ] = None,
    mode: Annotated[str, typer.Option(help=f"One of {', '.join(MODES)}.")] = "sliding",
    stride: Annotated[int | None, typer.Option(help="Of sliding windows. Default: half the length.")] = None,
    tail: Annotated[int, typer.Option(help="Tokens scored at the end of each sample in tail mode.")] = TAIL,
    bos: Annotated[
        str,
        typer.Option(
            help="BOS, where the tokenizer puts one: at the start of each document, in place of each window's "
            "first token, or none. It is read and never scored."
        ),
    ] = "document",
    published: Annotated[
        str | None,
        typer.Option(
            help=f"A figure as {' or '.join(PUBLISHED)} computed it: the mean over windows, or over all of "
            "every window of the joined texts (with --stride 256). Not comparable with others."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="How much of each document is read, but in prefix mode.", min=2)] = 16384,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    check: Check = CHECK,
    results: Root = "results",
) -> None:
    """Perplexity, bits per byte and loss by position, within the trained length and beyond it.

    Examples:

    python -m eval perplexity --posenc none --posenc yarn:factor=2 --lengths 4096,16384 --mode prefix

    python -m eval perplexity --posenc yarn:factor=2 --lengths 2048,8192,16384 --mode tail --text emma --tokens 65536
    """  # fmt: skip
    asked = models.numbers(lengths)
    options = Options(mode, stride, tail, bos, published, tokens, documents)
    options.check(asked, text)
    loaded, tokenizer = models.load(model, dtype, device)
    found = run(loaded, tokenizer, model, posenc, asked, text, batch_size=batch_size, root=results, **asdict(options))
    file_manifest(found, loaded, tokenizer, posenc, asked, check)


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    lengths: Sequence[int],
    texts: Sequence[str],
    *,
    batch_size: int = 1,
    root: str = "results",
    **options: Any,
) -> Results:
    """Perplexity of texts under several encodings and context lengths.

    Args:
        model_name: as results are filed.
        lengths: tokens of a window, a BOS included. In `tail` mode samples are as long as the longest of them.
        texts: sources as `eval.data.documents` takes them.
        options: fields of `Options`.
    """
    chosen = Options(**options)
    chosen.check(lengths, texts)
    names, trained = models.full_names(model, posencs, lengths), models.trained_length(model)
    corpus, bos = chosen.gather(tokenizer, lengths, texts)
    parameters = {
        **identity(model, model_name, tokenizer),
        "text": "+".join(dict.fromkeys(texts)),
        "documents": {name: _describe(document) for name, document in corpus.documents.items()},
        "mode": chosen.mode,
        "stride": chosen.stride,
        "tail": chosen.tail if chosen.mode == "tail" else None,
        "sample": max(lengths) if chosen.mode == "tail" else None,
        "bos": chosen.bos,
        "window_bos": bos,
        "published": chosen.published,
    }
    plans = {length: _plan(parameters, length) for length in lengths}
    results = Results(root, "perplexity", parameters, SHOWN, KEY)
    with progress() as bar:
        for name in names:
            with models.applied(model, name):
                for length, windows in plans.items():
                    _score_windows(results, bar, model, corpus.documents, (name, length), windows, batch_size)
    results.complete()
    scores, left_out = scores_of(results), {"skipped": corpus.skipped, "repeated": corpus.repeated}
    results.write("scores.json", {"trained_length": trained, "scores": scores, **left_out})
    _show(results, [s for s in scores if s["posenc"] in names and s["length"] in lengths], trained, corpus)
    return results


def scores_of(results: Results) -> list[dict[str, Any]]:
    """One dictionary per encoding and length of a folder, where all windows are scored.

    `perplexity` and `loss` (nats per token) are as `published` has them where that is asked for; `bits_per_byte` never
    is, and is None where the tokenizer does not give the text back.
    """
    scores = []
    for posenc, length in cells(results):
        samples = results.select(posenc=posenc, length=length)
        if len(samples) < len(_plan(results.config, length)):
            continue
        windows = [Window(0, *(sample[name] for name in ("start", "end", "first", "bos"))) for sample in samples]
        losses = [torch.tensor(sample["losses"]) for sample in samples]
        pairs = [Score(*pair) for pair in zip(windows, losses, strict=True)]
        found = Perplexity(pairs, results.config["published"])
        sizes = [sample["bytes"] for sample in samples]
        scores.append({
            "posenc": posenc, "length": length, "perplexity": found.perplexity, "loss": found.loss,
            "bits_per_byte": None if None in sizes else found.bits_per_byte(sum(sizes)),
            "scored_tokens": found.scored, "scored_bytes": None if None in sizes else sum(sizes),
            "windows": len(samples), "seconds": round(sum(sample["seconds"] for sample in samples), 1),
            "by_position": bands(found, length),
        })  # fmt: skip
    return scores


def bands(found: Perplexity, length: int) -> list[dict[str, Any]]:
    """The loss-by-position curve over a length."""
    edges = sorted({length * band // BANDS for band in range(BANDS + 1)})
    return [asdict(band) for band in found.by_position(edges)]


def _describe(document: Document) -> dict[str, Any]:
    return {"tokens": len(document.ids), "sha256": sha256(document.ids.numpy().tobytes())}


def _plan(config: dict[str, Any], length: int) -> list[Window]:
    lengths = [document["tokens"] for document in config["documents"].values()]
    return plan(lengths, length, config["stride"], config["mode"], tail=config["tail"] or TAIL,
                sample=config["sample"], bos=config["window_bos"], published=config["published"])  # fmt: skip


def _score_windows(results: Results, bar: Progress, model: Any, documents: dict[str, Document],
                   cell: tuple[str, int], windows: list[Window], batch_size: int) -> None:  # fmt: skip
    (posenc, length), texts = cell, list(documents)
    place = {"posenc": posenc, "length": length}
    missing = [w for w in windows if results.lacks(**place, text=texts[w.document], start=w.start)]
    task = bar.add_task(f"{posenc} at {length:,}", total=len(windows), completed=len(windows) - len(missing))
    began = time.perf_counter()
    for scored in score(model, [document.ids for document in documents.values()], missing, batch_size):
        window = asdict(scored.window)
        name = texts[window.pop("document")]
        sizes = documents[name][scored.window.first : scored.window.end].sizes
        sample = {**place, "text": name, **window, "bytes": None if sizes is None else int(sizes.sum())}
        sample["seconds"] = round(time.perf_counter() - began, 2)
        results.add({**sample, "losses": [round(loss, 5) for loss in scored.losses.tolist()]})
        bar.advance(task)
        began = time.perf_counter()


def _show(results: Results, scores: list[dict[str, Any]], trained: int | None, corpus: Corpus) -> None:
    for found in scores:
        found["text"] = f"{found['perplexity']:.2f}"
    counts = ", ".join(f"{count:,}" for count in sorted({found["scored_tokens"] for found in scores}))
    mode, published = results.config["mode"], results.config["published"]
    kind = f"{mode}, as {published} published it" if published else mode
    title = f"Perplexity ({kind}) of {results.config['text']}, {counts} tokens scored"
    console.print(report.length_table(title, scores, "perplexity", trained, "lower"))
    if None in [found["bits_per_byte"] for found in scores]:
        console.print("No bits per byte: what the tokenizer decodes is not the text")
    else:
        sizes = [{**found, "text": f"{found['bits_per_byte']:.4f}"} for found in scores]
        console.print(report.length_table("Bits per byte", sizes, "bits_per_byte", trained, "lower"))
    path, longest = results.folder / "plot.png", max(found["length"] for found in scores)
    if mode == "prefix":
        curves = {found["posenc"]: found["by_position"] for found in scores if found["length"] == longest}
        console.print(report.band_table("Loss by position, nats per token", curves, trained))
        report.plot_bands(path, curves, trained)
    else:
        report.plot_lengths(path, scores, "perplexity", trained)
    if corpus.skipped:
        console.print(f"{corpus.skipped} rows of data sets were too short and skipped")
    if corpus.repeated:
        console.print(f"Taken once, though given twice: {', '.join(corpus.repeated)}", soft_wrap=True)
    console.print(f"Samples, scores and plot.png in {results.folder}", soft_wrap=True, markup=False)
