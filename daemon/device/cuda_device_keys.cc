// The keys of a lane in GPU memory, and the attention that queries give to them.
//
//   tiles ── Keys ──▶ rows ──┐
//   looks ── copy ──▶ sums | queries, ranges ── Observe ──▶ sums ── copy ──▶ the caller's
//
// The object owns its scratch, because scratch is proportional to the lane's length.

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/device/cuda_device.h"
#include "kernels/cuda/encode/observe_index.h"
#include "kernels/cuda/host/tile_ops.h"
#include "kernels/format/dense_tile.h"

namespace tessera::device {

namespace cuda = kernels::cuda;

namespace {

using kernels::kTileEntries;

constexpr std::size_t kMostTiles = 16384;  // per launch
// Scratch that the looks of one launch share. A single look gets what it needs.
constexpr std::uint64_t kMostScratch = std::uint64_t{64} << 20;
constexpr std::size_t kLengthsAtOnce = 4096;
constexpr std::uint64_t kMomentRows = 4096;  // per job
constexpr std::uint64_t kAlignment = 16;

std::uint64_t AddressOf(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

std::uint64_t ScratchBytes(const kernels::KeyObservation& look) {
  return cuda::ObserveScratchFloats(look.sums.size()) * sizeof(float);
}

// Jobs for the tiles of all runs.
struct KeyJobs {
  std::vector<cuda::DeviceStrategy> strategies;
  std::vector<cuda::KeysTileJob> jobs;

  void Add(const KeyRun& run, kernels::DenseTile dense, std::uint64_t keys) {
    const kernels::RotationView& rotation = run.strategy.rotation;
    const auto strategy = static_cast<std::uint32_t>(strategies.size());
    strategies.push_back({.shape = run.strategy.shape,
                          .layout = kernels::LayoutOf(run.strategy.shape),
                          .rotation_type = rotation.type,
                          .key_rotation = AddressOf(rotation.key),
                          .value_rotation = AddressOf(rotation.value),
                          .key_mean = AddressOf(rotation.key_mean),
                          .value_mean = AddressOf(rotation.value_mean)});
    for (std::uint64_t entry = 0; entry < run.entries; entry += kTileEntries) {
      jobs.push_back({.tile = AddressOf(run.tiles[entry / kTileEntries]),
                      .keys = keys + entry * dense.row_bytes(),
                      .rows = static_cast<std::uint32_t>(
                          std::min<std::uint64_t>(kTileEntries, run.entries - entry)),
                      .strategy = strategy});
      const std::string_view problem = cuda::KeysProblem(strategies, dense.type, jobs.back());
      TESSERA_CHECK(problem.empty(), problem);
    }
  }
};

}  // namespace

class CudaDevice::Keys final : public LaneKeys {
 public:
  Keys(CudaDevice& device, const kernels::LayerGeometry& geometry, std::uint64_t count,
       std::unique_ptr<cuda::Queue> queue)
      : device_(device),
        form_{.head_dim = geometry.head_dim,
              .type = geometry.type,
              .scale = geometry.scale,
              .logit_softcap = geometry.logit_softcap,
              .logits = false},
        dense_{.head_dim = geometry.head_dim, .type = geometry.type},
        count_(count),
        queue_(std::move(queue)),
        rows_(*device.runtime_),
        looks_(*device.runtime_),
        calls_(*device.runtime_, *queue_) {}

  absl::Status Load(std::span<const KeyRun> runs) {
    const std::uint64_t bytes = count_ * dense_.row_bytes();
    if (absl::Status status = Answer(rows_.Grow(bytes), bytes); !status.ok()) return status;
    KeyJobs all;
    std::uint64_t at = 0;
    for (const KeyRun& run : runs) {
      const std::uint64_t run_bytes = run.entries * dense_.row_bytes();
      if (run.rows == nullptr) {
        all.Add(run, dense_, AddressOf(rows_.at(at)));
      } else {
        const cuda::Error error = queue_->Copy(rows_.at(at), run.rows, run_bytes);
        if (absl::Status status = Answer(error, run_bytes); !status.ok()) return status;
      }
      at += run_bytes;
    }
    const std::span<const cuda::KeysTileJob> jobs(all.jobs);
    for (std::size_t first = 0; first < jobs.size(); first += kMostTiles) {
      const auto some = jobs.subspan(first, std::min(kMostTiles, jobs.size() - first));
      const cuda::Error error = calls_.Keys(all.strategies, dense_.type, some);
      if (absl::Status status = Answer(error, some.size_bytes()); !status.ok()) return status;
    }
    return Answer(queue_->Wait(), 0);
  }

  absl::Status Look(std::span<const kernels::KeyObservation> looks) override {
    if (absl::Status failed = device_.health(); !failed.ok()) return failed;
    for (const kernels::KeyObservation& look : looks) {
      const std::string_view problem = kernels::ObservationProblem(look, count_);
      TESSERA_CHECK(problem.empty(), problem);
    }
    // Each launch takes as many looks as share a form and fit the scratch.
    for (std::size_t first = 0; first < looks.size();) {
      std::uint64_t scratch = ScratchBytes(looks[first]);
      std::size_t end = first + 1;
      while (end < looks.size() && looks[end].logits == looks[first].logits &&
             scratch + ScratchBytes(looks[end]) <= kMostScratch) {
        scratch += ScratchBytes(looks[end++]);
      }
      absl::Status status = ObserveBatch(looks.subspan(first, end - first), scratch);
      if (!status.ok()) return status;
      first = end;
    }
    return absl::OkStatus();
  }

  // Computed by letting each key look at itself.
  absl::Status AddSquaredLengths(std::span<double> sums) override {
    if (absl::Status failed = device_.health(); !failed.ok()) return failed;
    TESSERA_CHECK(sums.size() <= count_, "lengths requested of more keys than there are");
    std::vector<kernels::KeyObservation> looks;
    for (std::uint64_t key = 0; key < sums.size(); ++key) {
      looks.push_back({.key = key,
                       .first = key,
                       .visible = kernels::FullRanges(1, 1),
                       .logits = true,
                       .sums = sums.subspan(key, 1)});
      if (looks.size() < kLengthsAtOnce && key + 1 < sums.size()) continue;
      if (absl::Status status = Look(looks); !status.ok()) return status;
      looks.clear();
    }
    return absl::OkStatus();
  }

  // The diagonal of the keys' second moments, which the device computes in pieces of the lane.
  absl::Status AddChannelSquares(std::uint64_t count, std::span<double> sums) override {
    if (absl::Status failed = device_.health(); !failed.ok()) return failed;
    TESSERA_CHECK(count <= count_, "channels requested of more keys than there are");
    if (count == 0) return absl::OkStatus();
    const std::size_t dim = form_.head_dim;
    const std::uint64_t piece_bytes = dim * dim * sizeof(double);
    std::vector<cuda::MomentsTileJob> jobs;
    for (std::uint64_t row = 0; row < count; row += kMomentRows) {
      jobs.push_back({.rows = AddressOf(rows_.at(row * dense_.row_bytes())),
                      .stride = dense_.row_bytes(),
                      .sums = jobs.size() * piece_bytes,
                      .row_count = std::min(kMomentRows, count - row)});
    }
    host_.assign(jobs.size() * piece_bytes, std::byte{0});
    absl::Status grown = Answer(looks_.Grow(host_.size()), host_.size());
    if (!grown.ok()) return grown;
    for (cuda::MomentsTileJob& job : jobs) job.sums += AddressOf(looks_.at());
    cuda::Error error = queue_->Copy(looks_.at(), host_.data(), host_.size());
    if (error.ok()) error = calls_.Moments(form_.head_dim, form_.type, jobs);
    if (error.ok()) error = queue_->Copy(host_.data(), looks_.at(), host_.size());
    if (error.ok()) error = queue_->Wait();
    if (absl::Status status = Answer(error, jobs.size() * sizeof(jobs[0])); !status.ok()) {
      return status;
    }
    for (std::size_t piece = 0; piece < jobs.size(); ++piece) {
      for (std::size_t d = 0; d < dim; ++d) {
        double square;
        std::memcpy(&square, host_.data() + piece * piece_bytes + d * (dim + 1) * sizeof square,
                    sizeof square);
        sums[d] += square;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Read(std::byte* to) override {
    if (absl::Status failed = device_.health(); !failed.ok()) return failed;
    if (count_ == 0) return absl::OkStatus();
    cuda::Error error = queue_->Copy(to, rows_.at(), count_ * dense_.row_bytes());
    if (error.ok()) error = queue_->Wait();
    return Answer(error, 0);
  }

 private:
  // The upload of a call: the sums of all looks, then their other inputs.
  class Image {
   public:
    Image(std::vector<std::byte>& bytes, std::span<const kernels::KeyObservation> looks)
        : bytes_(bytes), looks_(looks) {
      bytes_.clear();
      for (const kernels::KeyObservation& look : looks) sums_at_.push_back(Add(look.sums));
      sums_bytes_ = bytes_.size();
    }
    template <typename Word>
    std::uint64_t Add(std::span<Word> words) {
      const std::uint64_t at = bytes_.size();
      bytes_.resize(RoundUp(at + words.size_bytes(), kAlignment));
      if (!words.empty()) std::memcpy(bytes_.data() + at, words.data(), words.size_bytes());
      return at;
    }
    std::uint64_t sums_at(std::size_t look) const { return sums_at_[look]; }
    std::uint64_t sums_bytes() const { return sums_bytes_; }
    // Call after the sums have been downloaded.
    void ReturnSums() const {
      for (std::size_t i = 0; i < looks_.size(); ++i) {
        const std::span<double> sums = looks_[i].sums;
        if (!sums.empty()) std::memcpy(sums.data(), bytes_.data() + sums_at_[i], sums.size_bytes());
      }
    }

   private:
    std::vector<std::byte>& bytes_;
    const std::span<const kernels::KeyObservation> looks_;
    std::vector<std::uint64_t> sums_at_;
    std::uint64_t sums_bytes_ = 0;
  };

  absl::Status ObserveBatch(std::span<const kernels::KeyObservation> looks,
                            std::uint64_t scratch_bytes) {
    Image image(host_, looks);
    std::vector<cuda::ObserveTileJob> jobs;
    for (std::size_t i = 0; i < looks.size(); ++i) {
      const kernels::KeyObservation& look = looks[i];
      const std::span<const std::byte> queries(look.queries.rows,
                                               look.queries.count * dense_.row_bytes());
      jobs.push_back(
          {.keys = AddressOf(rows_.at(look.first * dense_.row_bytes())),
           .key_stride = dense_.row_bytes(),
           .key_count = look.sums.size(),
           .queries = look.key.has_value() ? 0 : image.Add(queries),
           .query_stride = dense_.row_bytes(),
           .visible_begin = image.Add(std::span(look.visible.begin)),
           .visible_end = image.Add(std::span(look.visible.end)),
           .log2_weights = look.log2_weights.empty() ? 0 : image.Add(std::span(look.log2_weights)),
           .sums = image.sums_at(i),
           .query_count = static_cast<std::uint32_t>(look.query_count())});
    }
    if (absl::Status status = Answer(looks_.Grow(host_.size()), host_.size()); !status.ok()) {
      return status;
    }
    const std::uint64_t base = AddressOf(looks_.at());
    for (std::size_t i = 0; i < looks.size(); ++i) {
      jobs[i].queries = looks[i].key.has_value()
                            ? AddressOf(rows_.at(*looks[i].key * dense_.row_bytes()))
                            : jobs[i].queries + base;
      for (std::uint64_t* address : {&jobs[i].visible_begin, &jobs[i].visible_end, &jobs[i].sums}) {
        *address += base;
      }
      if (!looks[i].log2_weights.empty()) jobs[i].log2_weights += base;
    }
    cuda::ObserveForm form = form_;
    form.logits = looks.front().logits;
    cuda::Error error = queue_->Copy(looks_.at(), host_.data(), host_.size());
    if (error.ok()) error = calls_.Observe(form, jobs);
    if (error.ok()) error = queue_->Copy(host_.data(), looks_.at(), image.sums_bytes());
    if (error.ok()) error = queue_->Wait();
    if (absl::Status status = Answer(error, scratch_bytes); !status.ok()) return status;
    image.ReturnSums();
    return absl::OkStatus();
  }

  // `bytes` is the requested size, for the message if memory is lacking.
  absl::Status Answer(const cuda::Error& error, std::uint64_t bytes) {
    if (!error.out_of_memory()) return device_.Answer(error);
    return absl::ResourceExhaustedError(Concat(device_.description_.name, ": the ", count_,
                                               " keys of a lane need ", bytes,
                                               " bytes of GPU memory: ", error.text()));
  }

  CudaDevice& device_;
  const cuda::ObserveForm form_;
  const kernels::DenseTile dense_;
  const std::uint64_t count_;
  const std::unique_ptr<cuda::Queue> queue_;
  cuda::Scratch rows_;
  cuda::Scratch looks_;
  cuda::TileCalls calls_;
  std::vector<std::byte> host_;
};

absl::StatusOr<std::unique_ptr<LaneKeys>> CudaDevice::LoadKeys(
    const kernels::LayerGeometry& geometry, std::span<const KeyRun> runs) {
  if (absl::Status failed = health(); !failed.ok()) return failed;
  std::uint64_t count = 0;
  for (const KeyRun& run : runs) count += run.entries;
  if (count > cuda::kMostObservedKeys) {
    return absl::UnimplementedError(Concat("device ", description_.name, " can observe at most ",
                                           cuda::kMostObservedKeys, " keys of a lane; ",
                                           "this one has ", count));
  }
  std::unique_ptr<cuda::Queue> queue;
  if (absl::Status status = Answer(runtime_->NewQueue(&queue)); !status.ok()) return status;
  auto keys = std::make_unique<Keys>(*this, geometry, count, std::move(queue));
  if (absl::Status status = keys->Load(runs); !status.ok()) return status;
  return keys;
}

}  // namespace tessera::device
