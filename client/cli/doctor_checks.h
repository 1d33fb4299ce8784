// The checks of `tessera doctor`: what keeps a worker of this user on this machine from using a
// daemon, and what makes it slow.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include "client/tools/connection.h"

namespace tessera::cli {

enum class Verdict : std::uint8_t { kGood, kDoubtful, kBad };

struct Finding {
  Verdict verdict = Verdict::kGood;
  std::string subject;   // "socket"
  std::string text;      // what was found
  std::string fix = {};  // what to do; empty if nothing
};

// The file of a Unix address: its folder, type, mode and group, and whether this user may connect.
std::vector<Finding> CheckSocket(const std::string& path);
// The PEM files of the TLS flags: readable, and valid at `now`.
std::vector<Finding> CheckTlsFiles(const client::TlsOptions& tls, std::time_t now);
// The process behind a Unix socket: its limit of open files, if this user may see it.
std::vector<Finding> CheckProcess(const std::string& path);
// The daemon's answer: version, device, free memory, draining.
std::vector<Finding> CheckDaemon(const Door& door);
// Whether this process could use the GPU that the daemon names ("cuda:0").
std::vector<Finding> CheckGpu(std::string_view device);
// Huge pages for shared memory: the kernel's setting, and its release ("6.1.0-18-amd64").
std::vector<Finding> CheckHugePages(std::string_view setting, std::string_view release);
// The limit of open files of this process.
std::vector<Finding> CheckOpenFiles(std::uint64_t limit);

}  // namespace tessera::cli
