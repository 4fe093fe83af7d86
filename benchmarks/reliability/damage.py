"""Damage files as disks, transfers, editors and programs do, from a seed."""

import gzip
import random
from collections.abc import Callable

NUMBERS = (
    *("nan", "inf", "-inf", "NaN", "1e400", "1e30", "-1e30", "1e-400", "0", "-0", "-1", "1", "9" * 25, "9" * 5000),
    *(
        "0x10",
        "1_000",
        "1e5",
        "1.5",
        "",
        "?",
        ".",
        "null",
        "true",
        "''",
        "[]",
        "{}",
        "٣",
        "２",
        "½",
        "1,5",
        "+7",
        "00012",
    ),
)
WORDS = (
    "\t",
    "  ",
    ",",
    ";",
    ":",
    '"',
    "'",
    "#",
    ">",
    "|",
    "\x00",
    "\x1b[31m",
    "\u202e",
    "é",
    "\ufeff",
    "\r",
    "-",
    "X" * 3000,
)


def one_of(draw: random.Random, data: bytes, chosen: bytes) -> int:
    """Choose where one of some bytes stands; anywhere if there is none."""
    places = [place for place, byte in enumerate(data) if byte in chosen] if len(data) < 200_000 else []
    return draw.choice(places) if places else draw.randrange(len(data))


def flip(draw: random.Random, data: bytes) -> bytes:
    """Flip one bit."""
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def scatter(draw: random.Random, data: bytes) -> bytes:
    """Replace some bytes by any others."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 2, 5, 20))):
        changed[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(changed)


def truncate(draw: random.Random, data: bytes) -> bytes:
    """Cut the end off."""
    return data[: draw.choice((draw.randrange(len(data)), len(data) - 1 - draw.randrange(min(len(data), 40))))]


def cut_line(draw: random.Random, data: bytes) -> bytes:
    """Cut the end off behind a line."""
    return data[: one_of(draw, data, b"\n") + 1]


def behead(draw: random.Random, data: bytes) -> bytes:
    """Cut the beginning off."""
    return data[draw.randrange(len(data)) :]


def blank(draw: random.Random, data: bytes) -> bytes:
    """Zero a block, as a file system does that lost it."""
    start, size = draw.randrange(len(data)), draw.choice((1, 8, 64, 512, 4096))
    return data[:start] + bytes(len(data[start : start + size])) + data[start + size :]


def drop(draw: random.Random, data: bytes) -> bytes:
    """Leave a piece out."""
    start, size = draw.randrange(len(data)), draw.choice((1, 1, 2, 8, 64, 512))
    return data[:start] + data[start + size :]


def repeat(draw: random.Random, data: bytes) -> bytes:
    """Write a piece twice, or many times."""
    start, size = draw.randrange(len(data)), draw.choice((1, 2, 8, 64, 512))
    return data[:start] + data[start : start + size] * draw.choice((1, 1, 1, 50)) + data[start:]


def exchange(draw: random.Random, data: bytes) -> bytes:
    """Exchange two blocks."""
    size = draw.choice((1, 4, 64, 512))
    a, b = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def append(draw: random.Random, data: bytes) -> bytes:
    """Add something behind the end: noise, blanks, the file once more."""
    return data + draw.choice((draw.randbytes(20), b"\n\n", bytes(100), data, data[: len(data) // 2]))


# Of text


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True) or [b""]


def double_line(draw: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    place = draw.randrange(len(lines))
    return b"".join([*lines[:place], lines[place], *lines[place:]])


def drop_line(draw: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def swap_lines(draw: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


def token(draw: random.Random, data: bytes, inside: bytes) -> tuple[int, int]:
    """Choose a run of some bytes: where it begins, and where it ends."""
    start = end = one_of(draw, data, inside)
    while start and data[start - 1] in inside:
        start -= 1
    while end < len(data) and data[end] in inside:
        end += 1
    return start, end


def number(draw: random.Random, data: bytes) -> bytes:
    """Put another number, or none, in a number's place."""
    start, end = token(draw, data, b"0123456789.-+")
    return data[:start] + draw.choice(NUMBERS).encode() + data[end:]


def word(draw: random.Random, data: bytes) -> bytes:
    """Put another word of the file, or something odd, in a word's place."""
    inside = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
    start, end = token(draw, data, inside)
    a, b = token(draw, data, inside)
    return data[:start] + draw.choice((data[a:b], draw.choice(WORDS).encode(), b"")) + data[end:]


def swap_columns(draw: random.Random, data: bytes) -> bytes:
    """Exchange two columns of a line, or of all lines that have as many."""
    lines = lines_of(data)
    place = draw.randrange(len(lines))
    between = next((mark for mark in (b"\t", b",") if mark in lines[place]), b" ")
    count = len(lines[place].rstrip(b"\n").split(between))
    a, b = draw.randrange(count), draw.randrange(count)
    everywhere = draw.random() < 0.5
    for at, line in enumerate(lines):
        cells = line.rstrip(b"\n").split(between)
        if (everywhere or at == place) and len(cells) == count:
            cells[a], cells[b] = cells[b], cells[a]
            lines[at] = between.join(cells) + (b"\n" if line.endswith(b"\n") else b"")
    return b"".join(lines)


def encode(draw: random.Random, data: bytes) -> bytes:
    """Write the text in another encoding, or with other ends of lines."""
    text = data.decode("latin-1")
    kind = draw.choice(("utf-16", "utf-32", "bom", "crlf", "cr", "latin", "upper", "lower", "url"))
    if kind in ("utf-16", "utf-32"):
        return text.encode(kind)
    if kind == "bom":
        return b"\xef\xbb\xbf" + data
    if kind in ("crlf", "cr"):
        return data.replace(b"\n", b"\r\n" if kind == "crlf" else b"\r")
    if kind == "latin":
        place = draw.randrange(len(data))
        return data[:place] + b"\xe9\xdf" + data[place:]
    return data.upper() if kind == "upper" else data.lower() if kind == "lower" else data.replace(b" ", b"%20")


def insert(draw: random.Random, data: bytes) -> bytes:
    """Put something odd anywhere."""
    place = draw.randrange(len(data))
    return data[:place] + draw.choice((*WORDS, "\n", "\n\n", "[" * 2000, "{", "}", "(", ")")).encode() + data[place:]


Mutation = Callable[[random.Random, bytes], bytes]
BYTES: tuple[Mutation, ...] = (flip, flip, flip, scatter, truncate, behead, blank, drop, repeat, exchange, append)
TEXT: tuple[Mutation, ...] = (
    *(flip, scatter, truncate, truncate, cut_line, behead, blank, drop, repeat, append, double_line, drop_line),
    *(swap_lines, number, number, number, number, word, word, swap_columns, encode, insert, insert),
)


def damage(draw: random.Random, data: bytes, text: bool, packed: bool) -> tuple[bytes, list[str]]:
    """Damage a file; say how.  packed: sometimes compress it, before or after, as users do."""
    how = draw.random() if packed else 1.0
    if how < 0.08:  # the archive is damaged, not the text
        mutation = draw.choice(BYTES)
        return mutation(draw, gzip.compress(data, 1, mtime=0)), ["gz", mutation.__name__]
    said = []
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        mutation = draw.choice(TEXT if text else BYTES)
        said.append(mutation.__name__)
        data = mutation(draw, data) if data else data
    if how < 0.11:
        return gzip.compress(data, 1, mtime=0), [*said, "then gz"]
    return data, said
