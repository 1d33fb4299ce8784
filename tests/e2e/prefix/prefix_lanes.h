// Fixture with a daemon and one worker per transport, and helpers for tests of published prefixes.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "client/api/worker_access.h"
#include "tests/e2e/tokens/token_lanes.h"

namespace tessera {

using client::PrefixMatch;
using client::PublishedPrefix;
using Ids = std::vector<std::uint32_t>;

inline Ids Count(std::uint64_t tokens, std::uint32_t from = 1) {
  Ids ids(tokens);
  std::iota(ids.begin(), ids.end(), from);
  return ids;
}

class Prefixes : public Tokens {
 protected:
  Prefixes() = default;
  explicit Prefixes(std::unique_ptr<DaemonProcess> daemon) : Tokens(std::move(daemon), nullptr) {}

  void SetUp() override {
    Tokens::SetUp();
    Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
    ASSERT_TRUE(remote_->RegisterModel(shape_.Geometry()).ok());
  }
  PublishedPrefix Publish(client::Sequence& sequence, const Ids& ids,
                          const client::PublishOptions& options = {}) {
    const auto published = sequence.Publish(ids, options);
    EXPECT_TRUE(published.ok()) << published.status();
    return published.value_or(PublishedPrefix());
  }
  PrefixMatch Match(client::Worker& worker, const Ids& ids, const std::string& policy = "") {
    const auto match = worker.Match(model_, {.policy = policy, .tokens = ids});
    EXPECT_TRUE(match.ok()) << match.status();
    return match.value_or(PrefixMatch());
  }
  client::Sequence Fork(client::Worker& worker, const PrefixMatch& match,
                        std::uint64_t tokens = 0) {
    auto fork = worker.Fork(match, tokens);
    EXPECT_TRUE(fork.ok()) << fork.status();
    return fork.ok() ? *std::move(fork) : client::Sequence();
  }
  std::vector<float> AttendByRpc(client::Worker& worker, const client::Sequence& sequence,
                                 const SyntheticSequence& truth, std::uint32_t layer) {
    std::vector<float> output(shape_.query_row());
    const auto query = truth.Query(layer, truth.tokens() - 1);
    const client::AttendQuery asked[] = {
        {.sequence = &sequence, .query = BytesOf(query), .output = WritableBytesOf(output)}};
    const absl::Status status = worker.AttendRpc(layer, asked, {});
    EXPECT_TRUE(status.ok()) << status;
    return output;
  }
  // Decodes the token after `truth`, the same for all sequences. Returns one output per layer.
  std::vector<std::vector<float>> DecodeOne(client::Worker& worker, client::Sequence& sequence,
                                            const SyntheticSequence& truth) {
    const std::uint64_t at = truth.tokens() - 1;
    client::Sequence* const batch[] = {&sequence};
    for (;;) {
      std::vector<std::vector<float>> outputs(shape_.layers,
                                              std::vector<float>(shape_.query_row()));
      auto step = worker.BeginStep(batch);
      EXPECT_TRUE(step.ok()) << step.status();
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto query = truth.Query(layer, at);
        (void)step->AppendAndAttend(layer, {.key = std::as_bytes(truth.Key(layer, at, 1)),
                                            .value = std::as_bytes(truth.Value(layer, at, 1)),
                                            .query = BytesOf(query),
                                            .output = WritableBytesOf(outputs[layer])});
      }
      const absl::Status status = step->End();
      if (absl::IsAborted(status)) continue;
      EXPECT_TRUE(status.ok()) << status;
      return outputs;
    }
  }
  v1::TenantStats TenantStats() {
    const auto stats = client::StatsMessage(*mapped_);
    EXPECT_TRUE(stats.ok()) << stats.status();
    return stats.ok() ? stats->tenants(0) : v1::TenantStats();
  }
  std::uint64_t TileBytes() {
    const v1::TenantStats stats = TenantStats();
    const auto it = stats.used_bytes_by_tag().find("tiles");
    return it == stats.used_bytes_by_tag().end() ? 0 : it->second;
  }
  // Polls a bounded number of times, because the daemon frees in the background.
  bool Becomes(const std::function<bool()>& good) {
    for (int i = 0; i < 20000; ++i) {
      if (good()) return true;
    }
    return false;
  }
};

}  // namespace tessera
