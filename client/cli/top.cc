// tessera top: the state of a daemon, redrawn every second, with rates since the last refresh.

#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <thread>

#include "client/cli/command.h"
#include "client/cli/status.h"
#include "client/tools/connection.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"

namespace tessera::cli {

namespace {

// Terminal rows left for sequences below the other tables.
std::size_t SequenceRows(const Look& look) {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0) return 20;
  const int taken = 12 + look.stats.tenants_size() + look.sessions.sessions_size();
  return static_cast<std::size_t>(std::max(3, int{size.ws_row} - taken));
}

absl::Status Watch(const Flags& flags) {
  absl::StatusOr<std::uint64_t> interval_ms = flags.Number("interval-ms", 100, 60'000);
  if (!interval_ms.ok()) return interval_ms.status();
  absl::StatusOr<std::uint64_t> rounds = flags.Number("rounds", 0, 1'000'000);
  if (!rounds.ok()) return rounds.status();
  const bool screen = ::isatty(STDOUT_FILENO) != 0;
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  std::optional<Look> before;
  auto then = std::chrono::steady_clock::now();
  for (std::uint64_t round = 0; *rounds == 0 || round < *rounds; ++round) {
    if (round > 0) std::this_thread::sleep_for(std::chrono::milliseconds(*interval_ms));
    absl::StatusOr<Look> look = ReadDaemonState(*admin, 200);
    if (!look.ok()) return look.status();
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - then).count();
    // Home, then clear to the end: no flicker. Without a terminal, refreshes are appended.
    if (screen) std::fputs("\x1b[H\x1b[J", stdout);
    std::fputs(RenderText(*look, before ? &*before : nullptr, seconds, SequenceRows(*look)).c_str(),
               stdout);
    std::fputs(screen ? "\nCtrl-C to quit\n" : "\n", stdout);
    std::fflush(stdout);
    before = *std::move(look);
    then = now;
  }
  return absl::OkStatus();
}

}  // namespace

int RunTop(std::span<const std::string_view> args) {
  return RunWithFlags(
      Flags("Usage: tessera top [--address=ADDRESS]\n\n"
            "Shows the memory, tenants, sessions and sequences of a daemon live,\n"
            "with rates per second.\n\n"
            "Example:\n"
            "  tessera top --interval-ms=500",
            WithConnection({{"interval-ms", "MS", "Time between refreshes.", "1000"},
                            {"rounds", "N", "Refreshes. 0: until interrupted.", "0"}})),
      args, Watch);
}

}  // namespace tessera::cli
