"""Reads tests/layers.txt, the list of layers, and holds the rules that are not about layers."""

import pathlib

# Everything at the top of the tree that is a folder.
TOP = ("client", "daemon", "deploy", "helm", "kernels", "proto", "tests")
# Their folders each belong to a layer.
LAYERED = ("client", "daemon", "kernels", "proto")
# Public headers are included by their installed names: "tessera/worker.h".
PUBLIC = "client/include/"

LIST = pathlib.Path(__file__).parents[2] / "layers.txt"


class Malformed(Exception):
    pass


class Layers:
    """may_include: layer -> what it may include; order: layer -> its parts, lowest first."""

    def __init__(self, text):
        self.may_include = {}
        self.order = {}
        for number, line in enumerate(text.splitlines(), 1):
            head, colon, rest = line.split("#")[0].partition(":")
            words = head.split()
            if not words and not colon:
                continue
            if not colon or len(words) not in (1, 2) or len(words) == 2 and words[0] != "order":
                raise Malformed(f"layers.txt:{number}: expected \"FOLDER: NAME...\" or "
                                f"\"order FOLDER: PART...\": {line}")
            if len(words) == 2:
                self.order[words[1]] = rest.split()
            else:
                self.may_include[words[0]] = self._expand(number, rest.split())
        for layer in self.order:
            if layer not in self.may_include:
                raise Malformed(f"layers.txt: \"order {layer}\" names no layer")

    def _expand(self, number, names):
        expanded = []
        for name in names:
            bare = name.removeprefix("+")
            if bare not in self.may_include:
                raise Malformed(f"layers.txt:{number}: \"{bare}\" is not a layer above this line")
            expanded.append(bare)
            if name.startswith("+"):
                expanded.extend(self.may_include[bare])
        return tuple(dict.fromkeys(expanded))

    def layer_of(self, folder):
        """The layer that a folder belongs to, or None where tests/layers.txt does not place it."""
        parts = folder.split("/")
        for length in range(len(parts), 0, -1):
            layer = "/".join(parts[:length])
            if layer in self.may_include:
                placed = length == len(parts) or self.part_of(folder, layer) is not None
                return layer if placed or self._is_free(layer) else None
        return None

    def _is_free(self, layer):
        """Whether sub-folders need no place of their own: not at the top, and without order."""
        return "/" in layer and layer not in self.order

    def part_of(self, folder, layer):
        """The index of a folder among its layer's parts, or None where it has no place."""
        inner = folder[len(layer) + 1:] or "."
        parts = inner.split("/")
        for length in range(len(parts), 0, -1):
            part = "/".join(parts[:length])
            if part in self.order.get(layer, ()):
                return self.order[layer].index(part)
        return None


def load(path=LIST):
    return Layers(path.read_text())


# Libraries declared elsewhere than in their layer's folder.
LIBRARY_HOME = {"tessera_proto": "proto/tessera"}

# Other people's headers that only some folders may include (tests may include any). A header that
# no row matches is free for all.
ONLY_IN = (
    ("gtest/", ()),
    ("gmock/", ()),
    ("benchmark/", ()),
    ("absl/", ("daemon", "client")),
    ("grpcpp/", ("daemon/serving", "client")),
    ("grpc/", ("daemon/serving", "client")),
    ("google/protobuf/", ("daemon/config", "daemon/serving", "client")),
    ("prometheus/", ("daemon/metrics",)),
    ("spdlog/", ("daemon/base",)),
    ("Eigen/", ("kernels/strategy",)),
    ("xxhash.h", ("daemon/cache",)),
    ("zlib.h", ("daemon/http",)),
    ("seccomp.h", ("daemon/lifecycle",)),
    ("zmq.h", ("daemon/cluster",)),
    ("msgpack.hpp", ("daemon/cluster",)),
)
# Other people's headers that public headers may include, beside the standard library's: users must
# not need more.
PUBLIC_MAY_INCLUDE = ("absl/status/",)
# What a quoted include may start with that is not in this tree.
THIRD_PARTY = tuple(prefix for prefix, _ in ONLY_IN) + ("hiredis/", "fmt/")
