// Reads through the C interface have the bits of the daemon's own answers.

#include <chrono>
#include <cstring>
#include <string>

#include "tests/e2e/c_worker.h"

namespace tessera {
namespace {

constexpr char kSelecting[] =
    "mosaickv:keep=0.25,loss_k=1,loss_v=1,recent=0,select=0.3,min_segment=32";

class CRead : public CInterface {
 protected:
  struct Answer {
    std::vector<float> output;
    std::vector<float> lse;
    bool operator==(const Answer& other) const {
      return std::memcmp(output.data(), other.output.data(), output.size() * sizeof(float)) == 0 &&
             std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
    }
  };

  std::vector<std::uint16_t> Queries(const SyntheticSequence& truth, std::uint64_t count) {
    std::vector<std::uint16_t> queries;
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto row = truth.Query(0, random_.Below(truth.tokens()));
      queries.insert(queries.end(), row.begin(), row.end());
    }
    return queries;
  }
  tessera_read_tensors Tensors(const std::vector<std::uint16_t>& queries, Answer& answer) {
    answer.output.assign(queries.size(), -7);
    answer.lse.assign(queries.size() / shape_.head_dim, -7);
    tessera_read_tensors tensors = TESSERA_READ_TENSORS_INIT;
    tensors.query = queries.data();
    tensors.query_bytes = queries.size() * sizeof(queries[0]);
    tensors.output = answer.output.data();
    tensors.output_bytes = answer.output.size() * sizeof(float);
    tensors.lse = answer.lse.data();
    tensors.lse_count = answer.lse.size();
    return tensors;
  }
  void Decode(tessera_sequence* sequence, SyntheticSequence& truth, std::uint64_t steps) {
    for (std::uint64_t i = 0; i < steps; ++i) {
      const std::uint64_t at = truth.tokens();
      truth.Grow(1);
      tessera_step* step = nullptr;
      ASSERT_EQ(tessera_step_begin(worker_, &sequence, 1, nullptr, &step, &error_), TESSERA_OK)
          << error_.message;
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto key = truth.Key(layer, at, 1);
        const auto value = truth.Value(layer, at, 1);
        tessera_step_tensors tensors = TESSERA_STEP_TENSORS_INIT;
        tensors.key = key.data();
        tensors.value = value.data();
        tensors.key_bytes = key.size() * sizeof(key[0]);
        ASSERT_EQ(tessera_step_append(step, layer, &tensors, &error_), TESSERA_OK);
      }
      ASSERT_EQ(tessera_step_end(step, nullptr, 0, &error_), TESSERA_OK) << error_.message;
      tessera_step_destroy(step);
    }
  }
  void AskDaemon(std::vector<tessera_sequence*>& batch, const tessera_read_tensors& tensors) {
    ASSERT_EQ(tessera_attend_rpc(worker_, batch.data(), batch.size(), 0, &tensors, &error_),
              TESSERA_OK)
        << error_.message;
  }
  // A read, against the same call by RPC. The daemon may pack a tile at any moment, so the answers
  // are compared once the daemon's answer before the read is that after it.
  void Compare(std::vector<tessera_sequence*> batch, const tessera_read_tensors& read_tensors,
               const tessera_read_options& options, const Answer& read_answer,
               const tessera_read_tensors& rpc_tensors, const Answer& rpc_answer) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    Answer before;
    do {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "the sequence changes for ever";
      AskDaemon(batch, rpc_tensors);
      before = rpc_answer;
      tessera_read* read = nullptr;
      ASSERT_EQ(tessera_read_begin(worker_, batch.data(), batch.size(), &options, &read, &error_),
                TESSERA_OK)
          << error_.message;
      ASSERT_EQ(tessera_read_attend(read, 0, &read_tensors, &error_), TESSERA_OK) << error_.message;
      ASSERT_EQ(tessera_read_end(read, &error_), TESSERA_OK) << error_.message;
      tessera_read_destroy(read);
      AskDaemon(batch, rpc_tensors);
    } while (!(before == rpc_answer));
    EXPECT_TRUE(read_answer == rpc_answer);
    for (const float lse : rpc_answer.lse) EXPECT_NE(lse, -7);
  }
};

TEST_F(CRead, HasTheBitsOfTheDaemonsAnswer) {
  tessera_executor* team = nullptr;
  ASSERT_EQ(tessera_executor_create(2, &team, &error_), TESSERA_OK);
  for (const bool map : {true, false}) {
    ASSERT_NO_FATAL_FAILURE(Attach(map));
    for (const char* policy :
         {"dense", kSelecting, "mosaickv:keep=0.25,loss_k=1,loss_v=1,recent=0,min_segment=32"}) {
      SyntheticSequence truth(shape_, random_.Bits());
      truth.Grow(kPrompt);
      std::vector<tessera_sequence*> batch = {Create(policy), Create("dense")};
      for (tessera_sequence* sequence : batch) AppendPrompt(sequence, truth);
      ASSERT_EQ(tessera_sequence_compress(batch[0], &error_), TESSERA_OK) << error_.message;
      for (const std::uint64_t decoded : {0, 3, 40}) {
        SCOPED_TRACE(std::string(policy) + (map ? " mapped " : " remote ") +
                     std::to_string(decoded));
        Decode(batch[0], truth, decoded);  // with a tail; the other one has none
        for (const std::uint32_t count : {1u, 5u, 150u}) {
          const std::vector<std::uint16_t> queries = Queries(truth, 2 * count + 3);
          const std::uint32_t each[] = {count, count + 3};
          const std::uint64_t positions[] = {kPrompt + 1000, 50};
          for (int form = 0; form < 4; ++form) {
            Answer read_answer, rpc_answer;
            tessera_read_tensors tensors = Tensors(queries, read_answer);
            tensors.queries_each = each;
            tensors.causal = form % 2;
            if (form >= 2) tensors.first_query_positions = positions;
            tessera_read_tensors by_rpc = Tensors(queries, rpc_answer);
            by_rpc.queries_each = each;
            by_rpc.causal = tensors.causal;
            by_rpc.first_query_positions = tensors.first_query_positions;
            tessera_read_options options = TESSERA_READ_OPTIONS_INIT;
            if (form == 3) {
              options.parallel_for = tessera_executor_run;
              options.parallel_context = team;
            }
            ASSERT_NO_FATAL_FAILURE(
                Compare(batch, tensors, options, read_answer, by_rpc, rpc_answer));
          }
        }
      }
      for (tessera_sequence* sequence : batch) tessera_sequence_destroy(sequence);
    }
  }
  tessera_executor_destroy(team);
}

TEST_F(CRead, OneReadServesManyShapesAndSelections) {
  SyntheticSequence truth(shape_, random_.Bits());
  truth.Grow(kPrompt);
  tessera_sequence* sequence = Create(kSelecting);
  AppendPrompt(sequence, truth);
  ASSERT_EQ(tessera_sequence_compress(sequence, &error_), TESSERA_OK) << error_.message;
  tessera_read* read = nullptr;
  ASSERT_EQ(tessera_read_begin(worker_, &sequence, 1, nullptr, &read, &error_), TESSERA_OK);
  tessera_selection rule = TESSERA_SELECTION_INIT;
  rule.entries = 32;
  for (const std::uint32_t count : {3u, 1u, 3u}) {
    for (const tessera_selection* selection : {static_cast<tessera_selection*>(nullptr), &rule}) {
      const std::vector<std::uint16_t> queries = Queries(truth, count);
      Answer here, there;
      tessera_read_tensors tensors = Tensors(queries, here);
      tensors.queries = count;
      tensors.selection = selection;
      ASSERT_EQ(tessera_read_attend(read, 1, &tensors, &error_), TESSERA_OK) << error_.message;
      tensors.output = there.output.data();
      tensors = Tensors(queries, there);
      tensors.queries = count;
      tensors.selection = selection;
      ASSERT_EQ(tessera_attend_rpc(worker_, &sequence, 1, 1, &tensors, &error_), TESSERA_OK)
          << error_.message;
      EXPECT_TRUE(here == there);
    }
  }
  // A call that is refused leaves the read open, and the next one sound.
  Answer wrong;
  const std::vector<std::uint16_t> queries = Queries(truth, 2);
  tessera_read_tensors tensors = Tensors(queries, wrong);
  EXPECT_EQ(tessera_read_attend(read, 0, &tensors, &error_), TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(error_.message, HasSubstr("query has"));
  tensors.queries = 0;
  EXPECT_EQ(tessera_read_attend(read, 0, &tensors, &error_), TESSERA_INVALID_ARGUMENT);
  tensors.queries = 2;
  EXPECT_EQ(tessera_read_attend(read, 9, &tensors, &error_), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_read_attend(read, 0, &tensors, &error_), TESSERA_OK) << error_.message;
  // Meanwhile the sequence takes no other call.
  EXPECT_EQ(tessera_sequence_compress(sequence, &error_), TESSERA_FAILED_PRECONDITION);
  EXPECT_EQ(error_.cause, static_cast<std::uint32_t>(TESSERA_CAUSE_SEQUENCE_BUSY));
  ASSERT_EQ(tessera_read_end(read, &error_), TESSERA_OK) << error_.message;
  EXPECT_EQ(tessera_read_attend(read, 0, &tensors, &error_), TESSERA_FAILED_PRECONDITION);
  tessera_read_destroy(read);
  tessera_sequence_destroy(sequence);
}

TEST_F(CRead, CopiesTheRowsOfALane) {
  SyntheticSequence truth(shape_, random_.Bits());
  truth.Grow(kPrompt);
  tessera_sequence* sequence = Create("dense");
  AppendPrompt(sequence, truth);
  Decode(sequence, truth, 3);
  tessera_lane_rows rows = TESSERA_LANE_ROWS_INIT;
  rows.layer = 1;
  rows.kv_head = 1;
  ASSERT_EQ(tessera_sequence_read(sequence, &rows, &error_), TESSERA_OK) << error_.message;
  EXPECT_EQ(rows.entries, 0u);
  EXPECT_EQ(rows.lane_entries, kPrompt + 3);
  EXPECT_EQ(rows.tokens, kPrompt + 3);
  const std::size_t dim = shape_.head_dim;
  std::vector<std::uint16_t> key(rows.lane_entries * dim);
  std::vector<std::uint16_t> value(key.size());
  std::vector<std::uint64_t> positions(rows.lane_entries);
  std::vector<float> weights(rows.lane_entries, -7);
  rows.first_entry = 10;
  rows.entries = rows.lane_entries;
  rows.type = TESSERA_BF16;
  rows.key = key.data();
  rows.value = value.data();
  rows.position = positions.data();
  rows.weight = weights.data();
  ASSERT_EQ(tessera_sequence_read(sequence, &rows, &error_), TESSERA_OK) << error_.message;
  ASSERT_EQ(rows.entries, kPrompt + 3 - 10);
  for (std::size_t e = 0; e < rows.entries; ++e) {
    EXPECT_EQ(positions[e], e + 10);
    EXPECT_EQ(weights[e], 1);
    const auto exact_key = truth.Key(1, e + 10, 1).subspan(dim, dim);
    const auto exact_value = truth.Value(1, e + 10, 1).subspan(dim, dim);
    ASSERT_EQ(std::memcmp(&key[e * dim], exact_key.data(), 2 * dim), 0) << e;
    ASSERT_EQ(std::memcmp(&value[e * dim], exact_value.data(), 2 * dim), 0) << e;
  }
  EXPECT_EQ(weights[rows.entries], -7) << "written behind what was read";
  rows.entries = 5;  // fewer than there are, and no arrays but one
  rows.value = nullptr;
  rows.position = nullptr;
  rows.weight = nullptr;
  ASSERT_EQ(tessera_sequence_read(sequence, &rows, &error_), TESSERA_OK);
  EXPECT_EQ(rows.entries, 5u);
  rows.type = TESSERA_FP16;
  EXPECT_EQ(tessera_sequence_read(sequence, &rows, &error_), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_sequence_read(sequence, nullptr, &error_), TESSERA_INVALID_ARGUMENT);
  tessera_sequence_destroy(sequence);
}

TEST_F(CRead, RefusesWhatIsNotThere) {
  for (const bool map : {true, false}) {
    ASSERT_NO_FATAL_FAILURE(Attach(map));
    SyntheticSequence truth(shape_, random_.Bits());
    truth.Grow(kPrompt);
    tessera_sequence* sequence = Create("dense");
    tessera_read* read = nullptr;
    const std::vector<std::uint16_t> queries = Queries(truth, 1);
    Answer answer;
    tessera_read_tensors tensors = Tensors(queries, answer);
    // Nothing is held: only a query with a position can be asked, and it sees nothing.
    ASSERT_EQ(tessera_read_begin(worker_, &sequence, 1, nullptr, &read, &error_), TESSERA_OK)
        << error_.message;
    EXPECT_EQ(tessera_read_attend(read, 0, &tensors, &error_), TESSERA_INVALID_ARGUMENT);
    EXPECT_THAT(error_.message, HasSubstr("first_query_positions"));
    tessera_read_destroy(read);
    // One layer of two.
    const auto key = truth.Key(0, 0, kPrompt);
    tessera_append append = TESSERA_APPEND_INIT;
    append.key = append.value = key.data();
    append.bytes = key.size() * sizeof(key[0]);
    append.tokens = kPrompt;
    append.layers = 1;
    ASSERT_EQ(tessera_sequence_append(sequence, &append, nullptr, &error_), TESSERA_OK)
        << error_.message;
    EXPECT_EQ(tessera_read_begin(worker_, &sequence, 1, nullptr, &read, &error_),
              TESSERA_FAILED_PRECONDITION);
    EXPECT_THAT(error_.message, HasSubstr("different numbers of tokens"));
    tessera_sequence_destroy(sequence);
  }
}

TEST_F(CRead, AnOffloadedSequenceIsRestoredFirst) {
  SyntheticSequence truth(shape_, random_.Bits());
  truth.Grow(kPrompt);
  tessera_sequence* sequence = Create("dense");
  AppendPrompt(sequence, truth);
  const std::vector<std::uint16_t> queries = Queries(truth, 2);
  Answer before, after;
  tessera_read_tensors tensors = Tensors(queries, before);
  tensors.queries = 2;
  ASSERT_EQ(tessera_attend_rpc(worker_, &sequence, 1, 0, &tensors, &error_), TESSERA_OK);
  ASSERT_EQ(tessera_sequence_offload(sequence, nullptr, &error_), TESSERA_OK) << error_.message;
  tessera_read* read = nullptr;
  ASSERT_EQ(tessera_read_begin(worker_, &sequence, 1, nullptr, &read, &error_), TESSERA_OK)
      << error_.message;
  tensors = Tensors(queries, after);
  tensors.queries = 2;
  ASSERT_EQ(tessera_read_attend(read, 0, &tensors, &error_), TESSERA_OK) << error_.message;
  ASSERT_EQ(tessera_read_end(read, &error_), TESSERA_OK);
  tessera_read_destroy(read);
  EXPECT_TRUE(before == after);
  tessera_sequence_destroy(sequence);
}

TEST_F(CRead, SelectionsComeAsJson) {
  SyntheticSequence truth(shape_, random_.Bits());
  truth.Grow(kPrompt);
  tessera_sequence* sequence = Create(kSelecting);
  AppendPrompt(sequence, truth);
  ASSERT_EQ(tessera_sequence_compress(sequence, &error_), TESSERA_OK) << error_.message;
  const std::vector<std::uint16_t> queries = Queries(truth, 1);
  tessera_selection rule = TESSERA_SELECTION_INIT;
  rule.entries = 32;
  tessera_read_tensors tensors = TESSERA_READ_TENSORS_INIT;
  tensors.query = queries.data();
  tensors.query_bytes = queries.size() * sizeof(queries[0]);
  tessera_text json = nullptr;
  EXPECT_EQ(tessera_select_json(worker_, sequence, 0, &tensors, &json, &error_),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(error_.message, HasSubstr("tensors->selection is NULL"));
  tensors.selection = &rule;
  ASSERT_EQ(tessera_select_json(worker_, sequence, 0, &tensors, &json, &error_), TESSERA_OK)
      << error_.message;
  EXPECT_THAT(json, HasSubstr("\"selected_entries\":32"));
  tessera_free_text(json);
  ASSERT_EQ(tessera_sequence_describe_json(sequence, TESSERA_DETAIL_ENTRIES, &json, &error_),
            TESSERA_OK);
  EXPECT_THAT(json, HasSubstr("\"tokens\":200"));
  EXPECT_THAT(json, HasSubstr("\"position\":[0,1,2,"));
  tessera_free_text(json);
  ASSERT_EQ(tessera_stats_json(worker_, &json, &error_), TESSERA_OK);
  EXPECT_THAT(json, HasSubstr("\"device\":\"cpu\""));
  tessera_free_text(json);
  ASSERT_EQ(tessera_welcome_json(worker_, &json, &error_), TESSERA_OK);
  EXPECT_THAT(json, HasSubstr("\"prefix_hash\":\"xxh3-128/32\""));
  EXPECT_THAT(json, HasSubstr("\"session\":null"));
  tessera_free_text(json);
  tessera_sequence_destroy(sequence);
}

}  // namespace
}  // namespace tessera
