// Choices of token policies are the same on every device, and download no keys from a device with
// its own memory.

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/compaction/lanes/element.h"
#include "daemon/compaction/lanes/token_selector.h"
#include "daemon/policies/grammar/parse.h"
#include "tests/unit/compaction/test_node.h"

namespace tessera::compaction {
namespace {

using testing::HasSubstr;

// Keys that are robust against rounding. Each token has its own grade, in steps that every query
// separates by some percent: channels 0 and 1 encode it in units of 16 and of 1. Each also has one
// of a few directions, which outweighs the grade.
class GradedRows final : public cache::MadeRows {
 public:
  // `alike`: all lanes have the same order, and so do sums over lanes.
  GradedRows(const shm::LaneLayout& layout, std::uint64_t seed, bool alike)
      : MadeRows(layout), seed_(seed), alike_(alike) {}

  // For groups of four tokens: groups are in random order, and each stays together.
  std::uint64_t Grade(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t token) const {
    if (alike_) kv_head = 0;
    std::vector<std::uint64_t> order(kTokens / 4);
    std::iota(order.begin(), order.end(), 0u);
    std::mt19937_64 random(seed_ + 31 * layer + kv_head);
    std::shuffle(order.begin(), order.end(), random);
    return 4 * order[token / 4] + token % 4;
  }
  void Make(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    const kernels::DenseTile tile = layout_.tile(layer);
    std::memset(key, 0, count * tile.row_bytes());
    std::memset(value, 0, count * tile.row_bytes());
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t grade = Grade(layer, kv_head, first + i);
      std::byte* const row = key + i * tile.row_bytes();
      SetElement(row, tile.type, 0, static_cast<float>(grade / 16));
      SetElement(row, tile.type, 1, static_cast<float>(grade % 16));
      std::mt19937_64 random(seed_ + 7919 * (first + i));
      SetElement(row, tile.type, static_cast<std::uint32_t>(8 + random() % 5), 40);
    }
  }
  // A query whose product with a key is half the key's grade, scaled.
  static std::vector<std::byte> Query(const kernels::DenseTile& tile, float times) {
    std::vector<std::byte> row(tile.row_bytes());
    SetElement(row.data(), tile.type, 0, 8 * times);
    SetElement(row.data(), tile.type, 1, 0.5f * times);
    return row;
  }

  static constexpr std::uint64_t kTokens = 160;

 private:
  const std::uint64_t seed_;
  const bool alike_;
};

class ChoicesTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kPrompt = 120;
  static constexpr std::uint64_t kDecoded = 20;

  ChoicesTest() {
    const kernels::ElementType types[] = {kernels::ElementType::kBf16, kernels::ElementType::kFp16,
                                          kernels::ElementType::kFp32};
    spec_ = cache::SmallModel("graded", 2, 2, random_.Pick(types));
    spec_.delimiter_token_ids = {7};
  }

  struct Chosen {
    std::vector<policies::LayerDecision> decisions;  // for the prompt, and for the tokens after it
    std::uint64_t reads = 0;
    std::uint64_t looks = 0;
  };

  // The worker's observations of tokens [first, end).
  void Show(const cache::Model& model, const policies::Policy& policy, const GradedRows& rows,
            std::uint64_t first, std::uint64_t end, LayerState& state) {
    const policies::Needs needs = policies::NeedsOf(policy);
    const kernels::LayerGeometry& geometry = model.geometry(kLayer);
    const kernels::DenseTile tile = model.layout().tile(kLayer);
    std::mt19937_64 drawn(query_seed_);
    const auto append = [&](std::uint64_t count, std::vector<std::byte>& to) {
      for (std::uint64_t i = 0; i < count * geometry.query_heads; ++i) {
        const std::vector<std::byte> row =
            GradedRows::Query(tile, static_cast<float>(1 + drawn() % 3));
        to.insert(to.end(), row.begin(), row.end());
      }
    };
    const bool decoded = first != 0;
    const double tokens = static_cast<double>(end);
    const auto up = [](double number) { return static_cast<std::uint64_t>(std::ceil(number)); };
    const std::uint64_t last =
        decoded ? end - first
                : std::max<std::uint64_t>(needs.last_queries, up(needs.last_share * tokens));
    ObservedLayer shown = {.layer = kLayer, .tokens = end};
    std::vector<std::byte> last_rows;
    append(last, last_rows);
    shown.last = {end - last, last, last_rows.data()};
    const std::uint64_t norm = decoded ? 0 : up(needs.norm_share * tokens);
    std::vector<std::byte> norm_rows;
    append(norm, norm_rows);
    std::vector<std::uint64_t> positions;
    for (std::uint64_t i = 0; i < norm * geometry.query_heads; ++i) {
      positions.push_back(2 * (i % norm));
    }
    shown.norm = {norm, positions, norm_rows.data()};
    std::vector<float> sums;
    for (std::uint32_t head = 0; needs.attention_sums && !decoded && head < 2; ++head) {
      for (std::uint64_t t = 0; t < end; ++t) {
        sums.push_back(100.0f * static_cast<float>(rows.Grade(kLayer, head, t)));
      }
    }
    shown.sums = {0, sums.size() / 2, sums.data()};
    const absl::Status status = state.observation.Take(
        shown, needs, model, kernels::OperationsOf(kernels::BestImplementation()), budget_);
    EXPECT_TRUE(status.ok()) << status;
  }

  absl::StatusOr<Chosen> Choose(TestNode& node, const std::string& text) {
    const auto sequence = node.NewSequence(spec_);
    const GradedRows rows(node.model().layout(), row_seed_, text.starts_with("tova"));
    const absl::StatusOr<policies::Policy> policy = policies::ParsePolicy(text);
    EXPECT_TRUE(policy.ok()) << policy.status();
    std::vector<policies::TextMark> marks(GradedRows::kTokens);
    for (std::size_t i = 0; i < marks.size(); i += 23) marks[i] = policies::TextMark::kDelimiter;
    const TokenSelector chooser({.sequence = sequence.get(), .policy = &*policy, .text = marks},
                                kLayer);
    LayerState state;
    Chosen chosen;
    const auto append = [&](std::uint64_t first, std::uint64_t count) {
      const auto held = sequence->Append(
          {.first_layer = 0, .layers = 2, .first_token = first, .tokens = count}, rows);
      EXPECT_TRUE(held.ok()) << held.status();
    };
    const auto choose = [&]() -> absl::Status {
      const std::uint64_t reads = node.device().reads();
      const std::uint64_t looks = node.device().looks();
      absl::StatusOr<LayerChoice> choice = chooser.Choose(state);
      if (!choice.ok()) return choice.status();
      chosen.reads += node.device().reads() - reads;
      chosen.looks += node.device().looks() - looks;
      chosen.decisions.push_back(choice->lanes);
      state.memory = choice->memory;
      state.decided_until = choice->until;
      return absl::OkStatus();
    };
    append(0, kPrompt);
    // Part of it in a lossless packed form.
    kernels::TileShape shape = kernels::DenseShape(64, spec_.type);
    shape.format = spec_.type == kernels::ElementType::kFp16 ? kernels::TileFormat::kPackedFp16
                                                             : kernels::TileFormat::kPackedBf16;
    if (packs_) {
      const auto packed = sequence->Pack({.shapes = {shape, shape}}, cache::Proceed);
      EXPECT_TRUE(packed.ok()) << packed.status();
    }
    Show(node.model(), *policy, rows, 0, kPrompt, state);
    absl::Status status = choose();
    if (status.ok() && policies::NeedsOf(*policy).decode_queries) {
      append(kPrompt, kDecoded);
      Show(node.model(), *policy, rows, kPrompt, kPrompt + kDecoded, state);
      status = choose();
    }
    EXPECT_TRUE(node.world().tenant().FreeSequence(sequence->id()).ok());
    if (!status.ok()) return status;
    return chosen;
  }

  static constexpr std::uint32_t kLayer = 1;
  TestRandom random_;
  const std::uint64_t row_seed_ = random_.Bits() >> 8;
  const std::uint64_t query_seed_ = random_.Bits() >> 8;
  pool::Account budget_{"test", 0};
  bool packs_ = false;
  cache::ModelSpec spec_;
  TestNode cpu_{DeviceKind::kCpu};
  TestNode gpu_{DeviceKind::kGpu};
};

TEST_F(ChoicesTest, AreTheSameOnAGpuAndNoKeyIsReadThere) {
  for (const bool packs : {false, true}) {
    packs_ = packs;
    for (const char* text :
         {"snapkv:tokens=40,window=8,kernel=1", "pyramidkv:tokens=50,window=8,kernel=1,beta=2",
          "chunkkv:tokens=40,window=8,chunk=4", "chunkkv:tokens=40,window=8,chunk=4,scope=head",
          "semantickv:sink=4,recent_ratio=0.05,keep_total=0.3,lambda=0.1,mask=none,norm=fixed",
          "semanticache:tau=0.5,sink=2,recent=4,max_chunk=32",
          "semanticache:tau=0.5,sink=2,recent=4,max_chunk=32,scope=layer",
          "semanticache:tau=0.5,sink=2,recent=4,max_chunk=32,delimiters=0", "tova:budget=120",
          "snapkv:tokens=60,window=8+semanticache:tau=0.5,sink=2,recent=4,max_chunk=32",
          "h2o:heavy=90,recent=30"}) {
      SCOPED_TRACE(Concat(text, packs ? ", packed" : ", plain"));
      // Packed rows no longer wait for a choice.
      const policies::Policy policy = *policies::ParsePolicy(text);
      const bool merges_alone = policies::Merges(policy) && !policy.tokens.has_value();
      if (packs && !policies::Continues(policy) && !merges_alone) continue;
      const auto on_cpu = Choose(cpu_, text);
      const auto on_gpu = Choose(gpu_, text);
      ASSERT_TRUE(on_cpu.ok() && on_gpu.ok()) << on_cpu.status() << on_gpu.status();
      ASSERT_EQ(on_cpu->decisions.size(), on_gpu->decisions.size());
      bool all = true;
      for (std::size_t i = 0; i < on_cpu->decisions.size(); ++i) {
        for (std::size_t lane = 0; lane < 2; ++lane) {
          const policies::LaneDecision& expected = on_cpu->decisions[i][lane];
          const policies::LaneDecision& got = on_gpu->decisions[i][lane];
          EXPECT_EQ(got.kept, expected.kept);
          EXPECT_EQ(got.begins, expected.begins);
          EXPECT_EQ(got.members, expected.members);
          all &= expected.kept.size() == (i == 0 ? kPrompt : kPrompt + kDecoded);
        }
      }
      EXPECT_FALSE(all) << "nothing was chosen";
      EXPECT_EQ(on_gpu->reads, 0u);
      EXPECT_GT(on_gpu->looks, 0u);
    }
  }
}

TEST_F(ChoicesTest, ADeviceThatCannotLookIsTold) {
  const char* const text = "snapkv:tokens=40,window=8";
  for (TestNode* node : {&cpu_, &gpu_}) {
    node->device().FailObservations(absl::UnavailableError("it is gone"));
    const absl::Status status = Choose(*node, text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(AsStringView(status.message())), HasSubstr("layer 1: it is gone"));
    node->device().FailObservations(absl::OkStatus());
    node->device().set_most_lanes(0);
    EXPECT_EQ(Choose(*node, text).status().code(), absl::StatusCode::kResourceExhausted);
    // A policy based on positions needs no keys.
    EXPECT_TRUE(Choose(*node, "streaming:sink=2,recent=20").ok());
    node->device().set_most_lanes(2);
    EXPECT_TRUE(Choose(*node, text).ok());
  }
}

}  // namespace
}  // namespace tessera::compaction
