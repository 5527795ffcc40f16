"""What a file is by its first bytes, whatever its name says: so that no form is read as another."""

import re
import zlib

HEAD_BYTES = 1 << 12

NPY = b"\x93NUMPY"

_UNPACK = "unpack it first"
_SAVE_IDS = "save its ids as one array with numpy.save for ppl_eval.data.token_files"
# The first bytes of a form, its name, and what to do. All of them are long enough that no stream of ids and
# no text begins with them by accident.
_MAGICS = (
    (b"\x28\xb5\x2f\xfd", "zstd data", f"{_UNPACK} (`zstd -d`), or give text a name that ends in .zst"),
    (b"\xfd7zXZ\0", "xz data", f"{_UNPACK} (`xz -d`)"),
    (b"PK\3\4", "a zip archive (.npz, torch.save)", f"unpack it, or {_SAVE_IDS}"),
    (
        b"PAR1",
        "a Parquet file",
        f"give a table of texts a name that ends in .parquet, for text_files; {_SAVE_IDS}",
    ),
    (
        b"ARROW1\0\0",
        "an Arrow file",
        f"give a table of texts a name that ends in .arrow, for text_files; {_SAVE_IDS}",
    ),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _SAVE_IDS),
    (b"MMIDIDX\0\0", "a Megatron index", "give the .bin beside it; its index is found by its name"),
    (
        b"TNTIDX\0\0",
        "an index of fairseq or of an old Megatron",
        "build the data again with Megatron's tools/preprocess_data.py",
    ),
)
_UTF = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")
# A safetensors file begins with the length of its JSON header.
_SAFETENSORS = re.compile(rb"(?s).{5}\0\0\0\{\s*\"")
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
_LEAST_TEXT_BYTES = 32
_LEAST_DISTINCT_BYTES = 8


def foreign_format(head: bytes) -> tuple[str, str] | None:
    """Return a form that holds neither plain text nor bare ids, and what to do about it; None if it is none.

    Args:
        head: the first ``HEAD_BYTES`` of the file, or all of it where it is shorter.
    """
    for magic, name, advice in _MAGICS:
        if head.startswith(magic):
            return name, advice
    if _is_gzip(head):
        return "gzip data", f"{_UNPACK} (`gzip -d`), or give text a name that ends in .gz"
    if _BZIP2.match(head):
        return "bzip2 data", f"{_UNPACK} (`bzip2 -d`)"
    if _SAFETENSORS.match(head):
        return "a safetensors file", _SAVE_IDS
    return None


def utf_name(head: bytes) -> str | None:
    """Return the name of the encoding where text is UTF-16 or UTF-32; None where nothing says so.

    Without a byte order mark, text in UTF-16 has NUL in most even or in most odd places, which no text in
    UTF-8 has.
    """
    for mark, name in _UTF:
        if head.startswith(mark):
            return name
    pairs = len(head) // 2
    for at, other in ((0, 1), (1, 0)):
        if head[at : 2 * pairs : 2].count(0) > pairs / 2 and not head[other : 2 * pairs : 2].count(0):
            return "UTF-16BE" if at == 0 else "UTF-16LE"
    return None


def looks_like_text(head: bytes) -> bool:
    """Return whether a file is text: UTF-8 without control characters, which ids are not by accident."""
    if len(head) < _LEAST_TEXT_BYTES or len(set(head)) < _LEAST_DISTINCT_BYTES or _CONTROL.search(head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # The last character may be cut off.
        return error.reason == "unexpected end of data" and error.start > len(head) - 4
    return True


def _is_gzip(head: bytes) -> bool:
    # Three bytes are few: two ids of a token file may be the same. They do not unpack, though.
    if not head.startswith(b"\x1f\x8b\x08"):
        return False
    try:
        zlib.decompressobj(wbits=31).decompress(head)
    except zlib.error:
        return False
    return True
