#include "client/bench/workload/sharing_worker.h"

#include <array>
#include <chrono>
#include <cstdio>

#include "client/bench/workload/generated_prompt.h"
#include "client/bench/workload/synthetic.h"
#include "daemon/base/strings.h"

namespace tessera::cli::bench {

namespace {

using Clock = std::chrono::steady_clock;

double MsSince(Clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
}

}  // namespace

client::ModelGeometry GeometryOf(std::uint32_t layers) {
  client::ModelGeometry geometry;
  geometry.name = Concat("shared-", layers);
  geometry.layers.assign(layers,
                         {.query_heads = kKvHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim});
  return geometry;
}

std::vector<std::uint32_t> TokenIds(std::uint32_t tokens, std::uint32_t head) {
  std::vector<std::uint32_t> ids(tokens);
  for (std::uint32_t i = 0; i < tokens; ++i) ids[i] = i % 32 == 0 ? head : i * 2654435761u;
  return ids;
}

absl::StatusOr<FirstToken> Decode(client::Worker& worker, client::Sequence& sequence,
                                  std::uint32_t layers) {
  std::vector<std::uint16_t> row(kKvHeads * kHeadDim);
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = kernels::FloatToBf16(static_cast<float>(i % 7) - 3);
  }
  std::vector<float> output(row.size());
  std::vector<float> lse(kKvHeads);
  FirstToken token;
  Clock::time_point begun = Clock::now();
  client::Sequence* const batch[] = {&sequence};
  absl::StatusOr<client::Step> step = worker.BeginStep(batch);
  if (!step.ok()) return step.status();
  token.open_ms = MsSince(begun);
  begun = Clock::now();
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    const absl::Status status = step->AppendAndAttend(layer, {.key = BytesOf(row),
                                                              .value = BytesOf(row),
                                                              .query = BytesOf(row),
                                                              .output = WritableBytesOf(output),
                                                              .lse = lse});
    if (!status.ok()) return status;
    if (layer != 0) continue;
    token.attend_ms = MsSince(begun);
    begun = Clock::now();
  }
  if (absl::Status status = step->End(); !status.ok()) return status;
  token.rest_ms = MsSince(begun);
  for (const float of_head : lse) token.lse += of_head;
  return token;
}

// ---- child side

absl::Status RunSharingWorker(const std::string& address, const SharedPrefix& head) {
  absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::Worker::Attach({.address = address, .worker_name = "bench"});
  if (!worker.ok()) return worker.status();
  absl::StatusOr<client::Model> model = (*worker)->RegisterModel(GeometryOf(head.layers));
  if (!model.ok()) return model.status();
  const std::vector<std::uint32_t> ids = TokenIds(head.tokens, 0);
  Answer("attached");
  if (std::getchar() == EOF) return absl::OkStatus();

  JoinTimes times;
  Clock::time_point begun = Clock::now();
  const absl::StatusOr<client::PrefixMatch> match =
      (*worker)->Match(*model, {.policy = kSharedPolicy, .tokens = ids});
  if (!match.ok()) return match.status();
  times.match_ms = MsSince(begun);
  if (match->tokens != ids.size()) {
    return absl::InternalError(Concat(match->tokens, " of ", ids.size(), " tokens matched"));
  }
  begun = Clock::now();
  absl::StatusOr<client::Sequence> fork = (*worker)->Fork(*match);
  if (!fork.ok()) return fork.status();
  times.fork_ms = MsSince(begun);
  const absl::StatusOr<FirstToken> token = Decode(**worker, *fork, head.layers);
  if (!token.ok()) return token.status();
  std::array<char, 256> line;
  std::snprintf(line.data(), line.size(), "%.9g %.9g %.9g %.9g %.9g %.17g", times.match_ms,
                times.fork_ms, token->open_ms, token->attend_ms, token->rest_ms, token->lse);
  Answer(line.data());
  while (std::getchar() != EOF) {
  }
  return absl::OkStatus();
}

// ---- parent side

absl::StatusOr<std::unique_ptr<SharingWorker>> SharingWorker::Start(const std::string& address,
                                                                    const SharedPrefix& head) {
  absl::StatusOr<std::unique_ptr<WorkerProcess>> process =
      WorkerProcess::Start({"bench", "sharing-worker", Concat("--address=", address),
                            Concat("--layers=", head.layers), Concat("--tokens=", head.tokens)});
  if (!process.ok()) return process.status();
  const absl::StatusOr<std::string> attached = (*process)->Hear();
  if (!attached.ok()) return attached.status();
  return std::unique_ptr<SharingWorker>(new SharingWorker(*std::move(process)));
}

absl::StatusOr<JoinTimes> SharingWorker::Join() {
  if (absl::Status status = process_->Tell("join"); !status.ok()) return status;
  const absl::StatusOr<std::string> line = process_->Hear();
  if (!line.ok()) return line.status();
  JoinTimes times;
  if (std::sscanf(line->c_str(), "%lf %lf %lf %lf %lf %lf", &times.match_ms, &times.fork_ms,
                  &times.token.open_ms, &times.token.attend_ms, &times.token.rest_ms,
                  &times.token.lse) != 6) {
    return absl::InternalError(Concat("unexpected answer of a benchmark worker: ", *line));
  }
  return times;
}

}  // namespace tessera::cli::bench
