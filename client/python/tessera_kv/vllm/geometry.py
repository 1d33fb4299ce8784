"""What Tessera must know of the model that vLLM has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import _arrays
from ..model import Layer, Model
from ..weights import fingerprint
from ..worker import Worker

# Classes of vLLM whose frequencies are the same for every length of text.
_STATIC_ROPE = ("RotaryEmbedding", "Llama3RotaryEmbedding")


@dataclass(frozen=True)
class Geometry:
    """A model as `Worker.model` takes it. The worker process sends it to the scheduler's."""

    name: str  # of the weights: engines with the same ones share prompts
    layers: tuple[Layer, ...]
    dtype: str
    rope_theta: float  # 0: the daemon does not know the model's positions
    rope_frequencies: tuple[float, ...]

    def register(self, worker: Worker) -> Model:
        """The model in a daemon."""
        return worker.model(self.name, layers=self.layers, dtype=self.dtype,
                            rope_theta=self.rope_theta, rope_frequencies=self.rope_frequencies)

    @property
    def token_bytes(self) -> int:
        """What keys and values of a token take, uncompressed."""
        item = _arrays.ITEM_BYTES[_arrays.TYPES[self.dtype]]
        return sum(2 * layer.kv_heads * layer.head_dim * item for layer in self.layers)


def geometry_of(config: Any, model: Any, layers: tuple[Layer, ...]) -> Geometry:
    """Reads a loaded model whose attention has these layers."""
    theta, frequencies = _rope(model, layers[0].head_dim)
    kind = config.model_config.hf_text_config.model_type
    dtype = str(config.model_config.dtype)
    return Geometry(f"vllm-{kind}-{fingerprint(model)}", layers,
                    _arrays.TYPE_NAMES[_arrays._TYPES_BY_NAME[dtype]], theta, frequencies)


def _rope(model: Any, head_dim: int) -> tuple[float, tuple[float, ...]]:
    found = set()
    for module in model.modules():
        if hasattr(module, "is_neox_style") and hasattr(module, "rotary_dim"):
            if (type(module).__name__ not in _STATIC_ROPE or not module.is_neox_style
                    or module.rotary_dim != head_dim):
                return 0.0, ()
            frequencies = module._compute_inv_freq(module.base)
            found.add((float(module.base), tuple(frequencies.double().tolist())))
    return found.pop() if len(found) == 1 else (0.0, ())
