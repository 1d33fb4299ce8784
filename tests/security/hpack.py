"""HPACK (RFC 7541): encodes headers as plain literals, and decodes what a server answers."""

STATIC = [tuple(line.split("|")) for line in """:authority|
:method|GET
:method|POST
:path|/
:path|/index.html
:scheme|http
:scheme|https
:status|200
:status|204
:status|206
:status|304
:status|400
:status|404
:status|500
accept-charset|
accept-encoding|gzip, deflate
accept-language|
accept-ranges|
accept|
access-control-allow-origin|
age|
allow|
authorization|
cache-control|
content-disposition|
content-encoding|
content-language|
content-length|
content-location|
content-range|
content-type|
cookie|
date|
etag|
expect|
expires|
from|
host|
if-match|
if-modified-since|
if-none-match|
if-range|
if-unmodified-since|
last-modified|
link|
location|
max-forwards|
proxy-authenticate|
proxy-authorization|
range|
referer|
refresh|
retry-after|
server|
set-cookie|
strict-transport-security|
transfer-encoding|
user-agent|
vary|
via|
www-authenticate|""".splitlines()]

# The Huffman code is canonical: the symbols of each length, in order, give all codes. Longer codes
# belong to bytes that no header of a gRPC answer contains.
SYMBOLS = {5: "012aceiost", 6: " %-./3456789=A_bdfghlmnpru", 7: ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
           8: "&*,;XZ", 10: "!\"()?", 11: "'+|", 12: "#>", 13: "\0$@[]~", 14: "^}", 15: "<`{"}


def make_codes():
    """(bits, code) -> symbol."""
    codes = {}
    code = length = 0
    for bits, symbols in SYMBOLS.items():
        code <<= bits - length
        length = bits
        for symbol in symbols:
            codes[bits, code] = symbol
            code += 1
    return codes


CODES = make_codes()


def decode_huffman(data):
    text = ""
    code = bits = 0
    for byte in data:
        for shift in range(7, -1, -1):
            code = code << 1 | byte >> shift & 1
            bits += 1
            if (bits, code) in CODES:
                text += CODES[bits, code]
                code = bits = 0
    if bits > 7 or code != (1 << bits) - 1:
        raise ValueError(f"Huffman code that is not known: {data.hex()}")
    return text


def encode_integer(value, bits, first):
    """An integer with a prefix of `bits` bits; `first` holds the bits before them."""
    limit = (1 << bits) - 1
    if value < limit:
        return bytes([first | value])
    out = bytearray([first | limit])
    value -= limit
    while value >= 128:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(headers):
    """Literals that enter no table."""
    out = bytearray()
    for name, value in headers:
        out += b"\0"
        for word in name, value:
            word = word if isinstance(word, bytes) else word.encode()
            out += encode_integer(len(word), 7, 0) + word
    return bytes(out)


class Decoder:
    """Decodes the header blocks of one connection, in order."""

    def __init__(self):
        self.table = []  # newest first
        self.limit = 4096
        self.data = b""
        self.at = 0

    def integer(self, bits):
        mask = (1 << bits) - 1
        value = self.data[self.at] & mask
        self.at += 1
        if value < mask:
            return value
        shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value += (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def string(self):
        is_huffman = self.data[self.at] & 0x80
        size = self.integer(7)
        raw = self.data[self.at:self.at + size]
        self.at += size
        return decode_huffman(raw) if is_huffman else raw.decode("latin-1")

    def entry(self, index):
        return (STATIC + self.table)[index - 1]

    def keep(self, pair):
        self.table.insert(0, pair)
        while sum(len(name) + len(value) + 32 for name, value in self.table) > self.limit:
            self.table.pop()

    def decode(self, data):
        """The headers of a block, as (name, value)."""
        self.data = bytes(data)
        self.at = 0
        headers = []
        while self.at < len(self.data):
            byte = self.data[self.at]
            if byte & 0x80:
                headers.append(self.entry(self.integer(7)))
            elif byte & 0xE0 == 0x20:
                self.limit = self.integer(5)
            else:
                index = self.integer(6 if byte & 0x40 else 4)
                name = self.entry(index)[0] if index else self.string()
                headers.append((name, self.string()))
                if byte & 0x40:
                    self.keep(headers[-1])
        return headers
