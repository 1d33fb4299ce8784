// What tells prefixes apart besides their tokens: weights, adapters and salts. A wrong hit would be
// a wrong answer that nobody notices.

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "tessera/tessera.h"
#include "tests/e2e/prefix/prefix_lanes.h"

namespace tessera {
namespace {

// Who asks for a prefix, or publishes one.
struct Identity {
  std::string weights;
  std::string adapter;
  std::string salt;
  bool operator==(const Identity&) const = default;
};

class Identities : public Prefixes {
 protected:
  std::unique_ptr<client::Worker> Attach(const std::string& salt) {
    auto worker = client::Worker::Attach({.address = daemon_->address(), .cache_salt = salt});
    EXPECT_TRUE(worker.ok()) << worker.status();
    return *std::move(worker);
  }
  client::ModelGeometry Geometry(const Identity& identity) {
    client::ModelGeometry geometry = shape_.Geometry();
    geometry.weights_id = identity.weights;
    geometry.adapter_id = identity.adapter;
    return geometry;
  }
  PrefixMatch MatchAs(const Identity& identity, std::uint64_t tokens) {
    const std::unique_ptr<client::Worker> worker = Attach(identity.salt);
    const auto model = worker->RegisterModel(Geometry(identity));
    EXPECT_TRUE(model.ok()) << model.status();
    const Ids ids = Count(tokens);
    const auto match = worker->Match(*model, {.tokens = ids});
    EXPECT_TRUE(match.ok()) << match.status();
    return match.value_or(PrefixMatch());
  }
  void PublishAs(const Identity& identity, std::uint64_t tokens) {
    const std::unique_ptr<client::Worker> worker = Attach(identity.salt);
    auto sequence = worker->CreateSequence(*worker->RegisterModel(Geometry(identity)));
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    SyntheticSequence truth(shape_, random_.Bits());
    Append(*sequence, truth, tokens, /*observe=*/false);
    const PublishedPrefix published = Publish(*sequence, Count(tokens));
    EXPECT_FALSE(published.deduplicated);
  }
};

// The same tokens, model name and policy for each: every one finds its own prefix, and no other.
TEST_F(Identities, AreNeverTakenForEachOther) {
  const std::vector<Identity> all = {{},
                                     {.weights = "sha256:1"},
                                     {.weights = "sha256:2"},
                                     {.adapter = "sha256:1"},
                                     {.weights = "sha256:1", .adapter = "lora"},
                                     {.salt = "red"},
                                     {.salt = "blue"},
                                     {.weights = "sha256:1", .salt = "red"},
                                     {.weights = std::string("\0\n", 2)},
                                     {.weights = std::string(64, 'w'),
                                      .adapter = std::string(64, 'a'),
                                      .salt = std::string(64, 's')}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    // Published ones have lengths of their own, so a wrong hit shows whose it is.
    for (std::size_t j = 0; j < all.size(); ++j) {
      const PrefixMatch match = MatchAs(all[j], 32 * all.size());
      EXPECT_EQ(match.tokens, j < i ? 32 * (j + 1) : 0) << i << " published, asked as " << j;
      EXPECT_EQ(match.computing, 0u);
    }
    ASSERT_NO_FATAL_FAILURE(PublishAs(all[i], 32 * (i + 1)));
  }
  for (std::size_t j = 0; j < all.size(); ++j) {
    EXPECT_EQ(MatchAs(all[j], 32 * all.size()).tokens, 32 * (j + 1)) << j;
  }
}

// Nor are computations that others announce.
TEST_F(Identities, DoNotWaitForEachOther) {
  const std::unique_ptr<client::Worker> red = Attach("red");
  const std::unique_ptr<client::Worker> blue = Attach("blue");
  const std::unique_ptr<client::Worker> red_too = Attach("red");
  const Ids ids = Count(64);
  const auto ask = [&](client::Worker& worker, bool will_compute) {
    const auto model = worker.RegisterModel(shape_.Geometry());
    return worker.Match(*model, {.tokens = ids, .will_compute = will_compute})->computing;
  };
  EXPECT_EQ(ask(*red, true), 0u);
  EXPECT_EQ(ask(*blue, false), 0u);
  EXPECT_EQ(ask(*red_too, false), 64u);
}

TEST_F(Identities, OtherWeightsAreAnotherModel) {
  const auto none = mapped_->RegisterModel(shape_.Geometry());
  const auto one = mapped_->RegisterModel(Geometry({.weights = "1"}));
  const auto two = mapped_->RegisterModel(Geometry({.weights = "2"}));
  const auto again = remote_->RegisterModel(Geometry({.weights = "1"}));
  ASSERT_TRUE(none.ok() && one.ok() && two.ok() && again.ok());
  EXPECT_NE(none->id(), one->id());
  EXPECT_NE(one->id(), two->id());
  EXPECT_EQ(one->id(), again->id());
  client::ModelGeometry changed = Geometry({.weights = "1"});
  changed.layers.pop_back();
  EXPECT_EQ(mapped_->RegisterModel(changed).status().code(), absl::StatusCode::kAlreadyExists);
  for (const Identity& wrong :
       {Identity{.weights = std::string(65, 'w')}, Identity{.adapter = std::string(65, 'a')}}) {
    EXPECT_THAT(mapped_->RegisterModel(Geometry(wrong)).status().ToString(),
                testing::HasSubstr("has 65 bytes; the limit is 64"));
  }
  const auto salted =
      client::Worker::Attach({.address = daemon_->address(), .cache_salt = std::string(65, 's')});
  EXPECT_THAT(salted.status().ToString(),
              testing::HasSubstr("cache_salt has 65 bytes; the limit is 64"));
}

TEST_F(Identities, TheCInterfaceStatesThem) {
  ASSERT_NO_FATAL_FAILURE(
      PublishAs({.weights = std::string("w\0", 2), .adapter = "a", .salt = "s"}, 64));
  const std::string address = daemon_->address();
  const Ids ids = Count(64);
  for (const std::size_t weights_bytes : {1, 2}) {
    for (const std::size_t salt_bytes : {0, 1}) {
      tessera_attach_options attach = TESSERA_ATTACH_OPTIONS_INIT;
      attach.address = address.c_str();
      attach.cache_salt = "s";
      attach.cache_salt_bytes = salt_bytes;
      tessera_worker* worker = nullptr;
      tessera_error error;
      ASSERT_EQ(tessera_attach(&attach, &worker, &error), TESSERA_OK) << error.message;
      tessera_layer layer = TESSERA_LAYER_INIT;
      layer.query_heads = shape_.query_heads;
      layer.kv_heads = shape_.kv_heads;
      layer.head_dim = shape_.head_dim;
      const std::vector<tessera_layer> layers(shape_.layers, layer);
      const client::ModelGeometry same = shape_.Geometry();
      tessera_model_options geometry = TESSERA_MODEL_OPTIONS_INIT;
      geometry.name = same.name.c_str();
      geometry.layers = layers.data();
      geometry.layer_count = layers.size();
      geometry.delimiter_token_ids = same.delimiter_token_ids.data();
      geometry.delimiter_count = same.delimiter_token_ids.size();
      geometry.weights_id = "w\0";
      geometry.weights_id_bytes = weights_bytes;
      geometry.adapter_id = "a";
      geometry.adapter_id_bytes = 1;
      tessera_model* model = nullptr;
      ASSERT_EQ(tessera_register_model(worker, &geometry, &model, &error), TESSERA_OK)
          << error.message;
      tessera_match_options ask = TESSERA_MATCH_OPTIONS_INIT;
      ask.token_ids = ids.data();
      ask.token_count = ids.size();
      tessera_prefix_match match = TESSERA_PREFIX_MATCH_INIT;
      ASSERT_EQ(tessera_match(worker, model, &ask, &match, &error), TESSERA_OK) << error.message;
      EXPECT_EQ(match.tokens, weights_bytes == 2 && salt_bytes == 1 ? 64u : 0u);
      tessera_model_destroy(model);
      tessera_detach(worker);
    }
  }
}

}  // namespace
}  // namespace tessera
