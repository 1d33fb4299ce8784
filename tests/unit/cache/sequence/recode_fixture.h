// Recoders that act like compaction, but without computing a strategy.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/cache/segment/build.h"
#include "daemon/cache/segment/recode.h"
#include "tests/unit/cache/sequence/pack_fixture.h"

namespace tessera::cache {

class RecodeFixture : public PackFixture {
 protected:
  using Swap = absl::StatusOr<std::optional<LaneSwap>>;

  // Dense rows of a range in host memory.
  struct Rows {
    std::vector<std::byte> keys;
    std::vector<std::byte> values;
    kernels::DenseTile tile;
    std::uint64_t count = 0;
    HostRows From(std::uint64_t first, std::uint64_t rows) const {
      return {keys.data() + first * tile.row_bytes(), values.data() + first * tile.row_bytes(),
              rows, tile};
    }
  };
  Rows Plain(const Sequence& sequence, const OpenRun& run) {
    Rows rows = {.tile = sequence.model().layout().tile(run.layer)};
    rows.keys.resize(run.plain_entries() * rows.tile.row_bytes());
    rows.values.resize(rows.keys.size());
    for (const HeldSegment& held : run.plain) {
      const std::size_t at = rows.count * rows.tile.row_bytes();
      EXPECT_TRUE(ReadDense(sequence.memory(), held, rows.tile, rows.keys.data() + at,
                            rows.values.data() + at)
                      .ok());
      rows.count += held.entries;
    }
    return rows;
  }
  absl::StatusOr<std::shared_ptr<Segment>> Encode(const Sequence& sequence,
                                                  const kernels::TileShape& shape, const Rows& rows,
                                                  std::uint64_t first, std::uint64_t count,
                                                  std::uint64_t position) {
    auto segment = std::make_shared<Segment>(shape, position);
    std::vector<device::WordStore> words;
    absl::Status status =
        ReserveTiles(sequence.memory(), static_cast<std::uint32_t>(count), *segment, words);
    if (!status.ok()) return status;
    const auto unfit =
        EncodeRows(sequence.memory(), {shape, nullptr}, rows.From(first, count), segment->Places());
    EXPECT_TRUE(unfit.ok() && !unfit->has_value());
    EXPECT_TRUE(sequence.memory().device->StoreWords(words).ok());
    return segment;
  }
  // Encodes the dense part: whole tiles in segments of at most `longest` entries (extending
  // `previous` if that grows), and a dense remainder.
  Recoder Into(const std::shared_ptr<Sequence>& sequence, const kernels::TileShape& shape,
               std::uint64_t longest = kMaxSegmentEntries,
               std::function<void(const OpenRun&)> meanwhile = nullptr) {
    return [=, this](const OpenRun& run) -> Swap {
      const Rows rows = Plain(*sequence, run);
      const std::uint64_t full = rows.count / kernels::kTileEntries * kernels::kTileEntries;
      if (full == 0) return std::nullopt;
      LaneSwap swap = {.growing = true};
      std::uint64_t done = 0;
      const auto position = [&] { return run.first_position + run.provisional_entries() + done; };
      if (run.grows && run.previous->shape() == shape) {
        std::vector<device::WordStore> words;
        auto growth =
            ReserveGrowth(sequence->memory(), run.previous, full / kernels::kTileEntries, words);
        if (!growth.ok()) return growth.status();
        EXPECT_TRUE(EncodeRows(sequence->memory(), {shape, nullptr}, rows.From(0, full),
                               growth->tiles.places())
                        .ok());
        EXPECT_TRUE(sequence->memory().device->StoreWords(words).ok());
        swap.growth = *std::move(growth);
        done = full;
      }
      while (done < full) {
        const std::uint64_t some = std::min(full - done, longest);
        auto segment = Encode(*sequence, shape, rows, done, some, position());
        if (!segment.ok()) return segment.status();
        swap.segments.push_back(*std::move(segment));
        done += some;
      }
      if (done < rows.count) {
        auto segment = Encode(*sequence, kernels::DenseShape(rows.tile.head_dim, rows.tile.type),
                              rows, done, rows.count - done, position());
        if (!segment.ok()) return segment.status();
        swap.segments.push_back(*std::move(segment));
      }
      if (meanwhile) meanwhile(run);
      return swap;
    };
  }
  absl::Status RecodeAll(const std::shared_ptr<Sequence>& sequence,
                         const kernels::TileShape& shape) {
    for (std::uint32_t lane = 0; lane < sequence->model().lanes(); ++lane) {
      absl::Status status = sequence->Recode({.lane = lane}, Into(sequence, shape));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  // The segments of the first lane, as in "packed 32, plain 5".
  std::string Forms(const Sequence& sequence) {
    const SequenceView view = View(sequence);
    std::string forms;
    for (std::uint32_t i = 0; i < view.lanes[0].resolved.segments; ++i) {
      forms += (i > 0 ? ", " : "");
      forms += view.segments[i].shape.packed() ? "packed " : "plain ";
      forms += std::to_string(view.segments[i].entries);
    }
    return forms;
  }
};

}  // namespace tessera::cache
