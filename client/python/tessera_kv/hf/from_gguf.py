"""Loads a GGUF file of a llama model into transformers, with weights of one float type.

transformers loads GGUF files, too, but newer versions keep the weights packed. vLLM reads folders:

    python -m tessera_kv.hf.from_gguf MODEL.gguf FOLDER
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ..errors import Unsupported

# Where deploy/models/fetch puts it.
SMOLLM2 = pathlib.Path.home() / ".cache/tessera/models/smollm2/model.gguf"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _name(name: str) -> str | None:
    """A weight's name in transformers."""
    parts = name.split(".")
    if parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    return f"{_TOP[parts[0]]}.{parts[1]}" if parts[0] in _TOP else None


def load(path: str | pathlib.Path, *, dtype: Any = torch.float32,
         attn_implementation: str = "tessera") -> tuple[Any, Any]:
    """The model and its tokenizer. Unsupported for other architectures than llama."""
    import gguf

    path = pathlib.Path(path)
    reader = gguf.GGUFReader(path)

    def value(key: str, otherwise: Any = None) -> Any:
        field = reader.get_field(key)
        return otherwise if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture != "llama":
        raise Unsupported(f"{path} has the architecture {architecture}; served is llama")
    weights = {}
    heads = value("llama.attention.head_count")
    kv_heads = value("llama.attention.head_count_kv", heads)
    for tensor in reader.tensors:
        name = _name(tensor.name)
        if name is None:
            continue
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        count = heads if name.endswith("q_proj.weight") else (
            kv_heads if name.endswith("k_proj.weight") else 0)
        if count:  # pairs of channels lie side by side in GGUF, halves apart in transformers
            size = rows.shape[0] // count // 2
            rows = rows.reshape(count, size, 2, -1).swapaxes(1, 2).reshape(rows.shape)
        weights[name] = torch.tensor(rows).to(dtype)
    theta = value("llama.rope.freq_base", 10000.0)
    config = LlamaConfig(
        vocab_size=len(weights["model.embed_tokens.weight"]),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"), num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        # Before 5.0, and since.
        rope_theta=theta, rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=attn_implementation,
                                          dtype=dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise Unsupported(f"{path}: missing {missing}, unexpected {unexpected}")
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def convert(path: str | pathlib.Path, folder: str | pathlib.Path) -> None:
    """Writes the model and its tokenizer to a new folder, in bfloat16."""
    folder = pathlib.Path(folder).absolute()
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name a new folder")
    model, tokenizer = load(path, dtype=torch.bfloat16, attn_implementation="eager")
    # In the same file system, so that the folder appears with everything in it.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        made = pathlib.Path(work) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        os.replace(made, folder)


def main() -> None:
    """Converts a file into a folder."""
    parser = argparse.ArgumentParser(prog="python -m tessera_kv.hf.from_gguf")
    parser.add_argument("model", help="a GGUF file of a llama model")
    parser.add_argument("folder", help="that does not exist yet")
    options = parser.parse_args()
    convert(options.model, options.folder)


if __name__ == "__main__":
    main()
