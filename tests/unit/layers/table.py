"""Who may include whom: the layers, lowest first.

A folder may include itself and what its row names; nothing else. Folders below a row's folder
belong to that row. The link lists of CMake are held to the same table.
"""

# Everything at the top of the tree that is a folder.
TOP = ("client", "daemon", "deploy", "helm", "kernels", "proto", "tests")
# Their folders each need a row.
LAYERED = ("client", "daemon", "kernels", "proto")

KERNELS = ("kernels", "kernels/format", "kernels/reference", "kernels/cpu", "kernels/cuda",
           "kernels/dispatch", "kernels/strategy", "kernels/tokens")
BASE = ("daemon/base", "daemon/platform")
BELOW_DEVICE = KERNELS + ("proto/shm",) + BASE
BELOW_POOL = BELOW_DEVICE + ("daemon/config", "daemon/metrics", "daemon/device")
BELOW_POLICIES = BELOW_POOL + ("daemon/pool", "daemon/tiers", "daemon/cache")
BELOW_SERVING = BELOW_POLICIES + ("daemon/policies", "daemon/compaction", "daemon/residency")
BELOW_CLIENT = KERNELS + ("proto/shm", "proto/tessera") + BASE

MAY_INCLUDE = {
    "kernels/format": (),
    "kernels/reference": ("kernels/format",),
    "kernels/cpu": ("kernels/format",),
    "kernels/cuda": ("kernels/format",),
    "kernels/dispatch": ("kernels/format", "kernels/reference", "kernels/cpu", "kernels/cuda"),
    "kernels/strategy": ("kernels/format",),
    "kernels/tokens": ("kernels/format",),
    "kernels": KERNELS,
    "proto/shm": ("kernels/format",),
    "proto/tessera": (),
    "proto": (),
    "daemon/base": (),
    "daemon/platform": ("daemon/base",),
    "daemon/config": BASE + ("proto/tessera",),
    "daemon/metrics": BASE,
    "daemon/device": BELOW_DEVICE,
    "daemon/pool": BELOW_POOL,
    "daemon/tiers": BELOW_POOL,
    "daemon/cache": BELOW_POOL + ("daemon/pool", "daemon/tiers"),
    "daemon/policies": BELOW_POLICIES,
    "daemon/compaction": BELOW_POLICIES + ("daemon/policies",),
    "daemon/residency": BELOW_POLICIES + ("daemon/policies", "daemon/compaction"),
    "daemon/serving": BELOW_SERVING + ("proto/tessera",),
    "daemon": BELOW_SERVING + ("proto/tessera", "daemon/serving"),
    "client": BELOW_CLIENT,
    "client/cli": BELOW_CLIENT + ("client", "client/checkpoint", "client/worker"),
    "client/examples": BELOW_CLIENT + ("client",),
    "client/checkpoint": BELOW_CLIENT + ("client",),
    "client/worker": BELOW_CLIENT + ("client", "client/checkpoint"),
    "client/python": BELOW_CLIENT + ("client",),
}

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
)
# What a quoted include may start with that is not in this tree.
THIRD_PARTY = tuple(prefix for prefix, _ in ONLY_IN) + ("hiredis/", "fmt/", "civetweb")
