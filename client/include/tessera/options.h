// How a worker attaches.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "client/session/environment.h"
#include "daemon/base/clock.h"
#include "daemon/base/ids.h"

namespace tessera::client {

inline constexpr char kDefaultAddress[] = "unix:/run/tessera/tesserad.sock";

// What a worker learns when it has attached again.
struct ReattachReport {
  bool same_daemon = false;  // the same process as before, not its successor
  std::uint32_t attempts = 0;
  std::vector<SequenceId> gone;  // their handles answer NOT_FOUND from now on
};

struct ReattachPolicy {
  // Attach again, unasked, when the lease is lost.
  bool automatic = false;
  // Pauses double from first to max, each shortened by up to half at random, so that the workers
  // of a node do not all come at once.
  Clock::Duration first_backoff = std::chrono::milliseconds(100);
  Clock::Duration max_backoff = std::chrono::seconds(5);
  Clock::Duration give_up_after = std::chrono::seconds(60);
};

// PEM files. Read at Attach, and at every new attachment.
struct TlsOptions {
  std::string ca_file;  // who may have issued the daemon's certificate; empty: the system's
  std::string certificate_file;  // this worker's own, where the daemon asks for one
  std::string key_file;          // the private key of that
  std::string server_name;       // in the daemon's certificate; empty: the host of the address

  friend bool operator==(const TlsOptions&, const TlsOptions&) = default;
};

struct AttachOptions {
  std::string address = kDefaultAddress;  // "unix:PATH" or "HOST:PORT"
  std::optional<TlsOptions> tls;          // nothing: in the clear
  std::string tenant_token;               // empty: the tenant configured without one
  std::string worker_name;                // for people; at most 128 characters
  std::string group;                      // tensor-parallel group, or empty
  std::uint32_t rank = 0;
  std::uint32_t group_size = 0;
  // How the worker counts on prefixes being hashed; attaching fails where they are in another way.
  // Unset: as the daemon does (Worker::welcome).
  std::optional<std::string> prefix_hash;  // "xxh3-128/32"
  std::optional<std::uint64_t> prefix_hash_seed;
  // False, or an address of another machine: everything goes through RPC (the remote door).
  bool map_memory = true;
  ReattachPolicy reattach;
  Clock::Duration attach_timeout = std::chrono::seconds(10);
  Clock::Duration rpc_timeout = std::chrono::seconds(60);
  std::string implementation;  // of the attention kernels: "avx2", say; empty: the fastest here

  // Told of calls that succeed and most likely do not do what was meant, once for each sequence: a
  // policy that compressed nothing of a prompt, or a prompt that was ended in some layers alone. On
  // the thread of the call that notices it: return soon, and call nothing of the sequence. Null:
  // one line to stderr, at most one a minute.
  std::function<void(std::string_view warning)> on_warning;

  // Called on the lease thread: return soon, and call nothing of the worker that waits.
  std::function<void(Clock::Duration limit)> on_draining;
  std::function<void(const absl::Status& reason)> on_lease_lost;
  std::function<void(const ReattachReport& report)> on_reattached;

  // Not owned; null: the system's.
  const Clock* clock = nullptr;
  Sleeper* sleeper = nullptr;
  const GpuPlatform* gpus = nullptr;
};

}  // namespace tessera::client
