"""What tests of `tessera_kv.hf` share: an interpreter with transformers, and tiny models.

An interpreter without transformers is replaced by one of tests/ops/tools, which fetches 1.7 GB
once; where it cannot be had, the test is skipped.
"""

import copy
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/ops"))
import cases  # noqa: E402

SKIPPED = cases.SKIPPED
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import transformers
except ImportError:
    cases.use_environment("python-hf-5.24")
    import transformers

import torch  # noqa: E402

import support  # noqa: E402, F401  (finds the package)
import tessera_kv.hf as thf  # noqa: E402

transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)  # tiny matrices; threads would wait for each other

LAYERS, WINDOW, VOCABULARY = 4, 40, 128
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}
_TYPES = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def configuration(name, **changes):
    """A tiny model of each architecture."""
    options = {**_COMMON, **changes}
    if name == "qwen2":  # it takes no head_dim
        options["hidden_size"] = 256
        del options["head_dim"]
        return transformers.Qwen2Config(**options)
    if name == "gemma3":
        options = {"sliding_window": WINDOW, "layer_types": _TYPES, "query_pre_attn_scalar": 200,
                   **options, "head_dim": changes.get("head_dim", 256)}
        return transformers.Gemma3TextConfig(**options)
    if name == "gpt_oss":
        options = {"sliding_window": WINDOW, "layer_types": _TYPES, "num_local_experts": 4,
                   "num_experts_per_tok": 4, **options}
        return transformers.GptOssConfig(**options)
    return {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[name](**options)


ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "gpt_oss")


def models(name, dtype=torch.float32, seed=0, std=0.08, **changes):
    """The same random weights twice: with eager attention, and with Tessera's."""
    torch.manual_seed(seed)
    config = configuration(name, **changes)
    made = []
    for implementation in ("eager", "tessera"):
        model = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=implementation, dtype=dtype).eval()
        model.generation_config.eos_token_id = VOCABULARY  # no token: runs have one length
        if made:
            model.load_state_dict(made[0].state_dict())
        else:
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name.endswith((".bias", "sinks")):
                        parameter.normal_()  # begin as zeros, or as what the memory holds
                    elif parameter.ndim > 1:
                        parameter.normal_(std=std)  # logits that differ
        made.append(model)
    return made


def forward(model, ids, cache, mask=None):
    """Logits of new tokens, float32."""
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=True,
                     **{thf.versions.cache_name(model): cache}).logits.float()
