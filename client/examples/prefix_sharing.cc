// Two prompts begin with the same 96 tokens. The second one starts from what the first has
// published, and computes only the rest.   Usage: prefix_sharing [ADDRESS]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "tessera/worker.h"

namespace client = tessera::client;
using namespace std::chrono_literals;
using Ids = std::vector<std::uint32_t>;
constexpr std::uint32_t kDim = 64, kShared = 96, kOwn = 20;

// The value of a result; exits with a message if there is none.
template <typename T>
T Must(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
  std::exit(1);
}

// Stands for the model: the key and the value of a token are its id, in every channel.
std::vector<float> ComputeRows(std::span<const std::uint32_t> ids) {
  std::vector<float> rows;
  for (std::uint32_t id : ids) rows.insert(rows.end(), kDim, static_cast<float>(id));
  return rows;
}

client::Sequence Prefill(client::Worker& worker, const client::Model& model, const Ids& ids,
                         std::vector<client::PrefixId>& published) {
  const client::PrefixMatch match =
      Must(worker.Match(model, {.tokens = ids, .wait = 2s, .will_compute = true}));
  client::Sequence sequence =
      match.found() ? Must(worker.Fork(match)) : Must(worker.CreateSequence(model));
  std::printf("%3zu of %zu tokens were published\n", std::size_t{match.tokens}, ids.size());

  const auto missing = std::span(ids).subspan(sequence.tokens());
  const std::vector<float> rows = ComputeRows(missing);
  Must(sequence.Append({.key = std::as_bytes(std::span(rows)),
                        .value = std::as_bytes(std::span(rows)),
                        .tokens = missing.size()}));
  published.push_back(Must(sequence.Publish(ids, {.ttl = 10min})).prefix);
  return sequence;
}

int main(int argc, char** argv) {
  const auto worker =
      Must(client::Worker::Attach({.address = argc > 1 ? argv[1] : client::kDefaultAddress}));
  client::ModelGeometry geometry = {.name = "prefix_sharing", .type = client::ElementType::kFp32};
  geometry.layers = {{.query_heads = 1, .kv_heads = 1, .head_dim = kDim}};
  const client::Model model = Must(worker->RegisterModel(geometry));

  std::vector<client::PrefixId> published;
  bool good = true;
  for (const std::uint32_t prompt : {1u, 2u}) {
    Ids ids(kShared + kOwn);
    std::iota(ids.begin(), ids.end(), 0);  // the system prompt, say
    for (std::uint32_t i = 0; i < kOwn; ++i) ids[kShared + i] = 1000 * prompt + i;
    const client::Sequence sequence = Prefill(*worker, model, ids, published);

    // A query of zeros attends to all tokens alike: the output is the mean of their ids.
    const std::vector<float> query(kDim);
    std::vector<float> output(kDim);
    const client::AttendQuery attend = {.sequence = &sequence,
                                        .query = std::as_bytes(std::span(query)),
                                        .output = std::as_writable_bytes(std::span(output))};
    const absl::Status status = worker->AttendRpc(0, std::span(&attend, 1));
    if (!status.ok()) return std::fprintf(stderr, "%s\n", status.ToString().c_str()), 1;
    const double mean = std::accumulate(ids.begin(), ids.end(), 0.0) / ids.size();
    std::printf("prompt %u: attention %.3f, mean of the ids %.3f\n", prompt, output[0], mean);
    good = good && std::abs(output[0] - mean) < 1e-2;
  }
  for (const client::PrefixId prefix : published) good = worker->Free(prefix).ok() && good;
  return good ? 0 : 1;
}
