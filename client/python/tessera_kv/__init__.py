"""Tessera's KV cache for inference engines in Python: numpy and torch tensors, used in place.

    import tessera_kv as tk

    worker = tk.attach("unix:/run/tessera/tesserad.sock", name="decode-0", threads=2)
    model = worker.model("smollm2", layers=30, query_heads=9, kv_heads=3, head_dim=64)
    sequence = worker.sequence(model, policy="chunkkv:budget=0.35")
    for attempt in tk.attempts():
        with attempt, worker.step([sequence]) as step:
            for layer in range(30):
                step.attend(layer, query[layer], key[layer], value[layer], out=output[layer])

The package calls libtessera.so, which it brings along. Only tessera_kv.aio starts threads.
"""

from ._library import VERSION as library_version
from .errors import (
    Aborted,
    AlreadyExists,
    Busy,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Error,
    FailedPrecondition,
    Forked,
    Internal,
    InvalidArgument,
    LayoutError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    RetryableError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Unknown,
    Unsupported,
    WrongDevice,
)
from .model import Layer, Model
from .read import Read
from .retry import Attempt, attempts
from .sequence import Description, LaneRows, Needs, Published, Sequence
from .step import Selection, Step
from .worker import DEFAULT_ADDRESS, Event, Match, Tls, Worker, attach

__version__ = "0.1.0"

__all__ = [
    "Aborted", "AlreadyExists", "Attempt", "Busy", "Cancelled", "DEFAULT_ADDRESS", "DataLoss",
    "DeadlineExceeded", "Description", "Error", "Event", "FailedPrecondition", "Forked", "Internal",
    "InvalidArgument", "LaneRows", "Layer", "LayoutError", "Match", "Model", "Needs", "NotFound",
    "OutOfRange", "PermissionDenied", "Published", "Read", "ResourceExhausted", "RetryableError",
    "Selection", "Sequence", "Step", "Tls", "Unauthenticated", "Unavailable", "Unimplemented",
    "Unknown", "Unsupported", "Worker", "WrongDevice", "attach", "attempts", "library_version",
]
