// The C interface: threads for attention.

#include <memory>
#include <mutex>

#include "client/api/c_handles.h"
#include "client/error/error_info.h"
#include "client/step/thread_team.h"
#include "daemon/base/strings.h"

namespace client = tessera::client;

struct tessera_executor {
  explicit tessera_executor(uint32_t threads) : team(threads) {}
  std::mutex in_use;  // the team serves one caller at a time
  client::ThreadTeam team;
};

extern "C" {

tessera_code tessera_executor_create(uint32_t threads, tessera_executor** executor,
                                     tessera_error* error) {
  constexpr uint32_t kMostThreads = 1024;
  absl::Status bad = client::CheckArguments(__func__, {{"executor", executor}});
  if (bad.ok() && (threads == 0 || threads > kMostThreads)) {
    bad = client::BadArgument(
        __func__,
        tessera::Concat("threads is ", threads, "; it must be between 1 and ", kMostThreads));
  }
  if (bad.ok()) *executor = new tessera_executor(threads);
  return client::Report(bad, error);
}

void tessera_executor_destroy(tessera_executor* executor) { delete executor; }

void tessera_executor_run(void* context, uint32_t tasks,
                          void (*task)(void* task_context, uint32_t index), void* task_context) {
  auto* const executor = static_cast<tessera_executor*>(context);
  std::unique_lock<std::mutex> lock;
  if (executor != nullptr) lock = std::unique_lock(executor->in_use, std::try_to_lock);
  if (lock.owns_lock()) return executor->team.ParallelFor(tasks, task, task_context);
  for (uint32_t i = 0; task != nullptr && i < tasks; ++i) task(task_context, i);
}

}  // extern "C"
