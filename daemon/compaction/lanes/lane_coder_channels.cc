// ThinK: encodes rows without the dropped key channels. The segment's R_k picks the kept ones.

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/compaction/lanes/lane_coder.h"
#include "daemon/policies/plan.h"
#include "kernels/format/element.h"
#include "kernels/strategy/aligned_bytes.h"

namespace tessera::compaction {

using cache::LaneSwap;
using cache::Segment;

const Segment* KeyChannelFormOf(const cache::OpenRun& run, const policies::Policy& policy,
                                const kernels::LayerGeometry& geometry) {
  // Dense rows that a token policy kept may follow the packed segment.
  if (!policy.key_channels.has_value() || run.packed == nullptr) return nullptr;
  kernels::TileShape shape = run.packed->shape();
  shape.weights = shape.positions = false;
  const bool same = shape == policies::KeyChannelShape(*policy.key_channels, geometry);
  return same ? run.packed.get() : nullptr;
}

LaneCoder::Swap LaneCoder::CutKeys() {
  const absl::StatusOr<HostLaneRows> rows = RowsThatStay();
  if (!rows.ok()) return rows.status();
  // Rows that came since the decision are among the newest.
  std::uint64_t cut =
      rows->count() - std::min(rows->count(), options_.policy->key_channels->recent);
  LaneSwap swap = {.all = true, .drops = options_.decision != nullptr};
  std::optional<Form> form = FormOfNewTiles();
  if (!form.has_value() && options_.key_channels == nullptr) {
    cut = 0;  // too few rows when the choice was made: the next prompt's end chooses channels
  } else if (!form.has_value() && cut > 0) {
    absl::StatusOr<Form> stored = StoreKeyChannels(*options_.key_channels);
    if (!stored.ok()) return stored.status();
    form = *std::move(stored);
  }
  left_dense_.emplace();
  if (cut < rows->count()) {
    left_dense_ = DenseRows{.reason = DenseReason::kNewest,
                            .first_position = rows->positions()[cut],
                            .tokens = rows->count() - cut};
  }
  if (cut == 0 && !swap.drops) return std::nullopt;
  for (std::uint64_t done = 0; done < cut;) {
    const std::uint64_t some = std::min<std::uint64_t>(cut - done, cache::kMaxSegmentEntries);
    absl::StatusOr<std::shared_ptr<Segment>> segment = Encoded(*form, *rows, done, some);
    if (!segment.ok()) return segment.status();
    if (*segment == nullptr) {
      // The form cannot represent a value: the rows stay dense for good.
      if (absl::Status status = AddPlain(*rows, done, some, swap); !status.ok()) return status;
      swap.segments.back()->SealDense();
      left_dense_ = DenseRows{.reason = DenseReason::kValueOutOfRange,
                              .first_position = rows->positions()[done],
                              .tokens = some};
      options_.counters->left_plain.fetch_add(1, std::memory_order_relaxed);
    } else {
      swap.segments.push_back(*std::move(segment));
      options_.counters->segments_sealed.fetch_add(1, std::memory_order_relaxed);
    }
    done += some;
  }
  const std::uint64_t chosen = swap.drops ? std::max(cut, CountDecided(*rows)) : cut;
  absl::Status status = AddPlain(*rows, cut, chosen - cut, swap);
  if (swap.drops) Settle(swap);
  if (status.ok()) status = AddPlain(*rows, chosen, rows->count() - chosen, swap);
  if (!status.ok()) return status;
  return swap;
}

absl::StatusOr<LaneCoder::Form> LaneCoder::StoreKeyChannels(
    const std::vector<std::uint32_t>& channels) {
  const kernels::TileShape shape =
      policies::KeyChannelShape(*options_.policy->key_channels, geometry_);
  TESSERA_CHECK(channels.size() == shape.key.channels,
                "the number of kept channels differs from the form's");
  kernels::RotationView matrices = {.type = kernels::ElementType::kBf16};
  kernels::AlignedBytes matrix(kernels::RotationBytes(shape, shape.key, matrices.type));
  std::fill_n(matrix.data(), matrix.size(), std::byte{0});
  const std::uint16_t one = kernels::FloatToBf16(1);
  for (std::size_t i = 0; i < channels.size(); ++i) {
    std::memcpy(matrix.data() + (i * shape.head_dim + channels[i]) * sizeof one, &one, sizeof one);
  }
  matrices.key = matrix.data();
  options_.counters->strategies_made.fetch_add(1, std::memory_order_relaxed);
  return Store(shape, matrices, {});
}

}  // namespace tessera::compaction
