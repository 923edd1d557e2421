"""Lines of a file, a pipe or a list of texts, whatever they hold, encoded as a model reads them.

One line in is one line out. Text is UTF-8, or UTF-16 or UTF-32 with a mark at its start.
"""

import codecs
import io
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tqdm import tqdm

from scripts.book.domains import list_of_texts
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch06_training import UNK
from scripts.ch07_multi30k import source_ids
from scripts.core.models import Trained
from scripts.corpora.pairs import PACKED_FILE, wide_encoding

GROUP_LINES = 512  # decoded together at most
LINE_BYTES = 2**16  # read of a line at most: 256 for each token that the model takes


@dataclass(frozen=True)
class InputLine:
    """A line without its newline: its first `LINE_BYTES` bytes, and its whole size in bytes."""

    start: bytes
    size: int


def utf8_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """What `stream` holds, as it comes, in UTF-8. Raises ValueError if it is a packed file.

    `read1` waits only until there is something, so a person gets an answer to each line; the first
    one tells the encoding.
    """
    chunk = b""
    while len(chunk) < 16 and b"\n" not in chunk and (more := stream.read1(LINE_BYTES)):
        chunk += more
    if PACKED_FILE.match(chunk):
        raise ValueError("the input is a packed file (gzip, zip, …), not text: unpack it first")
    encoding, chunk = wide_encoding(chunk), chunk.removeprefix(codecs.BOM_UTF8)
    decoder = encoding and codecs.getincrementaldecoder(encoding)("replace")
    while chunk:
        yield decoder.decode(chunk).encode() if decoder else chunk
        chunk = stream.read1(LINE_BYTES)
    if decoder:
        yield decoder.decode(b"", final=True).encode()


def line_groups(stream: BinaryIO) -> Iterator[list[InputLine]]:
    """The lines of `stream` in groups: those at hand, at most `GROUP_LINES`, and fewer at first.

    Only a newline ends one: `splitlines` knows ten other ends, and output would no longer match
    input. A last line without a newline counts; an empty one after a last newline doesn't.
    """
    last, most = InputLine(b"", 0), 16
    for chunk in utf8_chunks(stream):
        end, *others = chunk.split(b"\n")
        joined = InputLine((last.start + end)[:LINE_BYTES], last.size + len(end))
        *lines, last = joined, *(InputLine(other, len(other)) for other in others)
        while lines:
            yield lines[:most]
            lines, most = lines[most:], min(2 * most, GROUP_LINES)
    if last.size:
        yield [last]


def text_stream(texts: Iterable[str]) -> BinaryIO:
    """Texts as a stream of bytes, each ended by a newline; bytes that aren't text are kept."""
    texts = list_of_texts("texts", texts)
    return io.BytesIO("".join(f"{text}\n" for text in texts).encode("utf-8", "surrogateescape"))


def encode_line(trained: Trained, line: InputLine, number: int) -> list[int]:
    """A line to at most `MAX_LEN` ids, eos included; stderr is told what was changed."""
    whole = line.size == len(line.start)
    text, _ = codecs.utf_8_decode(line.start, "replace", whole)  # a letter cut in two is left out
    ids = trained.tokenizer.encode(text)
    tokens = len(ids) + 1  # and eos
    pieces = trained.tokenizer.pieces(text) if UNK in ids else []
    unknown = dict.fromkeys("".join(p for p, i in zip(pieces, ids, strict=False) if i == UNK))
    changes = {
        "is not UTF-8 (bad bytes are read as U+FFFD)": not line.start.startswith(text.encode()),
        f"has {line.size:,} bytes (only the first {LINE_BYTES:,} are read)": not whole,
        f"has {tokens:,} tokens (only the first {MAX_LEN} are translated)": tokens > MAX_LEN,
        f"has letters that the model has never met: {' '.join([*unknown][:5])}": unknown,
    }
    if note := " and ".join(change for change, happened in changes.items() if happened):
        tqdm.write(f"note: line {number} {note}", file=sys.stderr)
    return source_ids(text, trained.tokenizer)


def row_groups(trained: Trained, stream: BinaryIO) -> Iterator[list[list[int]]]:
    """The lines of `stream`, encoded, in the groups in which they come."""
    numbers = itertools.count(1)
    for group in line_groups(stream):
        yield [encode_line(trained, line, next(numbers)) for line in group]
