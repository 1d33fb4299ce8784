// Compresses a prompt with a policy that decides by the prompt's queries, and reads what became of
// it. The one token that the queries attend to must survive.   Usage: compression [ADDRESS]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>
#include <vector>

#include "tessera/worker.h"

namespace client = tessera::client;
constexpr std::uint32_t kQueryHeads = 2, kDim = 64, kTokens = 512, kNeedle = 137;

// Exits with a message if the call has failed; Must returns its value.
void Check(const absl::Status& status) {
  if (status.ok()) return;
  const client::ErrorInfo info = client::GetErrorInfo(status);
  std::fprintf(stderr, "%s (cause %u, retry after %lld ms)\n", status.ToString().c_str(),
               static_cast<unsigned>(info.cause), static_cast<long long>(info.retry_after.count()));
  std::exit(1);
}
template <typename T>
T Must(absl::StatusOr<T> result) {
  Check(result.status());
  return *std::move(result);
}

std::vector<float> Noise(std::size_t size) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows(size);
  for (float& value : rows) value = normal(random);
  return rows;
}

int main(int argc, char** argv) {
  const auto worker = Must(client::Worker::Attach({
      .address = argc > 1 ? argv[1] : client::kDefaultAddress,
      .on_warning = [](std::string_view text) { std::cout << "warning: " << text << "\n"; },
  }));
  client::ModelGeometry geometry = {.name = "compression", .type = client::ElementType::kFp32};
  geometry.layers = {{.query_heads = kQueryHeads, .kv_heads = 1, .head_dim = kDim}};
  const client::Model model = Must(worker->RegisterModel(geometry));
  client::Sequence sequence = Must(worker->CreateSequence(model, "snapkv:budget=0.25"));

  // All queries point in one direction, and so does the key of one token.
  std::vector<float> keys = Noise(kTokens * kDim), values = Noise(kTokens * kDim);
  std::vector<float> queries = Noise(kTokens * kQueryHeads * kDim);
  for (float& value : queries) value += 1;
  std::fill_n(keys.begin() + kNeedle * kDim, kDim, 3.0f);

  Must(sequence.Append({.key = std::as_bytes(std::span(keys)),
                        .value = std::as_bytes(std::span(values)),
                        .tokens = kTokens}));
  const client::PolicyNeeds needs = sequence.needs();
  if (needs.queries()) {
    client::ObservedRows rows = {.layer = 0, .first_token = 0, .prompt_tokens = kTokens};
    rows.query = std::as_bytes(std::span(queries));
    if (needs.attention_sums) rows.key = std::as_bytes(std::span(keys));
    Check(sequence.Observe(rows));
  }
  const client::CompressResult result = Must(sequence.Compress());
  std::printf("dropped %zu entries: %zu bytes before, %zu after\n",
              std::size_t{result.entries_dropped}, std::size_t{result.tile_bytes_before},
              std::size_t{result.tile_bytes_after});
  for (const client::OutcomeGroup& group : result.outcomes) {
    std::printf("%u lanes: %s\n", group.lanes, group.worst.text.c_str());
  }

  const client::SequenceDescription described = Must(sequence.DescribeEntries());
  const std::vector<std::uint64_t>& kept = described.lanes.front().positions;
  const bool needle = std::ranges::find(kept, kNeedle) != kept.end();
  std::printf("kept %zu of %u tokens, token %u %s\n", kept.size(), kTokens, kNeedle,
              needle ? "among them" : "not among them");
  return needle && kept.size() == kTokens / 4 ? 0 : 1;
}
