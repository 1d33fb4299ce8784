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
#include "tessera/ids.h"

namespace tessera::client {

inline constexpr char kDefaultAddress[] = "unix:/run/tessera/tesserad.sock";

// What a worker learns when it has attached again.
struct ReattachReport {
  bool same_daemon = false;  // the same process as before, not its successor
  std::uint32_t attempts = 0;
  std::vector<SequenceId> gone;  // their handles answer NOT_FOUND from now on
};

struct ReattachPolicy {
  // Attach again without being asked when the lease is lost.
  bool automatic = false;
  // Pauses double from first to max. Each is shortened by up to half at random, so that the workers
  // of a node do not reconnect at the same moment.
  std::chrono::nanoseconds first_backoff = std::chrono::milliseconds(100);
  std::chrono::nanoseconds max_backoff = std::chrono::seconds(5);
  std::chrono::nanoseconds give_up_after = std::chrono::seconds(60);
};

// PEM files. Read at Attach, and at every new attachment.
struct TlsOptions {
  std::string ca_file;           // issuer of the daemon's certificate; empty: the system's
  std::string certificate_file;  // this worker's own, if the daemon asks for one
  std::string key_file;          // the private key of that certificate
  std::string server_name;       // in the daemon's certificate; empty: the host of the address

  friend bool operator==(const TlsOptions&, const TlsOptions&) = default;
};

struct AttachOptions {
  // "unix:PATH", "HOST:PORT", or "unix:DIRECTORY/" for the socket of this worker's device among
  // those of a node's daemons.
  std::string address = kDefaultAddress;
  // The device whose daemon to use: a UUID ("GPU-...", "MIG-...", "CPU-...") or its beginning, or
  // "cuda:N" as this process numbers devices. Empty: in a directory, the current CUDA device of the
  // calling thread; without a GPU, the only daemon. Attaching fails if the daemon has another one.
  std::string device;
  std::optional<TlsOptions> tls;  // unset: no encryption
  std::string tenant_token;       // empty: the tenant configured without one
  std::string worker_name;        // for people; at most 128 characters
  std::string group;              // tensor-parallel group, or empty
  std::uint32_t rank = 0;
  std::uint32_t group_size = 0;
  // The prefix hash that the worker relies on; attaching fails if the daemon uses another one.
  // Unset: the daemon's choice (Worker::daemon).
  std::optional<std::string> prefix_hash;  // "xxh3-128/32"
  std::optional<std::uint64_t> prefix_hash_seed;
  // Sets this worker's prefixes apart from those of workers with another salt; at most 64 bytes.
  std::string cache_salt;
  // How long a step may take while memory of the tenant waits to be freed: 10 ms to 10 minutes. A
  // longer one may fail with ABORTED. Zero: the daemon's choice (Worker::daemon).
  std::chrono::milliseconds pin_limit{0};
  // False, or an address of another machine: everything goes through RPC.
  bool map_memory = true;
  ReattachPolicy reattach;
  std::chrono::nanoseconds attach_timeout = std::chrono::seconds(10);
  std::chrono::nanoseconds rpc_timeout = std::chrono::seconds(60);
  std::string implementation;  // of the attention kernels, e.g. "avx2"; empty: the fastest here

  // Called with a warning about a call that succeeded but probably did not do what was meant: a
  // policy compressed nothing of a prompt, or a prompt was ended in some layers only. Once per
  // sequence, on the thread of the call that notices it: return soon, and make no call of the
  // sequence. Null: one line to stderr, at most one a minute.
  std::function<void(std::string_view warning)> on_warning;

  // Called on the lease thread: return soon, and make no call of the worker that waits.
  std::function<void(std::chrono::nanoseconds limit)> on_draining;
  std::function<void(const absl::Status& reason)> on_lease_lost;
  std::function<void(const ReattachReport& report)> on_reattached;
};

}  // namespace tessera::client
