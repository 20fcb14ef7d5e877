"""Which tokens a model reads at once and which of them are scored: the modes of perplexity.

    sliding     (Press et al., arXiv 2012.15832) a window moves by `stride`; in each window only the tokens that no
                earlier window has scored count, so each has at least window − stride tokens before it.
    nonoverlap  (Press et al.) disjoint windows, all of whose tokens count.
    prefix      one window from the start of each document (what YaRN's published curves are).
    tail        (ReRoPE's `eval_loss.py`) the last `tail` tokens of a sample. A sample ends at the same place whatever
                the window, so all windows score the same tokens and differ only in how much stands before them.

BOS: a document's own is its first token, and windows that start later have none. With `bos` it takes the place of
their first token: inside the window's length, read and never scored. Nothing stands before the first token of a
window, so that is never scored: disjoint windows leave it out without `bos`, and with `bos` score every token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MODES = ("sliding", "nonoverlap", "prefix", "tail")
PUBLISHED = ("yarn", "longlora")
TAIL = 1024


@dataclass(frozen=True)
class Window:
    """Tokens `start` … `end`−1 of a document are read, behind `bos` if that is one; `first` … `end`−1 are scored."""

    document: int
    start: int
    end: int
    first: int
    bos: int | None = None

    @property
    def position(self) -> int:
        """Of the first scored token in what is read: so many tokens stand before it."""
        return self.first - self.start + (self.bos is not None)


def plan(
    lengths: Sequence[int],
    window: int,
    stride: int | None = None,
    mode: str = "sliding",
    *,
    tail: int = TAIL,
    sample: int | None = None,
    bos: int | None = None,
    published: str | None = None,
) -> list[Window]:
    """The windows over documents of these lengths.

    Args:
        window: tokens that are read at once, a BOS included.
        stride: of `sliding`: tokens that the window moves; by default half the window.
        tail: of `tail`: tokens that are scored of each sample.
        sample: of `tail`: samples end at every multiple of it; by default the window. Give all windows that are to
            score the same tokens the longest of them.
        bos: the token to put before windows that do not start with a document.
        published: `longlora` scores the whole of every window that `sliding` reads, over and over, leaves the last
            window out and ends before the last token, as LongLoRA's `eval.py` does.

    Raises:
        ValueError: what `check` refuses, a document too short for `prefix` or `tail`, or nothing to score.
    """
    check(window, stride, mode, tail=tail, sample=sample, bos=bos, published=published)
    if mode in ("prefix", "tail") and min(lengths) < (sample or window):
        raise ValueError(
            f"a document has {min(lengths)} tokens, fewer than the length {sample or window}; take a longer one"
        )
    stride = window - (bos is not None) if mode == "nonoverlap" else window // 2 if stride is None else stride
    windows = []
    for document, length in enumerate(lengths):
        if mode == "prefix":
            spans = [(0, window, 1)]
        elif mode == "tail":
            ends = range(sample or window, length + 1, sample or window)
            spans = [(end - window, end, end - tail) for end in ends]
        elif published == "longlora":
            spans = [(start, start + window, start + 1) for start in range(0, length - window, stride)][:-1]
        else:
            spans = list(_slide(length, window, stride))
        for start, end, first in spans:
            behind = bos is not None and start > 0
            windows.append(Window(document, start + behind, end, first, bos if behind else None))
    if not windows:
        raise ValueError(f"documents of {max(lengths)} tokens leave nothing to score at length {window}")
    return windows


def check(
    window: int,
    stride: int | None = None,
    mode: str = "sliding",
    *,
    tail: int = TAIL,
    sample: int | None = None,
    bos: int | None = None,
    published: str | None = None,
) -> None:
    """Refuses, with a ValueError, what no document could be planned by."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; choose one of {', '.join(MODES)}")
    if published not in (None, *PUBLISHED):
        raise ValueError(f"published {published!r} is unknown; choose one of {', '.join(PUBLISHED)}")
    if published == "longlora" and mode != "sliding":
        raise ValueError(f"what LongLoRA published are sliding windows, not mode {mode}")
    if window < 2:
        raise ValueError(f"a window of {window} tokens scores nothing; it needs at least 2")
    if stride is not None and mode != "sliding":
        raise ValueError(f"a stride is of sliding windows; leave it out in mode {mode}")
    longest = window - (bos is not None)
    if stride is not None and not 1 <= stride <= longest:
        raise ValueError(f"stride {stride} must lie between 1 and {longest}: else tokens are never scored")
    if mode == "tail" and not 1 <= tail < window:
        raise ValueError(f"a tail of {tail} tokens must be shorter than the length {window}, and 1 or more")
    if mode == "tail" and sample is not None and sample < window:
        raise ValueError(f"samples of {sample} tokens are shorter than the length {window}")


def _slide(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Start, end and first scored token of every window that scores any."""
    scored = 0
    for start in range(0, length, stride):
        end = min(start + window, length)
        first = max(scored, start + 1)
        if first < end:
            yield start, end, first
        scored = end
        if end == length:
            return
