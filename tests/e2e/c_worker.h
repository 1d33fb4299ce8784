// Fixture with a worker that uses the C interface, beside those of `Tokens`.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/tessera.h"
#include "tests/e2e/tokens/token_lanes.h"

namespace tessera {

inline constexpr std::uint64_t kPrompt = 200;

class CInterface : public Tokens {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Tokens::SetUp());
    Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
    ASSERT_NO_FATAL_FAILURE(Attach(/*map=*/true));
  }
  void Attach(bool map) {
    Detach();
    const std::string address = daemon_->address();
    tessera_attach_options attach = TESSERA_ATTACH_OPTIONS_INIT;
    attach.address = address.c_str();
    attach.map_memory = map;
    ASSERT_EQ(tessera_attach(&attach, &worker_, &error_), TESSERA_OK) << error_.message;
    tessera_layer layer = TESSERA_LAYER_INIT;
    layer.query_heads = shape_.query_heads;
    layer.kv_heads = shape_.kv_heads;
    layer.head_dim = shape_.head_dim;
    const std::vector<tessera_layer> layers(shape_.layers, layer);
    tessera_model_options geometry = TESSERA_MODEL_OPTIONS_INIT;
    const client::ModelGeometry same = shape_.Geometry();
    geometry.name = same.name.c_str();
    geometry.layers = layers.data();
    geometry.layer_count = layers.size();
    geometry.rope_theta = same.rope.theta;
    geometry.delimiter_token_ids = same.delimiter_token_ids.data();
    geometry.delimiter_count = same.delimiter_token_ids.size();
    ASSERT_EQ(tessera_register_model(worker_, &geometry, &c_model_, &error_), TESSERA_OK)
        << error_.message;
  }
  void TearDown() override { Detach(); }
  void Detach() {
    tessera_model_destroy(std::exchange(c_model_, nullptr));
    tessera_detach(std::exchange(worker_, nullptr));
  }

  tessera_sequence* Create(const char* policy) {
    tessera_sequence* sequence = nullptr;
    EXPECT_EQ(tessera_sequence_create(worker_, c_model_, policy, &sequence, &error_), TESSERA_OK)
        << error_.message;
    return sequence;
  }
  void AppendPrompt(tessera_sequence* sequence, const SyntheticSequence& truth) {
    const auto key = truth.KeysOfAllLayers(0, kPrompt);
    const auto value = truth.ValuesOfAllLayers(0, kPrompt);
    tessera_append append = TESSERA_APPEND_INIT;
    append.key = key.data();
    append.value = value.data();
    append.bytes = key.size() * sizeof(key[0]);
    append.tokens = kPrompt;
    ASSERT_EQ(tessera_sequence_append(sequence, &append, nullptr, &error_), TESSERA_OK)
        << error_.message;
  }
  void ShowPrompt(tessera_sequence* sequence, const SyntheticSequence& truth, bool keys) {
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<std::uint16_t> queries;
      for (std::uint64_t t = 0; t < kPrompt; ++t) {
        const auto row = truth.Query(layer, t);
        queries.insert(queries.end(), row.begin(), row.end());
      }
      const auto rows = truth.Key(layer, 0, kPrompt);
      tessera_observation shown = TESSERA_OBSERVATION_INIT;
      shown.layer = layer;
      shown.query = queries.data();
      shown.query_bytes = queries.size() * sizeof(queries[0]);
      if (keys) {
        shown.key = rows.data();
        shown.key_bytes = rows.size() * sizeof(rows[0]);
      }
      ASSERT_EQ(tessera_sequence_observe(sequence, &shown, &error_), TESSERA_OK) << error_.message;
    }
  }

  tessera_worker* worker_ = nullptr;
  tessera_model* c_model_ = nullptr;
  tessera_error error_ = {};
};

}  // namespace tessera
