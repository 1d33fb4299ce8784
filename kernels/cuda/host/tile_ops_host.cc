#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/cuda/common/sign_index.h"
#include "kernels/cuda/encode/observe_index.h"
#include "kernels/cuda/host/tile_ops.h"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint64_t kAlignment = 16;

constexpr std::uint64_t RoundUp(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// A device address that kernels access in whole 16-byte chunks.
bool Chunked(std::uint64_t address) { return address != 0 && address % kAlignment == 0; }

std::string_view StrategyProblem(std::span<const DeviceStrategy> strategies, std::uint32_t index) {
  if (index >= strategies.size()) return "the strategy index is out of range";
  const DeviceStrategy& strategy = strategies[index];
  if (const char* why = UnsupportedReason(strategy.shape); why != nullptr) return why;
  const TileLayout layout = LayoutOf(strategy.shape);
  if (std::memcmp(&strategy.layout, &layout, sizeof layout) != 0) {
    return "the layout does not belong to the shape";
  }
  if (strategy.shape.head_dim != strategies[0].shape.head_dim) return "more than one head_dim";
  return {};
}

std::string_view RotationProblem(const DeviceStrategy& strategy) {
  const bool key_book = strategy.shape.planes() || HasSigns(strategy.shape);
  if (!strategy.shape.packed() && !key_book) return {};
  if (!IsElementType(static_cast<std::uint8_t>(strategy.rotation_type))) {
    return "the rotation's element type is unknown";
  }
  const auto cuts = [&](std::uint64_t rotation, const RowShape& side) {
    return rotation == 0 && side.channels != strategy.shape.head_dim;
  };
  if (cuts(strategy.key_rotation, strategy.shape.key) ||
      cuts(strategy.value_rotation, strategy.shape.value)) {
    return "an identity rotation must not cut channels";
  }
  for (const std::uint64_t rotation : {strategy.key_rotation, strategy.value_rotation}) {
    if (rotation % kAlignment != 0) return "the rotation is not 16-byte aligned";
  }
  if (!key_book) return {};
  const bool bf16 = strategy.rotation_type == ElementType::kBf16;
  if (!bf16 || strategy.key_rotation == 0 || !Chunked(strategy.key_mean)) {
    return "planes and signs need a rotation and a mean of keys in bf16, 16-byte aligned";
  }
  if (strategy.shape.planes() && (strategy.value_rotation == 0 || !Chunked(strategy.value_mean))) {
    return "planes need a rotation and a mean of values in bf16, 16-byte aligned";
  }
  return {};
}

bool RowCount(std::uint32_t rows) { return rows >= 1 && rows <= kTileEntries; }

bool KeepsPlanes(const PlaneWidths& from, const PlaneWidths& to) {
  const PlaneWidths without = WithoutCrumbs(from);
  return (to.first == from.first || to.first == without.first) &&
         (to.second == from.second || to.second == without.second);
}

bool SameRows(TileShape from, const TileShape& to) {
  from.weights = to.weights;
  from.positions = to.positions;
  if (KeepsPlanes(from.key_planes, to.key_planes)) from.key_planes = to.key_planes;
  if (KeepsPlanes(from.value_planes, to.value_planes)) from.value_planes = to.value_planes;
  return from == to;
}

// Checks where a new tile's summaries are to be stored.
std::string_view SummariesProblem(const DeviceStrategy& strategy, std::uint64_t summaries) {
  if (strategy.layout.summary_bytes == 0) return {};
  if (summaries == 0) return "the summaries have no address";
  if (summaries % kSummaryAlignment != 0) return "the summaries are not 4-byte aligned";
  return {};
}

Error Refused(const char* what, std::size_t job, std::string_view problem) {
  return Error(std::string(what) + " job " + std::to_string(job) + ": " + std::string(problem));
}

}  // namespace

std::string_view EncodeProblem(std::span<const DeviceStrategy> strategies, ElementType type,
                               const EncodeTileJob& job) {
  const std::string_view problem = StrategyProblem(strategies, job.strategy);
  if (!problem.empty()) return problem;
  const DeviceStrategy& strategy = strategies[job.strategy];
  if (!IsElementType(static_cast<std::uint8_t>(type))) return "the element type is unknown";
  if (!strategy.shape.packed() && ElementsOf(strategy.shape.format) != type) {
    return "the rows' type differs from the dense tile's";
  }
  if (const std::string_view rotation = RotationProblem(strategy); !rotation.empty()) {
    return rotation;
  }
  if (!RowCount(job.rows)) return "the row count is not in 1..32";
  if (!Chunked(job.key) || !Chunked(job.value) || job.stride % kAlignment != 0) {
    return "the rows are not 16-byte aligned";
  }
  if (!Chunked(job.tile)) return "the tile is null or not 16-byte aligned";
  if (const auto summaries = SummariesProblem(strategy, job.summaries); !summaries.empty()) {
    return summaries;
  }
  if (job.weights % sizeof(float) != 0 || job.positions % sizeof(std::uint32_t) != 0) {
    return "weights or positions are not 4-byte aligned";
  }
  return {};
}

std::string_view DecodeProblem(std::span<const DeviceStrategy> strategies,
                               const DecodeTileJob& job) {
  const std::string_view problem = StrategyProblem(strategies, job.strategy);
  if (!problem.empty()) return problem;
  if (!RowCount(job.rows)) return "the row count is not in 1..32";
  if (!Chunked(job.tile)) return "the tile is null or not 16-byte aligned";
  if (!Chunked(job.keys) || !Chunked(job.values)) return "the output is null or misaligned";
  return {};
}

std::string_view KeysProblem(std::span<const DeviceStrategy> strategies, ElementType type,
                             const KeysTileJob& job) {
  const std::string_view problem = StrategyProblem(strategies, job.strategy);
  if (!problem.empty()) return problem;
  const DeviceStrategy& strategy = strategies[job.strategy];
  if (!IsElementType(static_cast<std::uint8_t>(type))) return "the element type is unknown";
  if (!strategy.shape.packed() && ElementsOf(strategy.shape.format) != type) {
    return "the keys' type differs from the dense tile's";
  }
  if (strategy.shape.packed()) {  // dense keys are not turned back
    const std::string_view rotation = RotationProblem(strategy);
    if (!rotation.empty()) return rotation;
  }
  if (!RowCount(job.rows)) return "the row count is not in 1..32";
  if (!Chunked(job.tile)) return "the tile is null or not 16-byte aligned";
  if (!Chunked(job.keys)) return "the keys are null or not 16-byte aligned";
  return {};
}

std::string_view GatherProblem(std::span<const DeviceStrategy> strategies, const GatherTile& job) {
  for (const std::uint32_t strategy : {job.from, job.to}) {
    const std::string_view problem = StrategyProblem(strategies, strategy);
    if (!problem.empty()) return problem;
  }
  if (!SameRows(strategies[job.from].shape, strategies[job.to].shape)) {
    return "the shapes differ in more than weights, positions and crumbs";
  }
  if (job.rows.empty() || job.rows.size() > kTileEntries) return "the row count is not in 1..32";
  if (!Chunked(job.tile)) return "the tile is null or not 16-byte aligned";
  const std::string_view summaries = SummariesProblem(strategies[job.to], job.summaries);
  if (!summaries.empty()) return summaries;
  for (const GatherRow& row : job.rows) {
    const auto source = reinterpret_cast<std::uint64_t>(row.tile);
    if (!Chunked(source)) return "a source is null or not 16-byte aligned";
    if (source == job.tile) return "the new tile is one of its sources";
    if (row.row >= kTileEntries) return "a source row is not in 0..31";
    if (HasSigns(strategies[job.to].shape) && row.summaries == nullptr) {
      return "a source has no address of its signs";
    }
  }
  return {};
}

std::string_view MomentsProblem(std::uint32_t head_dim, ElementType type,
                                const MomentsTileJob& job) {
  if (!IsHeadDim(head_dim)) return "head_dim is not 64, 128 or 256";
  if (!IsElementType(static_cast<std::uint8_t>(type))) return "the element type is unknown";
  if (!Chunked(job.rows) || job.stride % kAlignment != 0) return "the rows are not 16-byte aligned";
  if (!Chunked(job.sums)) return "the sums are null or not 16-byte aligned";
  return {};
}

std::string_view ObserveProblem(const ObserveForm& form, const ObserveTileJob& job) {
  if (!IsHeadDim(form.head_dim)) return "head_dim is not 64, 128 or 256";
  if (!IsElementType(static_cast<std::uint8_t>(form.type))) return "the element type is unknown";
  if (job.key_count == 0 || job.query_count == 0) return {};
  if (job.key_count > kMostObservedKeys) return "the job has more than kMostObservedKeys keys";
  if (!Chunked(job.keys) || job.key_stride % kAlignment != 0) {
    return "the keys are null or not 16-byte aligned";
  }
  if (!Chunked(job.queries) || job.query_stride % kAlignment != 0) {
    return "the queries are not 16-byte aligned";
  }
  if (job.visible_end == 0) return "visible_end is null";
  if (job.visible_begin % sizeof(std::uint64_t) != 0 ||
      job.visible_end % sizeof(std::uint64_t) != 0) {
    return "the visible ranges are not 8-byte aligned";
  }
  if (job.log2_weights % sizeof(float) != 0) return "the weights are not 4-byte aligned";
  if (!Chunked(job.sums)) return "the sums are null or not 16-byte aligned";
  return {};
}

Error TileCalls::Upload(std::span<const std::span<const std::byte>> arrays,
                        std::vector<std::byte*>* addresses, std::uint64_t own_bytes) {
  std::uint64_t bytes = own_bytes;
  for (const std::span<const std::byte> array : arrays) bytes += RoundUp(array.size());
  // Every call waits for its launches, so nothing uses the old memory.
  if (Error error = scratch_.Grow(bytes); !error.ok()) return error;
  std::uint64_t at = 0;
  for (const std::span<const std::byte> array : arrays) {
    addresses->push_back(scratch_.at(at));
    if (Error error = queue_.Copy(scratch_.at(at), array.data(), array.size()); !error.ok()) {
      return error;
    }
    at += RoundUp(array.size());
  }
  if (own_bytes != 0) addresses->push_back(scratch_.at(at));
  return Error();
}

Error TileCalls::Encode(std::span<const DeviceStrategy> strategies, ElementType type,
                        std::span<const EncodeTileJob> jobs,
                        std::optional<std::uint32_t>* unusable) {
  unusable->reset();
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::string_view problem = EncodeProblem(strategies, type, jobs[i]);
    if (!problem.empty()) return Refused("encode", i, problem);
  }
  if (jobs.empty()) return Error();
  std::uint64_t word = kNoUnusableJob;
  const std::span<const std::byte> arrays[] = {std::as_bytes(strategies), std::as_bytes(jobs),
                                               std::as_bytes(std::span(&word, 1))};
  std::vector<std::byte*> at;
  if (Error error = Upload(arrays, &at); !error.ok()) return error;
  const EncodeTilesParams params = {.strategies = reinterpret_cast<const DeviceStrategy*>(at[0]),
                                    .jobs = reinterpret_cast<const EncodeTileJob*>(at[1]),
                                    .unusable = reinterpret_cast<std::uint64_t*>(at[2]),
                                    .count = static_cast<std::uint32_t>(jobs.size()),
                                    .head_dim = strategies[0].shape.head_dim,
                                    .type = type};
  if (Error error = queue_.EncodeTiles(params); !error.ok()) return error;
  if (Error error = queue_.Copy(&word, at[2], sizeof word); !error.ok()) return error;
  if (Error error = queue_.Wait(); !error.ok()) return error;
  if (word != kNoUnusableJob) *unusable = static_cast<std::uint32_t>(word);
  return Error();
}

Error TileCalls::Decode(std::span<const DeviceStrategy> strategies,
                        std::span<const DecodeTileJob> jobs) {
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::string_view problem = DecodeProblem(strategies, jobs[i]);
    if (!problem.empty()) return Refused("decode", i, problem);
  }
  if (jobs.empty()) return Error();
  const std::span<const std::byte> arrays[] = {std::as_bytes(strategies), std::as_bytes(jobs)};
  std::vector<std::byte*> at;
  if (Error error = Upload(arrays, &at); !error.ok()) return error;
  Error error = queue_.DecodeTiles({.strategies = reinterpret_cast<const DeviceStrategy*>(at[0]),
                                    .jobs = reinterpret_cast<const DecodeTileJob*>(at[1]),
                                    .count = static_cast<std::uint32_t>(jobs.size())});
  return error.ok() ? queue_.Wait() : error;
}

Error TileCalls::Keys(std::span<const DeviceStrategy> strategies, ElementType type,
                      std::span<const KeysTileJob> jobs) {
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::string_view problem = KeysProblem(strategies, type, jobs[i]);
    if (!problem.empty()) return Refused("keys", i, problem);
  }
  if (jobs.empty()) return Error();
  const std::span<const std::byte> arrays[] = {std::as_bytes(strategies), std::as_bytes(jobs)};
  std::vector<std::byte*> at;
  if (Error error = Upload(arrays, &at); !error.ok()) return error;
  Error error = queue_.KeysOfTiles({.strategies = reinterpret_cast<const DeviceStrategy*>(at[0]),
                                    .jobs = reinterpret_cast<const KeysTileJob*>(at[1]),
                                    .count = static_cast<std::uint32_t>(jobs.size()),
                                    .head_dim = strategies[0].shape.head_dim,
                                    .type = type});
  return error.ok() ? queue_.Wait() : error;
}

Error TileCalls::Gather(std::span<const DeviceStrategy> strategies,
                        std::span<const GatherTile> jobs) {
  std::vector<GatherTileJob> device_jobs;
  std::vector<GatherRow> rows;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const GatherTile& job = jobs[i];
    const std::string_view problem = GatherProblem(strategies, job);
    if (!problem.empty()) return Refused("gather", i, problem);
    device_jobs.push_back({.tile = job.tile,
                           .summaries = job.summaries,
                           .first_row = static_cast<std::uint32_t>(rows.size()),
                           .row_count = static_cast<std::uint32_t>(job.rows.size()),
                           .from = job.from,
                           .to = job.to});
    rows.insert(rows.end(), job.rows.begin(), job.rows.end());
  }
  if (jobs.empty()) return Error();
  const std::span<const std::byte> arrays[] = {std::as_bytes(strategies),
                                               std::as_bytes(std::span(device_jobs)),
                                               std::as_bytes(std::span(rows))};
  std::vector<std::byte*> at;
  if (Error error = Upload(arrays, &at); !error.ok()) return error;
  Error error = queue_.GatherTiles({.strategies = reinterpret_cast<const DeviceStrategy*>(at[0]),
                                    .jobs = reinterpret_cast<const GatherTileJob*>(at[1]),
                                    .rows = reinterpret_cast<const GatherRow*>(at[2]),
                                    .count = static_cast<std::uint32_t>(jobs.size()),
                                    .head_dim = strategies[0].shape.head_dim});
  return error.ok() ? queue_.Wait() : error;
}

Error TileCalls::Moments(std::uint32_t head_dim, ElementType type,
                         std::span<const MomentsTileJob> jobs) {
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::string_view problem = MomentsProblem(head_dim, type, jobs[i]);
    if (!problem.empty()) return Refused("moments", i, problem);
  }
  if (jobs.empty()) return Error();
  const std::span<const std::byte> arrays[] = {std::as_bytes(jobs)};
  std::vector<std::byte*> at;
  if (Error error = Upload(arrays, &at); !error.ok()) return error;
  Error error = queue_.MomentsOfRows({.jobs = reinterpret_cast<const MomentsTileJob*>(at[0]),
                                      .count = static_cast<std::uint32_t>(jobs.size()),
                                      .head_dim = head_dim,
                                      .type = type});
  return error.ok() ? queue_.Wait() : error;
}

Error TileCalls::Observe(const ObserveForm& form, std::span<const ObserveTileJob> jobs) {
  std::vector<ObserveTileJob> device_jobs(jobs.begin(), jobs.end());
  ObserveTilesParams params = {.count = static_cast<std::uint32_t>(jobs.size()), .form = form};
  std::uint64_t floats = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::string_view problem = ObserveProblem(form, jobs[i]);
    if (!problem.empty()) return Refused("observe", i, problem);
    device_jobs[i].scratch_at = floats;
    floats += ObserveScratchFloats(jobs[i].key_count);
    params.max_keys = std::max(params.max_keys, jobs[i].key_count);
    params.max_queries = std::max(params.max_queries, jobs[i].query_count);
  }
  if (params.max_keys == 0 || params.max_queries == 0) return Error();
  const std::span<const std::byte> arrays[] = {std::as_bytes(std::span(device_jobs))};
  std::vector<std::byte*> at;
  if (Error error = Upload(arrays, &at, floats * sizeof(float)); !error.ok()) return error;
  params.jobs = reinterpret_cast<const ObserveTileJob*>(at[0]);
  params.scratch = reinterpret_cast<float*>(at[1]);
  Error error = queue_.Observe(params);
  return error.ok() ? queue_.Wait() : error;
}

}  // namespace tessera::kernels::cuda
