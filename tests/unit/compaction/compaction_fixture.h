// A node whose sequences are compressed by background jobs that the test runs one at a time. Uses
// kernels that run on every machine.
#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/compaction/jobs/compactor.h"
#include "daemon/policies/grammar/validate.h"
#include "gtest/gtest.h"
#include "tests/fakes/manual_scheduler.h"
#include "tests/unit/compaction/lanes/drawn_rows.h"

namespace tessera::compaction {

inline const char* const kTiles = "encode-tiles";
inline const char* const kSeal = "seal";

// Segments of 256 tokens, or 64 if cut while decoding.
inline policies::Policy SmallMosaic() {
  policies::Policy policy;
  policy.text = "mosaic of the test";
  policy.mosaic.emplace();
  policy.mosaic->strategy.kept = {0.25};
  policy.mosaic->strategy.groups = {1};
  policy.mosaic->strategy.blocks = {8};
  policy.mosaic->strategy.values = kernels::ValueType::kBf16;
  policy.mosaic->segments = {
      .tokens = 256, .min_tokens = 64, .sinks = 0, .recent = 0, .loss_window = 64};
  return policy;
}
inline policies::Policy Quest() {
  policies::Policy policy;
  policy.text = "quest of the test";
  policy.summaries.emplace();
  policy.selection.emplace();  // summaries are useless without a selection
  return policy;
}

// A sequence and its expected content.
struct Track {
  std::shared_ptr<cache::Sequence> sequence;
  Stamps stamps;  // including the committed tail
  std::optional<cache::TestWorker::OpenTail> tail;
};

// The form of a segment as readers see it: "16 kept: 256", "plain: 20", "summed up: 32".
inline std::string FormOf(const kernels::SegmentView& segment) {
  const kernels::TileShape& shape = segment.shape;
  const std::string entries = ": " + std::to_string(segment.entries);
  if (shape.packed()) return std::to_string(shape.key.kept) + " kept" + entries;
  return (shape.summary == kernels::Summary::kNone ? "plain" : "summed up") + entries;
}

class CompactionFixture : public testing::Test {
 protected:
  using Forms = std::vector<std::string>;

  explicit CompactionFixture(std::uint64_t raw_copy_bytes = 0, std::uint64_t tenant_limit = 0)
      : world_({.tenant_limit = tenant_limit,
                .ring_tiles = 4,
                .device = &device_,
                .raw_copy_bytes = raw_copy_bytes}) {}

  void TearDown() override {
    world_.tenant().EndSession(worker_->session().id());
    worker_.reset();
    while (scheduler_.RunNext().has_value()) {
    }
    world_.ExpectBaseline();
    EXPECT_EQ(world_.raw_copies().used_bytes(), 0u);
    std::fclose(log_);
  }

  Track NewTrack(const policies::Policy& policy) {
    Track track = {world_.NewSequence(worker_->session(), *model_), {}, std::nullopt};
    const absl::Status status = compactor_.SetPolicy(*track.sequence, policy);
    EXPECT_TRUE(status.ok()) << status;
    return track;
  }
  Track Fork(const Track& parent) {
    const auto child = compactor_.Fork(*parent.sequence, [&] {
      return world_.tenant().Fork(worker_->session(), parent.sequence->id());
    });
    EXPECT_TRUE(child.ok()) << child.status();
    return {*child, parent.stamps, std::nullopt};
  }

  // Appends like a request.
  void AppendStamps(Track& track, const Stamps& stamps, bool end_of_prompt = false) {
    const Compactor::Rows rows = {.layers = model_->layers(),
                                  .end_of_prompt = end_of_prompt,
                                  .first_token = track.stamps.size(),
                                  .until = track.stamps.size() + stamps.size()};
    const absl::StatusOr<std::uint64_t> tokens =
        compactor_.Append(track.sequence, rows, DrawnRows(model_->layout(), stamps));
    ASSERT_TRUE(tokens.ok()) << tokens.status();
    track.tail.reset();
    track.stamps.insert(track.stamps.end(), stamps.begin(), stamps.end());
  }
  void Append(Track& track, std::uint64_t tokens, std::uint64_t subspace,
              bool end_of_prompt = false) {
    AppendStamps(track, DrawTokens(tokens, subspace), end_of_prompt);
  }
  // Decodes through gRPC calls: one token, layer by layer.
  void DecodeByCalls(Track& track, const Stamps& stamps) {
    for (const std::uint64_t stamp : stamps) {
      for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
        const Compactor::Rows rows = {.first_layer = layer,
                                      .layers = 1,
                                      .decoded = true,
                                      .first_token = track.stamps.size(),
                                      .until = track.stamps.size() + 1};
        const auto tokens =
            compactor_.Append(track.sequence, rows, DrawnRows(model_->layout(), {stamp}));
        ASSERT_TRUE(tokens.ok()) << tokens.status();
      }
      track.stamps.push_back(stamp);
    }
  }
  void Truncate(Track& track, std::uint64_t tokens) {
    ASSERT_TRUE(compactor_.Truncate(*track.sequence, tokens).ok());
    track.tail.reset();
    track.stamps.resize(tokens);
  }
  // Cuts from within a job, for which the compactor would wait.
  void TruncateInsideJob(Track& track, std::uint64_t tokens) {
    ASSERT_TRUE(track.sequence->Truncate(tokens).ok());
    track.tail.reset();
    track.stamps.resize(tokens);
  }

  // Decodes through the tail: whole tiles and a remainder.
  void DecodeStamps(Track& track, const Stamps& stamps) {
    if (!track.tail.has_value()) track.tail = *worker_->Open(*track.sequence);
    for (const std::uint64_t stamp : stamps) {
      if (!worker_->HasRoom(*track.sequence, track.stamps.size())) Absorb(track);
      ASSERT_TRUE(worker_->HasRoom(*track.sequence, track.stamps.size()));
      WriteTail(track, stamp);
    }
    Absorb(track);
  }
  void Decode(Track& track, std::uint64_t tokens, std::uint64_t subspace) {
    DecodeStamps(track, DrawTokens(tokens, subspace));
  }
  void WriteTail(Track& track, std::uint64_t stamp) {
    const shm::LaneLayout& layout = model_->layout();
    std::byte key[256 * 4], value[256 * 4];
    for (std::uint32_t layer = 0; layer < layout.layers(); ++layer) {
      for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
        DrawRow(stamp, {layer, head, cache::RowKind::kKey}, layout.tile(layer), key);
        DrawRow(stamp, {layer, head, cache::RowKind::kValue}, layout.tile(layer), value);
        shm::StoreRow(layout.ring(track.tail->region, layer, head), track.stamps.size(), key,
                      value);
      }
    }
    track.stamps.push_back(stamp);
    worker_->Commit(*track.tail, track.stamps.size());
  }
  void Absorb(Track& track) {
    const absl::StatusOr<std::uint64_t> moved = track.sequence->AbsorbFullTiles();
    ASSERT_TRUE(moved.ok()) << moved.status();
    Collect();
    if (*moved > 0) compactor_.TailsMoved(track.sequence);
  }

  // Runs all queued jobs, and those that they queue.
  void RunAll() {
    while (scheduler_.RunNext().has_value()) {
    }
    Collect();
  }
  void Collect() { world_.tenant().epochs().Collect(); }

  cache::SequenceView View(const Track& track) {
    absl::StatusOr<cache::SequenceView> view =
        cache::ReadSequence(world_.tenant(), *track.sequence);
    EXPECT_TRUE(view.ok()) << view.status();
    return *std::move(view);
  }
  // Returns an empty string if every lane shows what the track holds, in the forms of its segments.
  std::string Shown(const Track& track) {
    return Differs(View(track), *model_, track.stamps, thinned_from_);
  }
  // The forms of the layer's first lane.
  Forms FormsOf(const Track& track, std::uint32_t layer = 0) {
    const cache::SequenceView view = View(track);
    const std::uint32_t lane = model_->layout().lane(layer, 0);
    std::uint32_t first = 0;
    for (std::uint32_t i = 0; i < lane; ++i) first += view.lanes[i].resolved.segments;
    Forms forms;
    for (std::uint32_t i = 0; i < view.lanes[lane].resolved.segments; ++i) {
      forms.push_back(FormOf(view.segments[first + i]));
    }
    return forms;
  }
  std::uint64_t RawBytes() { return world_.raw_copies().used_bytes(pool::MemoryTag::kRawCopies); }
  std::uint64_t Used(pool::MemoryTag tag) { return world_.tenant().account().used_bytes(tag); }
  static constexpr const char* kShortSegments = "segments so short";
  // Log lines, except warnings about short segments, which these tests use.
  int LogLines() { return LinesWith("") - LinesWith(kShortSegments); }
  int LinesWith(const char* text) {
    std::fflush(log_);
    const long end = std::ftell(log_);
    std::rewind(log_);
    std::string line;
    int lines = 0;
    for (int c = std::fgetc(log_); c != EOF; c = std::fgetc(log_)) {
      line += static_cast<char>(c);
      if (c != '\n') continue;
      lines += line.find(text) != std::string::npos ? 1 : 0;
      line.clear();
    }
    std::fseek(log_, end, SEEK_SET);
    return lines;
  }

  // Channels that rows keep before some are reduced; 0: none are reduced.
  std::uint16_t thinned_from_ = 0;
  TestRandom random_;
  std::FILE* log_ = std::tmpfile();
  Logger logger_{LogOptions{.stream = log_}};
  device::CpuDevice device_{cache::ReferenceKernels()};
  cache::World world_;
  ManualScheduler scheduler_;
  int attentions_ = 0;
  Compactor compactor_{
      Compactor::Options{.scheduler = &scheduler_,
                         .logger = &logger_,
                         .clock = &world_.clock(),
                         .operations = &kernels::OperationsOf(kernels::BestImplementation()),
                         .on_attention = [this] { ++attentions_; }}};
  std::optional<cache::TestWorker> worker_{std::in_place, world_.tenant(), world_.OpenSession()};
  std::shared_ptr<const cache::Model> model_ = world_.Register(cache::SmallModel("small", 1, 2));
};

}  // namespace tessera::compaction
