// Decodes like a worker: one image per step; per layer an append and an attend by launches whose
// parameters never change, as in a captured graph. Results are compared with attention by
// definition over the rings that the append kernel filled.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/host/step_writer.h"
#include "kernels/reference/oracle.h"
#include "tests/fakes/gpu/emulated_kernels.h"
#include "tests/fakes/seed.h"
#include "tests/unit/kernels/cuda/lanes.h"

namespace tessera::kernels::cuda {
namespace {

struct alignas(256) Line {
  std::byte bytes[256];
};

// Device memory of at least this size.
class Memory {
 public:
  explicit Memory(std::uint64_t bytes) : lines_(bytes / sizeof(Line) + 1) {}
  std::byte* data() { return lines_.data()->bytes; }
  std::uint64_t address() { return reinterpret_cast<std::uint64_t>(data()); }
  std::uint64_t bytes() const { return lines_.size() * sizeof(Line); }

 private:
  std::vector<Line> lines_;
};

constexpr std::uint32_t kBatch = 2;
constexpr std::uint32_t kRingTiles = 3;
constexpr StepLimits kLimits = {.batch = kBatch, .queries = 3, .appended = 3, .works = 12};
constexpr std::uint32_t kMaxRows = kBatch * 3;

// One layer's geometry, rings, prompt segments and buffers.
struct Layer {
  Layer(std::uint32_t kv_heads, std::uint32_t group, std::mt19937_64& random)
      : geometry{.query_heads = kv_heads * group,
                 .kv_heads = kv_heads,
                 .head_dim = 64,
                 .type = ElementType::kFp16,
                 .scale = 0.125f},
        tile{.head_dim = 64, .type = ElementType::kFp16},
        rings(kBatch * kv_heads * kRingTiles * tile.bytes()),
        prompts(kBatch * kv_heads * (1 + kPromptTiles) * tile.bytes()),
        key(kMaxRows * kv_heads * tile.row_bytes()),
        value(kMaxRows * kv_heads * tile.row_bytes()),
        query(kMaxRows * geometry.query_heads * tile.row_bytes()),
        output(kMaxRows * geometry.query_heads * 64 * 4),
        scratch(AttendScratchBytes(geometry, kLimits)) {
    for (std::uint32_t lane = 0; lane < kBatch * kv_heads; ++lane) {
      auto* table = reinterpret_cast<std::uint64_t*>(prompts.data() + Table(lane));
      for (std::uint32_t t = 0; t < kPromptTiles; ++t) {
        table[t] = Table(lane) + (1 + t) * tile.bytes();
        for (std::uint32_t row = 0; row < 2 * kTileEntries; ++row) {
          tests::FillRow(tile, random, prompts.data() + table[t] + tile.key_offset(row));
        }
      }
    }
  }

  static constexpr std::uint32_t kPromptTiles = 2;
  std::uint64_t Table(std::uint32_t lane) const { return lane * (1 + kPromptTiles) * tile.bytes(); }

  void DrawRows(std::mt19937_64& random) {
    for (Memory* rows : {&key, &value, &query}) {
      for (std::uint64_t at = 0; at + tile.row_bytes() <= rows->bytes(); at += tile.row_bytes()) {
        tests::FillRow(tile, random, rows->data() + at);
      }
    }
  }

  LayerGeometry geometry;
  DenseTile tile;
  Memory rings, prompts, key, value, query, output, scratch;
};

class Decode : public ::testing::Test {
 protected:
  Decode() : seed_(TestSeed()), random_(seed_), image_(StepBytes(Shape())) {
    layers_.emplace_back(2, 3, random_);
    layers_.emplace_back(1, 2, random_);
  }

  static StepShape Shape() {
    return {
        .batch = kBatch, .layers = 2, .lanes = kBatch * 3, .segments = kBatch * 3, .extents = 2};
  }

  // The prompts of both layers form one pool: layer l's is extent l.
  void WriteImage() {
    const std::uint64_t extent_bytes = ExtentBytes();
    StepWriter writer({image_.data(), StepBytes(Shape())}, Shape());
    const std::uint64_t bases[] = {layers_[0].prompts.address(), layers_[1].prompts.address()};
    writer.SetExtents(bases, extent_bytes);
    for (std::uint32_t b = 0; b < kBatch; ++b) writer.SetSequence(b, sequences_[b]);
    for (std::uint32_t l = 0; l < 2; ++l) {
      Layer& layer = layers_[l];
      const std::uint32_t heads = layer.geometry.kv_heads;
      // Tables hold offsets into their layer's own memory, which begins later in the pool.
      for (std::uint32_t lane = 0; lane < kBatch * heads; ++lane) {
        auto* table = reinterpret_cast<std::uint64_t*>(layer.prompts.data() + layer.Table(lane));
        for (std::uint32_t t = 0; t < Layer::kPromptTiles; ++t) {
          table[t] = l * extent_bytes + layer.Table(lane) + (1 + t) * layer.tile.bytes();
        }
      }
      writer.BeginLayer(heads, ElementType::kFp16);
      for (std::uint32_t lane = 0; lane < kBatch * heads; ++lane) {
        const SegmentSpec prompt = {.tile_table = l * extent_bytes + layer.Table(lane),
                                    .first_position = 0,
                                    .entries = kPrompt,
                                    .shape = DenseShape(64, ElementType::kFp16)};
        writer.AddLane({&prompt, 1},
                       {.ring = layer.rings.address() + lane * kRingTiles * layer.tile.bytes(),
                        .ring_tiles = kRingTiles,
                        .begin = tail_begin_[lane / heads]});
      }
    }
    ASSERT_EQ(writer.Finish(), StepStatus::kOk);
    StepLimits needed;
    writer.Widen(needed);
    ASSERT_LE(needed.works, kLimits.works);
  }

  std::uint64_t ExtentBytes() const {
    return std::max(layers_[0].prompts.bytes(), layers_[1].prompts.bytes());
  }

  void AppendLayer(std::uint32_t l) {
    Layer& layer = layers_[l];
    const auto row_bytes = static_cast<std::uint32_t>(layer.tile.row_bytes());
    tests::EmulateAppend({.step = image_.data(),
                          .key = layer.key.data(),
                          .value = layer.value.data(),
                          .fault = &fault_,
                          .row_stride = layer.geometry.kv_heads * row_bytes,
                          .layer = l,
                          .row_bytes = row_bytes,
                          .kv_heads = layer.geometry.kv_heads,
                          .max_batch = kLimits.batch,
                          .max_appended = kLimits.appended},
                         random_());
  }

  void AttendLayer(std::uint32_t l, bool appended) {
    Layer& layer = layers_[l];
    tests::EmulateAttend({.geometry = layer.geometry,
                          .appended = appended,
                          .layer = l,
                          .limits = kLimits,
                          .step = image_.data(),
                          .query = layer.query.data(),
                          .output = layer.output.data(),
                          .scratch = layer.scratch.data(),
                          .scratch_bytes = AttendScratchBytes(layer.geometry, kLimits),
                          .fault = &fault_},
                         {.blocks_x = 3, .seed = random_()});
  }

  void JudgeLayer(std::uint32_t l, bool appended) {
    for (std::uint32_t b = 0; b < kBatch; ++b) {
      for (std::uint32_t head = 0; head < layers_[l].geometry.query_heads; ++head) {
        for (std::uint32_t i = 0; i < sequences_[b].queries; ++i) {
          JudgeRow(l, b, head, i, appended);
        }
      }
    }
  }

  void JudgeRow(std::uint32_t l, std::uint32_t b, std::uint32_t head, std::uint32_t i,
                bool appended) {
    Layer& layer = layers_[l];
    const std::uint32_t lane_index = b * layer.geometry.kv_heads + head / layer.geometry.group();
    const SegmentView prompt = {.arena = layer.prompts.data() - l * ExtentBytes(),
                                .arena_bytes = ~std::uint64_t{0},
                                .tile_offsets = reinterpret_cast<const std::uint64_t*>(
                                    layer.prompts.data() + layer.Table(lane_index)),
                                .entries = kPrompt,
                                .shape = DenseShape(layer.geometry.head_dim, ElementType::kFp16)};
    const StepSequence& sequence = sequences_[b];
    const LaneView lane = {
        .segments = &prompt,
        .segment_count = 1,
        .tail = {.ring = layer.rings.data() + lane_index * kRingTiles * layer.tile.bytes(),
                 .ring_tiles = kRingTiles,
                 .begin = tail_begin_[b],
                 .end = sequence.committed + (appended ? sequence.appended : 0)}};
    const std::uint64_t row =
        (std::uint64_t{sequence.first_query_row} + i) * layer.geometry.query_heads + head;
    std::vector<double> expected(64);
    const OracleAnswer answer =
        AttendByDefinition({.geometry = &layer.geometry,
                            .lane = &lane,
                            .row = layer.query.data() + row * layer.tile.row_bytes(),
                            .query_head = head,
                            .position = sequence.first_query_position + i,
                            .causal = true},
                           expected.data());
    const auto* got = reinterpret_cast<const float*>(layer.output.data()) + row * 64;
    for (std::uint32_t c = 0; c < 64; ++c) {
      ASSERT_NEAR(got[c], expected[c], answer.value_peak * 0x1p-10)
          << "seed " << seed_ << " layer " << l << " sequence " << b << " head " << head
          << " query " << i;
    }
  }

  static constexpr std::uint32_t kPrompt = 40;
  const std::uint64_t seed_;
  std::mt19937_64 random_;
  std::vector<Layer> layers_;
  Memory image_;
  std::uint64_t fault_ = kNoFault;
  StepSequence sequences_[kBatch] = {};
  std::uint64_t tail_begin_[kBatch] = {kPrompt, kPrompt};
};

TEST_F(Decode, EveryLayerOfEveryStepSeesThePromptAndAllThatWasAppended) {
  sequences_[0].committed = sequences_[1].committed = kPrompt;
  for (int step = 0; step < 40; ++step) {
    std::uint32_t row = 0;
    for (std::uint32_t b = 0; b < kBatch; ++b) {
      StepSequence& sequence = sequences_[b];
      sequence.committed += sequence.appended;
      // A full ring frees its oldest tile, as the compactor would do.
      while (sequence.committed + kLimits.appended - tail_begin_[b] > kRingTiles * kTileEntries) {
        tail_begin_[b] = (tail_begin_[b] / kTileEntries + 1) * kTileEntries;
      }
      sequence.appended = static_cast<std::uint32_t>(random_() % (kLimits.appended + 1));
      sequence.queries = sequence.appended;
      sequence.first_query_position = sequence.committed;
      sequence.first_append_row = sequence.first_query_row = row;
      row += sequence.appended;
    }
    WriteImage();
    for (std::uint32_t l = 0; l < 2; ++l) {
      layers_[l].DrawRows(random_);
      // An attend before the append sees the layer without the new rows.
      for (const bool appended : {false, true}) {
        if (appended) AppendLayer(l);
        AttendLayer(l, appended);
        ASSERT_EQ(fault_, kNoFault);
        JudgeLayer(l, appended);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cuda
