// Rows with strides give what the same rows give without them, in every call that takes rows.

#include <cstring>
#include <span>
#include <string>

#include "tests/e2e/c_worker.h"

namespace tessera {
namespace {

// Rows laid out with gaps, and heads before tokens or after them.
struct Spread {
  // `dense`: [layers][tokens][heads][elements].
  Spread(std::span<const std::uint16_t> dense, std::uint64_t layers, std::uint64_t tokens,
         std::uint64_t heads, std::uint64_t elements, bool heads_first, TestRandom& random) {
    const std::uint64_t gap = 2 * (1 + random.Below(40));
    const std::uint64_t row = elements + gap;
    strides.head = static_cast<std::int64_t>((heads_first ? tokens * row : row) * 2);
    strides.token = static_cast<std::int64_t>((heads_first ? row : heads * row + gap) * 2);
    strides.layer = static_cast<std::int64_t>((heads * tokens * row + tokens * gap + gap) * 2);
    rows.assign(layers * static_cast<std::uint64_t>(strides.layer) / 2, 0x7fc0);  // not a number
    for (std::uint64_t i = 0; i < layers * tokens * heads; ++i) {
      std::memcpy(At(i / (tokens * heads), i / heads % tokens, i % heads),
                  dense.data() + i * elements, elements * 2);
    }
  }
  std::byte* At(std::uint64_t layer, std::uint64_t token, std::uint64_t head) {
    return reinterpret_cast<std::byte*>(rows.data()) +
           static_cast<std::int64_t>(layer) * strides.layer +
           static_cast<std::int64_t>(token) * strides.token +
           static_cast<std::int64_t>(head) * strides.head;
  }
  std::vector<std::uint16_t> rows;
  tessera_strides strides = {0, 0, 0};
};

class CStrides : public CInterface {
 protected:
  std::string Entries(tessera_sequence* sequence) {
    tessera_text json = nullptr;
    EXPECT_EQ(tessera_sequence_describe_json(sequence, TESSERA_DETAIL_ENTRIES, &json, &error_),
              TESSERA_OK);
    std::string text = json;
    tessera_free_text(json);
    // What follows tells where the sequence's block lies.
    const std::size_t lanes = text.find("\"lane\":");
    return text.substr(lanes, text.find("\"directory_offset\"") - lanes);
  }
  std::vector<std::uint16_t> QueriesOf(const SyntheticSequence& truth, std::uint32_t layer,
                                       std::uint64_t first, std::uint64_t count) {
    std::vector<std::uint16_t> queries;
    for (std::uint64_t t = first; t < first + count; ++t) {
      const auto row = truth.Query(layer, t);
      queries.insert(queries.end(), row.begin(), row.end());
    }
    return queries;
  }
};

TEST_F(CStrides, EveryCallTakesThem) {
  for (const bool map : {true, false}) {
    for (const bool heads_first : {true, false}) {
      SCOPED_TRACE(std::string(map ? "mapped" : "remote") + (heads_first ? " heads first" : ""));
      ASSERT_NO_FATAL_FAILURE(Attach(map));
      SyntheticSequence truth(shape_, random_.Bits());
      truth.Grow(kPrompt);
      tessera_sequence* dense = Create("h2o:heavy=30,recent=30");
      tessera_sequence* spread = Create("h2o:heavy=30,recent=30");
      AppendPrompt(dense, truth);
      ShowPrompt(dense, truth, /*keys=*/true);

      Spread key(truth.KeysOfAllLayers(0, kPrompt), shape_.layers, kPrompt, shape_.kv_heads,
                 shape_.head_dim, heads_first, random_);
      Spread value(truth.ValuesOfAllLayers(0, kPrompt), shape_.layers, kPrompt, shape_.kv_heads,
                   shape_.head_dim, heads_first, random_);
      tessera_append append = TESSERA_APPEND_INIT;
      append.key = key.rows.data();
      append.value = value.rows.data();
      append.key_strides = key.strides;
      append.value_strides = value.strides;
      append.bytes = shape_.layers * kPrompt * shape_.kv_row() * 2;
      append.tokens = kPrompt;
      ASSERT_EQ(tessera_sequence_append(spread, &append, nullptr, &error_), TESSERA_OK)
          << error_.message;
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        Spread query(QueriesOf(truth, layer, 0, kPrompt), 1, kPrompt, shape_.query_heads,
                     shape_.head_dim, heads_first, random_);
        Spread keys(truth.Key(layer, 0, kPrompt), 1, kPrompt, shape_.kv_heads, shape_.head_dim,
                    heads_first, random_);
        tessera_observation shown = TESSERA_OBSERVATION_INIT;
        shown.layer = layer;
        shown.query = query.rows.data();
        shown.query_bytes = kPrompt * shape_.query_row() * 2;
        shown.query_strides = query.strides;
        shown.key = keys.rows.data();
        shown.key_bytes = kPrompt * shape_.kv_row() * 2;
        shown.key_strides = keys.strides;
        ASSERT_EQ(tessera_sequence_observe(spread, &shown, &error_), TESSERA_OK) << error_.message;
      }
      ASSERT_EQ(tessera_sequence_compress(dense, &error_), TESSERA_OK) << error_.message;
      ASSERT_EQ(tessera_sequence_compress(spread, &error_), TESSERA_OK) << error_.message;
      EXPECT_TRUE(Entries(dense) == Entries(spread));

      // Steps of three tokens, and reads: outputs too.
      constexpr std::uint64_t kNew = 3;
      truth.Grow(kNew);
      tessera_step_options options = TESSERA_STEP_OPTIONS_INIT;
      options.new_tokens = kNew;
      const std::uint64_t query_bytes = kNew * shape_.query_row() * 2;
      std::vector<float> plain_output[2];
      for (tessera_sequence* sequence : {dense, spread}) {
        const bool strided = sequence == spread;
        tessera_step* step = nullptr;
        ASSERT_EQ(tessera_step_begin(worker_, &sequence, 1, &options, &step, &error_), TESSERA_OK)
            << error_.message;
        for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
          const auto k = truth.Key(layer, kPrompt, kNew);
          const auto v = truth.Value(layer, kPrompt, kNew);
          const auto q = QueriesOf(truth, layer, kPrompt, kNew);
          Spread ks(k, 1, kNew, shape_.kv_heads, shape_.head_dim, heads_first, random_);
          Spread vs(v, 1, kNew, shape_.kv_heads, shape_.head_dim, heads_first, random_);
          Spread qs(q, 1, kNew, shape_.query_heads, shape_.head_dim, heads_first, random_);
          std::vector<std::uint16_t> nothing(q.size(), 0);
          Spread os(nothing, 1, kNew, shape_.query_heads, shape_.head_dim, heads_first, random_);
          tessera_step_tensors tensors = TESSERA_STEP_TENSORS_INIT;
          tensors.key = strided ? ks.rows.data() : k.data();
          tensors.value = strided ? vs.rows.data() : v.data();
          tensors.key_bytes = k.size() * 2;
          tensors.query = strided ? qs.rows.data() : q.data();
          tensors.query_bytes = query_bytes;
          tensors.output = strided ? os.rows.data() : nothing.data();
          tensors.output_bytes = query_bytes;
          tensors.output_type = TESSERA_BF16;
          if (strided) {
            tensors.key_strides = ks.strides;
            tensors.value_strides = vs.strides;
            tensors.query_strides = qs.strides;
            tensors.output_strides = os.strides;
          }
          const std::vector<std::uint16_t> before = os.rows;
          ASSERT_EQ(tessera_step_append_and_attend(step, layer, &tensors, &error_), TESSERA_OK)
              << error_.message;
          std::vector<float>& output = plain_output[strided];
          std::size_t outside = before.size();
          for (std::uint64_t i = 0; i < kNew * shape_.query_heads; ++i) {
            const std::byte* const row =
                strided
                    ? os.At(0, i / shape_.query_heads, i % shape_.query_heads)
                    : reinterpret_cast<const std::byte*>(nothing.data()) + i * shape_.head_dim * 2;
            for (std::uint32_t e = 0; e < shape_.head_dim; ++e) {
              std::uint16_t bits = 0;
              std::memcpy(&bits, row + e * 2, 2);
              output.push_back(kernels::Bf16ToFloat(bits));
              --outside;
            }
          }
          if (!strided) continue;
          // The gaps are not written.
          std::size_t gaps = 0;
          for (const std::uint16_t bits : os.rows) gaps += bits == 0x7fc0;
          EXPECT_EQ(gaps, outside);
        }
        ASSERT_EQ(tessera_step_end(step, nullptr, 0, &error_), TESSERA_OK) << error_.message;
        tessera_step_destroy(step);
      }
      EXPECT_EQ(plain_output[0], plain_output[1]);

      const auto q = QueriesOf(truth, 1, kPrompt, kNew);
      Spread qs(q, 1, kNew, shape_.query_heads, shape_.head_dim, heads_first, random_);
      std::vector<std::uint16_t> straight(q.size(), 0);
      Spread os(straight, 1, kNew, shape_.query_heads, shape_.head_dim, heads_first, random_);
      tessera_read_tensors tensors = TESSERA_READ_TENSORS_INIT;
      tensors.queries = kNew;
      tensors.query = q.data();
      tensors.query_bytes = tensors.output_bytes = query_bytes;
      tensors.output = straight.data();
      tensors.output_type = TESSERA_BF16;
      ASSERT_EQ(tessera_attend_rpc(worker_, &spread, 1, 1, &tensors, &error_), TESSERA_OK);
      tensors.query = qs.rows.data();
      tensors.query_strides = qs.strides;
      tensors.output = os.rows.data();
      tensors.output_strides = os.strides;
      tessera_read* read = nullptr;
      ASSERT_EQ(tessera_read_begin(worker_, &spread, 1, nullptr, &read, &error_), TESSERA_OK);
      ASSERT_EQ(tessera_read_attend(read, 1, &tensors, &error_), TESSERA_OK) << error_.message;
      ASSERT_EQ(tessera_read_end(read, &error_), TESSERA_OK) << error_.message;
      tessera_read_destroy(read);
      for (std::uint64_t i = 0; i < kNew * shape_.query_heads; ++i) {
        EXPECT_EQ(std::memcmp(os.At(0, i / shape_.query_heads, i % shape_.query_heads),
                              straight.data() + i * shape_.head_dim, shape_.head_dim * 2),
                  0);
      }
      for (tessera_sequence* each : {dense, spread}) tessera_sequence_destroy(each);
    }
  }
}

TEST_F(CStrides, AProgramFromBeforeTheyExistedMeansDenseRows) {
  SyntheticSequence truth(shape_, random_.Bits());
  truth.Grow(kPrompt);
  tessera_sequence* sequence = Create("dense");
  const auto key = truth.KeysOfAllLayers(0, kPrompt);
  tessera_append append = TESSERA_APPEND_INIT;
  append.struct_size = offsetof(tessera_append, key_strides);
  append.key_strides = {1, 1, 1};  // must not be read
  append.key = append.value = key.data();
  append.bytes = key.size() * sizeof(key[0]);
  append.tokens = kPrompt;
  uint64_t tokens = 0;
  ASSERT_EQ(tessera_sequence_append(sequence, &append, &tokens, &error_), TESSERA_OK)
      << error_.message;
  EXPECT_EQ(tokens, kPrompt);
  tessera_sequence_destroy(sequence);
}

}  // namespace
}  // namespace tessera
