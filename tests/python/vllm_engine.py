"""An engine of vLLM in a process of its own, for vllm_test.py: JSON lines in, JSON lines out.

    vllm_engine.py OPTIONS     JSON: "engine" for vllm.LLM, "tessera": kv_transfer_config or null
"""

import json
import os
import sys

given = json.loads(sys.argv[1])
os.environ["TESSERA_VLLM_CPU"] = "0" if given["tessera"] is None else "1"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process starts sooner
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# What vLLM prints goes to standard error: standard output is for answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

torch.set_num_threads(1)  # tiny matrices; threads would wait for each other


def counters(engine):
    return {metric.name: metric.value for metric in engine.get_metrics()
            if metric.name in ("vllm:num_preemptions", "vllm:external_prefix_cache_hits")}


def best(output):
    """Of each token: the likeliest ones with the logarithms of their probabilities."""
    return [[[token, one.logprob] for token, one in each.items()]
            for each in output.logprobs or ()]


def main():
    options = {"enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": False,
               **given["engine"]}
    if given["tessera"] is not None:
        options["kv_transfer_config"] = given["tessera"]
    engine = LLM(**options)
    cache = engine.llm_engine.vllm_config.cache_config
    spec = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    print(json.dumps({"blocks": cache.num_gpu_blocks,
                      "pool_bytes": sum(tensor.size for tensor in spec.kv_cache_tensors)}),
          file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=call["tokens"], ignore_eos=True,
                                  detokenize=False, logprobs=call["best"] or None)
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in call["prompts"]], sampling,
                                  use_tqdm=False)
        print(json.dumps({"tokens": [list(each.outputs[0].token_ids) for each in outputs],
                          "best": [best(each.outputs[0]) for each in outputs],
                          **counters(engine)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
