// One worker of a soak: lives a Story until it is killed or told to leave.
//
//   soak_worker ADDRESS COUNTERS SEED
//
// Exits with 0 if it was told to leave or the daemon ended, and with 1 and the story if a promise
// was broken.

#include <signal.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "client/rpc/channel.h"
#include "daemon/base/strings.h"
#include "daemon/platform/unix_socket.h"
#include "tests/fuzz/soak_counters.h"

namespace tessera::fuzz {
namespace {

std::atomic<bool> leave{false};

int Fail(const absl::Status& status, const std::string& told) {
  std::fprintf(stderr, "%s%s\n", told.c_str(), status.ToString().c_str());
  return 1;
}

void AddTo(SoakCounters& counters, const Tally& tally) {
  for (std::size_t i = 0; i < kActs; ++i) counters.done[i] += tally.done[i];
  counters.refused += tally.refused;
  counters.retried += tally.retried;
  counters.outputs_judged += tally.outputs_judged;
}

int Live(const std::string& address, SoakCounters& counters, std::uint64_t seed) {
  TestRandom random(seed);
  client::AttachOptions options = {.address = address,
                                   .tenant_token = random.OneIn(3) ? "sesame" : "",
                                   .worker_name = Concat("soak-", seed)};
  if (random.OneIn(4)) {
    options.group = "pair";
    options.group_size = 2;
    options.rank = static_cast<std::uint32_t>(random.Below(2));
  }
  options.map_memory = !random.OneIn(4);
  const absl::StatusOr<std::unique_ptr<client::Worker>> worker = client::Worker::Attach(options);
  options.map_memory = !options.map_memory;
  absl::StatusOr<std::unique_ptr<client::Worker>> colleague = absl::UnknownError("not asked");
  if (worker.ok()) colleague = client::Worker::Attach(options);
  for (const absl::Status& status :
       {worker.status(), worker.ok() ? colleague.status() : absl::OkStatus()}) {
    // Too many workers are attached because the daemon has not buried the killed ones yet, or the
    // daemon drains.
    if (absl::IsResourceExhausted(status) || absl::IsUnavailable(status)) return 0;
    if (!status.ok()) return Fail(status, "");
  }
  const auto channel = client::OpenChannel(Concat(address, kAdminSuffix), std::nullopt, {});
  if (!channel.ok()) return Fail(channel.status(), "");
  const std::unique_ptr<v1::TesseraAdmin::Stub> admin = v1::TesseraAdmin::NewStub(*channel);
  Tally tally;
  Shelf shelf;
  // No pins: a killed worker could not free its pinned prefixes.
  absl::StatusOr<Story> story = Story::Begin({.worker = worker->get(),
                                              .random = &random,
                                              .tally = &tally,
                                              .shelf = &shelf,
                                              .colleague = colleague->get(),
                                              .admin = admin.get(),
                                              .pins = false});
  if (!story.ok()) return Fail(story.status(), "");
  while (!leave.load()) {
    tally = {};
    const absl::Status status = story->Next();
    AddTo(counters, tally);
    if (absl::IsUnavailable(status)) {
      ++counters.leases_lost;
      return 0;
    }
    if (!status.ok()) return Fail(status, story->Told());
  }
  return 0;
}

}  // namespace
}  // namespace tessera::fuzz

int main(int argc, char** argv) {
  if (argc != 4) return 64;
  ::signal(SIGTERM, [](int) { tessera::fuzz::leave.store(true); });
  return tessera::fuzz::Live(argv[1], tessera::fuzz::MapCounters(argv[2]),
                             std::strtoull(argv[3], nullptr, 10));
}
