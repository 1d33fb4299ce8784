#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/reference/packed.h"
#include "kernels/reference/planes.h"
#include "kernels/reference/tile_row.h"

namespace tessera::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double SummaryScore(const ScorePart& part, const float* query, const std::byte* summaries,
                    std::uint32_t block) {
  double row[2 * kMaxChannels];
  ReadRow(BlockRow(part.shape, part.layout, summaries, block), row);
  const std::uint32_t channels = part.shape.key.channels;
  double score = 0;
  for (std::uint32_t c = 0; c < channels; ++c) {
    score += part.shape.summary == Summary::kMean
                 ? query[c] * row[c]
                 : std::max(query[c] * row[c], query[c] * row[channels + c]);
  }
  return score;
}

double LargestLogWeight(const ScorePart& part, const BlockRun& run, std::uint32_t block) {
  if (!part.shape.weights) return 0;
  const std::uint32_t entries = block + 1 == run.blocks ? run.last_entries : part.shape.block;
  double largest = -kInfinity;
  for (std::uint32_t e = 0; e < entries; ++e) {
    const std::uint32_t row = block * part.shape.block + e;
    largest = std::max(largest, std::log(WeightOf(part.shape, part.layout, run.tile, row)));
  }
  return largest;
}

// ln sum exp over the candidates; 0 if there are none.
double LogSumExp(const SelectJob& job, const float* scores) {
  double max = -kInfinity;
  for (std::uint32_t b = 0; b < job.block_count; ++b) {
    if (job.blocks[b].entries != 0) max = std::max<double>(max, scores[b]);
  }
  if (max == -kInfinity) return 0;
  double sum = 0;
  for (std::uint32_t b = 0; b < job.block_count; ++b) {
    if (job.blocks[b].entries != 0) sum += std::exp(scores[b] - max);
  }
  return max + std::log(sum);
}

}  // namespace

const char* ScorePartReference(const ScorePart& part) {
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    const float* query = part.rows + std::size_t{r} * part.padded_channels;
    float* scores = part.scores + r * part.score_stride;
    for (std::uint32_t i = 0; i < part.run_count; ++i) {
      const BlockRun& run = part.runs[i];
      for (std::uint32_t b = 0; b < run.blocks; ++b) {
        if (part.shape.summary == Summary::kSigns) {
          const std::uint32_t entries = b + 1 == run.blocks ? run.last_entries : kQuadRows;
          *scores++ = static_cast<float>(SignScore(part, query, run.summaries, b, entries));
          continue;
        }
        *scores++ = static_cast<float>(part.scale * SummaryScore(part, query, run.summaries, b) +
                                       LargestLogWeight(part, run, b));
      }
    }
  }
  return "reference";
}

const char* SelectReference(const SelectJob& job) {
  std::fill_n(job.values, job.block_count, -std::numeric_limits<float>::infinity());
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    const float* scores = job.scores + r * job.score_stride;
    const double lse = job.by_share ? LogSumExp(job, scores) : 0;
    for (std::uint32_t b = 0; b < job.block_count; ++b) {
      job.values[b] = std::max(job.values[b], static_cast<float>(scores[b] - lse));
    }
  }
  std::vector<std::uint32_t> order(job.block_count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (job.blocks[a].forced != job.blocks[b].forced) return job.blocks[a].forced != 0;
    return job.values[a] > job.values[b];
  });
  std::uint64_t entries = 0;
  for (std::uint32_t b : order) {
    const BlockFacts& facts = job.blocks[b];
    const bool take = facts.entries != 0 && (facts.forced != 0 || entries < job.budget);
    job.taken[b] = take ? 1 : 0;
    if (take) entries += facts.entries;
  }
  return "reference";
}

}  // namespace tessera::kernels
