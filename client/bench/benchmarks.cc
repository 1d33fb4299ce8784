// The list of benchmarks and the text of their help pages.

#include "client/bench/bench.h"

namespace tessera::cli::bench {

namespace {

constexpr Benchmark kBenchmarks[] = {
    {.name = "attend",
     .what = "speed of packed and selected attention compared with dense attention",
     .about =
         "Runs the CPU kernels over lanes much larger than the caches, in this process. Each\n"
         "round runs every variant once; ratios are medians within rounds. Skips contexts that\n"
         "need more than 60 % of the memory.\n",
     .rows = "  stream_read_gG             a plain read of the dense lanes\n"
             "  dense_dD_gG_stream         dense attention compared with that read\n"
             "  dD_gG_ctxN_VARIANT         attention, head_dim D, G query heads per kv head,\n"
             "                             N tokens: dense; packed25, int8 (25 % of the\n"
             "                             channels, _eE: one choice for E tokens); quest,\n"
             "                             select (6.25 or 12.5 % of the blocks are read);\n"
             "                             planes_near, planes_small (152 and 104 bytes a\n"
             "                             token), _signs20 (20 % of the quads are read)\n"
             "  dD_gG_ctxN_nqQ_VARIANT     a block of Q queries\n"
             "  encode_VARIANT_dD_gb_per_s encoding of tiles on one thread\n"
             "  bytes_per_token_dD_eE      memory of packed lanes in a daemon's pool\n",
     .example = "tessera bench attend --quick --threads=2",
     .flags = "threads",
     .run = RunAttend},
    {.name = "compaction",
     .what = "memory that compaction saves, and decode latency while it runs",
     .about = "Appends generated prompts to a daemon and compresses them with mosaickv. Decode\n"
              "latency needs two cores: one for the worker, one for the daemon.\n",
     .rows = "  decode_P_idle              latency of a direct attend, P: p50 or p99\n"
             "  decode_P_during_compaction the same while the compactor is saturated\n"
             "  mosaickv_N_memory          bytes per token and kv head of a prompt of N tokens;\n"
             "                             _chosen, _pieces: under other settings of the policy\n"
             "  ..._peak                   maximum until Compress has ended\n"
             "  ..._raw_copies             raw rows of decoded tokens in host memory\n"
             "  mosaickv_16k_8_layers_peak maximum when appended layer by layer\n",
     .example = "tessera bench compaction --quick",
     .flags = "seed",
     .run = RunCompaction},
    {.name = "fidelity",
     .what = "attention error of each part of the packed format, at equal bytes",
     .about = "Compares formats over generated rows, without a daemon. Generated rows order\n"
              "formats; their errors are far above a real model's.\n",
     .rows =
         "  raw_*, svd_*               without and with SVD; _mask: one choice of channels for\n"
         "                             all rows, _rows: one per row; _gG: one per G rows;\n"
         "                             the last number is the share of channels in 1/1000\n"
         "  DATA_global, _per_segment  one rotation for all segments, or one per segment\n"
         "  DATA_fixed_*, _dynamic     a fixed rate compared with thresholds\n"
         "  ideal, min_max, mean_*     selection of blocks (_bB: B tokens) by summaries\n",
     .example = "tessera bench fidelity --quick --seed=2",
     .flags = "seed",
     .run = RunFidelity},
    {.name = "gpu",
     .what = "speed of the GPU kernels compared with a device copy and dense attention",
     .about = "Replays one layer's attention as a graph on the first GPU, without a daemon, and\n"
              "checks outputs against the CPU. Fails without a GPU.\n",
     .rows = "  copy                       a device copy, bytes read and written\n"
             "  dD_gG_ctxN_bB_VARIANT      attention of B sequences of N tokens\n"
             "  ..._rate                   the bandwidth of that row compared with the copy\n"
             "  ..._choice                 only scores and the selection of blocks\n"
             "  encode_*, keys_*,          bandwidth of encoding tiles, of decoding keys, of\n"
             "  observe_*, moments_*       observing queries, and of summing up moments\n",
     .example = "tessera bench gpu --quick",
     .flags = "threads",
     .run = RunGpu},
    {.name = "overhead",
     .what = "cost that client and daemon add to a nearly free attention call",
     .about = "Decodes a short sequence of one lane, so that almost all time is overhead. System\n"
              "calls are counted by ptrace in a child process.\n",
     .rows = "  plain_call                 the same kernel and row copy in local memory\n"
             "  direct_added_us            what the direct path through mapped memory adds to it\n"
             "  direct_syscalls_per_step   system calls of one step on the direct path\n"
             "  rpc_echo                   the smallest RPC on the same socket\n"
             "  rpc_attend_vs_echo         attention by RPC\n"
             "  idle_cpu_percent           CPU of a daemon whose worker makes no calls\n",
     .example = "tessera bench overhead --quick",
     .flags = {},
     .run = RunOverhead},
    {.name = "policies",
     .what = "attention error of each policy at equal budgets, through a daemon",
     .about = "Compresses a generated prompt with needles under every policy and measures the\n"
              "error of queries that the policy did not observe.\n",
     .rows = "  dense                      without compression\n"
             "  POLICY_B                   the policy with a budget of B % of the tokens\n"
             "  mosaickv*, A+B             policies without a budget, and composed policies\n"
             "  ..._jaccard                agreement of adjacent layers on the kept tokens\n"
             "  chunkkv_reuse_N            time to choose, one choice for N layers\n"
             "  lacache_endless*           memory of a lane after endless generation\n",
     .example = "tessera bench policies --quick --tokens=2048",
     .flags = "seed tokens",
     .tokens = "Tokens of the prompt. Default: 8192; with --quick: 2048.",
     .run = RunPolicies},
    {.name = "pressure",
     .what = "throughput while sequences exceed the pool",
     .about = "Workers decode turns of dense sequences that are together up to four times as\n"
              "large as the pool; the rest is in the host tier.\n",
     .rows = "  turns_at_Nx                turns per second with sequences of N times the pool\n"
             "  least_worker_at_Nx         turns of the slowest worker, of the mean\n"
             "  refused_at_Nx              calls that got RESOURCE_EXHAUSTED\n",
     .example = "tessera bench pressure --quick",
     .flags = "seed",
     .run = RunPressure},
    {.name = "scale",
     .what = "latency of create, append, fork and free with 10 to 1,000 live sequences",
     .about = "Makes one call at a time in daemons with 10, 100 and 1,000 other live sequences.\n",
     .rows = "  OP_p50_at_N, OP_p99_at_N   latency of OP (create, append_first_tile, fork,\n"
             "                             free_fork, free) with N live sequences\n"
             "  OP_growing_*               the first sequences, while the pool grows\n",
     .example = "tessera bench scale --quick --layers=8",
     .flags = "seed layers",
     .layers = "Layers of the model. Default: 32; with --quick: 4.",
     .run = RunScale},
    {.name = "serve",
     .what = "decoding through a daemon compared with a cache in the worker's memory",
     .about = "Workers decode batches with the recall model, alternately through the daemon and\n"
              "from a dense cache in their own memory.\n",
     .rows = "  own_kK                     batches of K sequences, cache in the worker's memory\n"
             "  daemon_cost_dense_kK       the same through the daemon, dense\n"
             "  mosaickv_kK                25 % of the channels\n"
             "  chunkkv+mosaickv_kK        35 % of the tokens, 25 % of the channels\n",
     .example = "tessera bench serve --quick --workers=2",
     .flags = "seed sequences tokens workers",
     .tokens = "Tokens of the prompt. Default: 1024.",
     .run = RunServe},
    {.name = "sharing",
     .what = "memory and time that one published prefix saves 8 workers",
     .about = "One worker publishes a prefix, seven processes fork it and decode one token each.\n",
     .rows = "  private_*                  memory of eight private copies; _arithmetic: computed\n"
             "  shared_by_N                memory of N workers that share the prefix\n"
             "  tails_of_8                 their tail rings\n"
             "  compute_*                  time of append, compression and first attention\n"
             "                             without sharing, publish: of publishing\n"
             "  join_*                     time until a worker attends to the shared prefix\n"
             "  match_P_of_N               latency of Match among N prefixes, P: p50 or p99\n"
             "  match_P_of_anothers        by another tenant; _of_nobodys: of no prefix at all\n",
     .example = "tessera bench sharing --quick --layers=4 --tokens=8192",
     .flags = "seed tokens layers",
     .tokens = "Tokens of the prefix. Default: 65536; with --quick: 4096.",
     .layers = "Layers of the model. Default: 32; with --quick: 2.",
     .run = RunSharing},
    {.name = "strategy",
     .what = "time to compute a strategy and to encode a tile",
     .about = "Times the compactor's work on generated rows, one lane on one thread, without a\n"
              "daemon.\n",
     .rows = "  eigen_dD                   eigenvectors of one matrix, head_dim D\n"
             "  moments_of_segment_dD      moments of a segment's rows\n"
             "  make_strategy_dD           the strategy from these moments\n"
             "  encode_tile_dD             encoding of a tile; loss_of_tile, moments_of_tile\n"
             "  update_buffer_dD           all three; _share_of_64k: in % of a decode step\n"
             "  dense_step_dD_64k          attention over 64K dense tokens\n",
     .example = "tessera bench strategy --quick",
     .flags = "seed",
     .run = RunStrategy},
};

}  // namespace

std::span<const Benchmark> Benchmarks() { return kBenchmarks; }

const Benchmark* FindBenchmark(std::string_view name) {
  for (const Benchmark& benchmark : kBenchmarks) {
    if (benchmark.name == name) return &benchmark;
  }
  return nullptr;
}

}  // namespace tessera::cli::bench
