#include "daemon/cache/model/model.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

ModelSpec Good() {
  ModelSpec spec = MixedModel("good", kernels::ElementType::kBf16);
  spec.layers[1].sinks.assign(4, 0.5f);
  return spec;
}

struct Refusal {
  const char* name;
  std::function<void(ModelSpec&)> spoil;
  absl::StatusCode code;
  std::vector<const char*> named;
};

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

const Refusal kRefusals[] = {
    {"no_name", [](ModelSpec& m) { m.name.clear(); }, kInvalid, {"name", "0", "128"}},
    {"long_name", [](ModelSpec& m) { m.name.assign(129, 'x'); }, kInvalid, {"129", "128"}},
    {"no_layers", [](ModelSpec& m) { m.layers.clear(); }, kInvalid, {"0 layers", "1024"}},
    {"many_layers",
     [](ModelSpec& m) { m.layers.resize(1025, m.layers[0]); },
     kInvalid,
     {"1025 layers", "1024"}},
    {"type_zero",
     [](ModelSpec& m) { m.type = static_cast<kernels::ElementType>(0); },
     kInvalid,
     {"type", "0"}},
    {"type_four",
     [](ModelSpec& m) { m.type = static_cast<kernels::ElementType>(4); },
     kInvalid,
     {"type", "4"}},
    {"no_kv_heads",
     [](ModelSpec& m) { m.layers[1].kv_heads = 0; },
     kInvalid,
     {"layer 1", "kv_heads is 0"}},
    {"many_kv_heads",
     [](ModelSpec& m) { m.layers[2].kv_heads = 1025; },
     kInvalid,
     {"layer 2", "1025", "1024"}},
    {"most_kv_heads",
     [](ModelSpec& m) { m.layers[2].kv_heads = 0xffffffff; },
     kInvalid,
     {"layer 2", "4294967295"}},
    {"no_query_heads",
     [](ModelSpec& m) { m.layers[0].query_heads = 0; },
     kInvalid,
     {"layer 0", "query_heads is 0"}},
    {"many_query_heads",
     [](ModelSpec& m) { m.layers[0].query_heads = 2048; },
     kInvalid,
     {"layer 0", "2048", "1024"}},
    {"not_a_multiple",
     [](ModelSpec& m) { m.layers[2].query_heads = 4; },
     kInvalid,
     {"layer 2", "4", "multiple", "3"}},
    {"head_dim_zero",
     [](ModelSpec& m) { m.layers[0].head_dim = 0; },
     kInvalid,
     {"layer 0", "head_dim is 0", "64, 128 and 256"}},
    {"head_dim_96", [](ModelSpec& m) { m.layers[0].head_dim = 96; }, kInvalid, {"layer 0", "96"}},
    {"value_width",
     [](ModelSpec& m) { m.layers[0].value_head_dim = 128; },
     absl::StatusCode::kUnimplemented,
     {"layer 0", "128", "64", "not supported"}},
    {"scale_nan", [](ModelSpec& m) { m.layers[1].scale = kNan; }, kInvalid, {"layer 1", "scale"}},
    {"scale_inf", [](ModelSpec& m) { m.layers[1].scale = kInf; }, kInvalid, {"layer 1", "scale"}},
    {"scale_negative", [](ModelSpec& m) { m.layers[1].scale = -1; }, kInvalid, {"layer 1", "-1"}},
    {"softcap_nan", [](ModelSpec& m) { m.layers[1].logit_softcap = kNan; }, kInvalid, {"softcap"}},
    {"softcap_negative",
     [](ModelSpec& m) { m.layers[1].logit_softcap = -2; },
     kInvalid,
     {"softcap", "-2"}},
    {"few_sinks",
     [](ModelSpec& m) { m.layers[1].sinks.resize(3); },
     kInvalid,
     {"layer 1", "3 sinks", "4"}},
    {"many_sinks",
     [](ModelSpec& m) { m.layers[0].sinks.resize(3); },
     kInvalid,
     {"layer 0", "3 sinks", "2"}},
    {"sink_inf", [](ModelSpec& m) { m.layers[1].sinks[2] = -kInf; }, kInvalid, {"sink", "inf"}},
    {"delimiters",
     [](ModelSpec& m) { m.delimiter_token_ids.resize(65537); },
     kInvalid,
     {"65537", "65536"}},
    {"scaling", [](ModelSpec& m) { m.rope_scaling.assign(65, 'x'); }, kInvalid, {"65", "64"}},
    {"too_large",
     [](ModelSpec& m) {
       m.layers.assign(1024, m.layers[0]);
       for (LayerSpec& layer : m.layers) {
         layer.query_heads = 1024;
         layer.sinks.assign(1024, 0);
       }
     },
     kInvalid,
     {"bytes", "1048576"}},
    {"theta_nan", [](ModelSpec& m) { m.rope_theta = std::nan(""); }, kInvalid, {"theta"}},
    {"theta_negative", [](ModelSpec& m) { m.rope_theta = -1; }, kInvalid, {"theta", "-1"}},
    {"frequency_nan",
     [](ModelSpec& m) {
       m.rope_frequencies = {1, std::nan("")};
     },
     kInvalid,
     {"frequency 1", "nan"}},
    {"frequency_negative",
     [](ModelSpec& m) { m.rope_frequencies = {-0.5}; },
     kInvalid,
     {"frequency 0", "-0.5"}},
    {"frequency_large",
     [](ModelSpec& m) {
       m.rope_frequencies = {1, 1e308};
     },
     kInvalid,
     {"frequency 1", "1e+308", "1024"}},
    {"theta_small", [](ModelSpec& m) { m.rope_theta = 1e-300; }, kInvalid, {"theta", "1024"}},
    {"factor_small",
     [](ModelSpec& m) {
       m.rope_theta = 10000;
       m.rope_scaling_factor = 1e-300;
     },
     kInvalid,
     {"factor", "1e-300", "1024"}},
    {"frequencies_of_two",
     [](ModelSpec& m) {
       m.rope_frequencies = {1};
       m.layers.push_back(m.layers[0]);
       m.layers.back().head_dim = m.layers[0].head_dim == 128 ? 64 : 128;
     },
     kInvalid,
     {"one head_dim", "128"}},
    {"frequencies",
     [](ModelSpec& m) { m.rope_frequencies.assign(129, 1.0); },
     kInvalid,
     {"129", "layer 0"}},
    {"factor_inf", [](ModelSpec& m) { m.rope_scaling_factor = HUGE_VAL; }, kInvalid, {"factor"}},
    {"layer_scaling",
     [](ModelSpec& m) { m.layers[2].rope = RopeSpec{.scaling = std::string(65, 'x')}; },
     kInvalid,
     {"layer 2", "scaling", "65", "64"}},
    {"layer_theta",
     [](ModelSpec& m) { m.layers[1].rope = RopeSpec{.theta = -1}; },
     kInvalid,
     {"layer 1", "theta", "-1"}},
    {"layer_factor",
     [](ModelSpec& m) { m.layers[1].rope = RopeSpec{.theta = 1, .scaling_factor = 1e-300}; },
     kInvalid,
     {"layer 1", "1e-300", "1024"}},
    {"layer_frequency",
     [](ModelSpec& m) {
       m.layers[1].rope = RopeSpec{.frequencies = {1, std::nan("")}};
     },
     kInvalid,
     {"layer 1", "frequency 1", "nan"}},
    {"layer_frequencies",
     [](ModelSpec& m) { m.layers[0].rope = RopeSpec{.frequencies = std::vector<double>(33, 1.0)}; },
     kInvalid,
     {"33", "layer 0", "32 channel pairs"}},
    {"too_large_by_frequencies",
     [](ModelSpec& m) {
       m.layers.assign(1024, {.query_heads = 1, .kv_heads = 1, .head_dim = 256});
       for (LayerSpec& layer : m.layers) {
         layer.rope = RopeSpec{.frequencies = std::vector<double>(128, 1.0)};
       }
     },
     kInvalid,
     {"bytes", "1048576"}},
    {"weights_id",
     [](ModelSpec& m) { m.weights_id.assign(65, 'x'); },
     kInvalid,
     {"weights_id", "65", "64"}},
    {"adapter_id",
     [](ModelSpec& m) { m.adapter_id.assign(65, 'x'); },
     kInvalid,
     {"adapter_id", "65", "64"}},
    {"many_lanes",
     [](ModelSpec& m) {
       m.layers.assign(17, {.query_heads = 1024, .kv_heads = 1024, .head_dim = 64});
     },
     kInvalid,
     {"17408 lanes", "16384"}},
};

class ModelRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(ModelRefusal, NamesTheValueAndTheLimit) {
  ModelSpec spec = Good();
  ASSERT_TRUE(Model::Create(ModelId(1), spec, 4).ok());
  GetParam().spoil(spec);
  const absl::StatusOr<Model> model = Model::Create(ModelId(1), spec, 4);
  ASSERT_EQ(model.status().code(), GetParam().code) << model.status();
  const std::string text = model.status().ToString();
  for (const char* part : GetParam().named) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Table, ModelRefusal, testing::ValuesIn(kRefusals),
                         [](const auto& refusal) { return refusal.param.name; });

TEST(Model, FillsInDefaultsOnce) {
  const Model model = *Model::Create(ModelId(1), Good(), 4);
  EXPECT_FLOAT_EQ(model.geometry(0).scale, 0.125f);
  EXPECT_FLOAT_EQ(model.geometry(1).scale, 1 / std::sqrt(128.0f));
  EXPECT_EQ(model.spec().layers[0].value_head_dim, 64u);
  EXPECT_EQ(model.geometry(0).sinks, nullptr);
  EXPECT_EQ(model.geometry(1).sinks, model.spec().layers[1].sinks.data());
  // A spec that spells out the defaults gives the same model.
  const Model again = *Model::Create(ModelId(2), model.spec(), 4);
  EXPECT_TRUE(again.spec() == model.spec());
}

TEST(Model, LayersOfTwoHeadDimsHaveFrequenciesOfTheirOwn) {
  ModelSpec spec = Good();
  ASSERT_NE(spec.layers[0].head_dim, spec.layers[1].head_dim);
  spec.rope_frequencies.assign(spec.layers[0].head_dim / 2, 0.5);
  for (std::size_t i = 1; i < spec.layers.size(); ++i) {
    spec.layers[i].rope = RopeSpec{
        .theta = 1e6, .frequencies = std::vector<double>(spec.layers[i].head_dim / 2, 0.25)};
  }
  const absl::StatusOr<Model> model = Model::Create(ModelId(1), spec, 4);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->spec().RopeOf(0).frequencies[0], 0.5);
  EXPECT_EQ(model->spec().RopeOf(1).frequencies[0], 0.25);
}

// Everything that makes rows differ is in the fingerprint, which prefixes are found by.
TEST(Model, FingerprintsTellModelsApart) {
  const std::function<void(ModelSpec&)> changes[] = {
      [](ModelSpec&) {},
      [](ModelSpec& m) { m.rope_theta = 10000; },
      [](ModelSpec& m) { m.layers[0].rope = RopeSpec{}; },
      [](ModelSpec& m) { m.layers[0].rope = RopeSpec{.theta = 10000}; },
      [](ModelSpec& m) { m.layers[1].rope = RopeSpec{.theta = 10000}; },
      [](ModelSpec& m) { m.layers[1].rope = RopeSpec{.theta = 10000, .interleaved = true}; },
      [](ModelSpec& m) { m.layers[1].rope = RopeSpec{.theta = 10000, .frequencies = {1}}; },
      [](ModelSpec& m) { m.weights_id = "a"; },
      [](ModelSpec& m) { m.weights_id = "b"; },
      [](ModelSpec& m) { m.adapter_id = "a"; },
      [](ModelSpec& m) { m.weights_id = m.adapter_id = "a"; },
      [](ModelSpec& m) { m.weights_id = "\nadapter 1 a"; },
      [](ModelSpec& m) { m.weights_id.assign(1, '\0'); },
  };
  std::vector<std::string> seen;
  for (const auto& change : changes) {
    ModelSpec spec = Good();
    change(spec);
    seen.push_back(Model::Create(ModelId(1), spec, 4)->fingerprint());
    spec.name = "another";
    EXPECT_EQ(Model::Create(ModelId(2), spec, 4)->fingerprint(), seen.back());
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());
}

TEST(Model, TheLargestThatIsServedIsServed) {
  ModelSpec spec = Good();
  spec.layers.assign(16, {.query_heads = 1024, .kv_heads = 1024, .head_dim = 256});
  spec.name.assign(128, 'x');
  const absl::StatusOr<Model> model = Model::Create(ModelId(1), spec, 64);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->lanes(), shm::kMaxLanes);
  EXPECT_EQ(model->layout().tail_bytes(), std::uint64_t{16384} * 64 * 2 * 32 * 512);
}

}  // namespace
}  // namespace tessera::cache
