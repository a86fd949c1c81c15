"""PNG files assembled chunk by chunk, for headers and sizes that image libraries do not write."""

import struct
import zlib


def encode_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def encode_png(
    width: int, height: int, *chunks: bytes, bits: int = 8, color: int = 2, rows: bytes | None = None
) -> bytes:
    """Encode a PNG with ``chunks`` before its pixel data, which is missing without ``rows``."""
    header = encode_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    pixels = encode_chunk(b"IDAT", zlib.compress(rows)) if rows is not None else b""
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + encode_chunk(b"IEND", b"")
