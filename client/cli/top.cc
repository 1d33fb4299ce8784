// tessera top: the state of a daemon, redrawn every second, with rates since the last refresh.

#include <signal.h>

#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/daemons.h"
#include "client/cli/top_view.h"
#include "client/tools/connection.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

using Milliseconds = std::chrono::milliseconds;
using SteadyClock = std::chrono::steady_clock;

constexpr std::uint32_t kSequences = 1000;    // to read at each refresh
constexpr std::chrono::seconds kPatience{1};  // keys wait while a daemon does not answer

// Two states of the daemon, from which rates follow.
class Samples {
 public:
  explicit Samples(Admin& admin) : admin_(admin) {}

  absl::Status Read() {
    absl::StatusOr<Look> look = ReadDaemonState(admin_, kSequences);
    if (!look.ok()) return look.status();
    const SteadyClock::time_point now = SteadyClock::now();
    seconds_ = std::chrono::duration<double>(now - read_at_).count();
    before_ = std::exchange(now_, *std::move(look));
    read_at_ = now;
    return absl::OkStatus();
  }
  const Look& now() const { return *now_; }
  Since since() const {
    return {.look = before_.has_value() ? &*before_ : nullptr, .seconds = seconds_};
  }

 private:
  Admin& admin_;
  std::optional<Look> now_, before_;
  SteadyClock::time_point read_at_ = SteadyClock::now();
  double seconds_ = 0;
};

// For a pipe or a file: plain tables, one after another. `rounds` 0: until the process is ended.
absl::Status PrintRounds(Samples& samples, Milliseconds interval, std::uint64_t rounds) {
  absl::Status status = samples.Read();
  for (std::uint64_t round = 0; status.ok() && (rounds == 0 || round < rounds); ++round) {
    std::this_thread::sleep_for(interval);
    status = samples.Read();
    if (!status.ok()) break;
    std::string text;
    for (const std::string& line : HeadLines(samples.now(), samples.since(), 0, false)) {
      Append(text, line, "\n");
    }
    Append(text, "\n", TenantTable(samples.now(), samples.since()).Render(), "\n");
    const Table sequences = SequenceTable(samples.now(), samples.since(), SequenceOrder::kNewest);
    Append(text, sequences.empty() ? "no sequences\n" : sequences.Render(), "\n");
    status = Print(text);
  }
  return status;
}

// Returns the signal that ended it; 0: a key, or enough rounds.
absl::StatusOr<int> Watch(Screen& screen, Samples& samples, Milliseconds interval,
                          std::uint64_t rounds) {
  if (absl::Status status = samples.Read(); !status.ok()) return status;
  if (absl::Status status = screen.Enter(); !status.ok()) return status;
  TopView view(OutputHasColours());
  std::string problem;
  SteadyClock::time_point next = SteadyClock::now() + interval;
  for (std::uint64_t round = 0;;) {
    screen.Draw(view.Draw(samples.now(), samples.since(), SizeOfOutput().value_or(TerminalSize()),
                          problem));
    const auto left = std::chrono::duration_cast<Milliseconds>(next - SteadyClock::now());
    const ScreenEvent event = screen.Wait(std::max(left, Milliseconds(0)));
    if (const auto* const key = std::get_if<char>(&event)) {
      if (!view.Press(*key)) return 0;
    } else if (const auto* const named = std::get_if<Key>(&event)) {
      view.Press(*named);
    } else if (const auto* const ended = std::get_if<Ended>(&event)) {
      return ended->signal;
    }
    if (SteadyClock::now() < next) continue;
    const absl::Status status = samples.Read();
    problem = std::string(AsStringView(status.message()));
    next = SteadyClock::now() + interval;
    if (rounds != 0 && ++round == rounds) return 0;
  }
}

// One line per daemon of a directory, again and again. `screen` may be null.
absl::StatusOr<int> WatchAll(Screen* screen, const Door& door, Milliseconds interval,
                             std::uint64_t rounds) {
  for (std::uint64_t round = 0; rounds == 0 || round < rounds; ++round) {
    const absl::StatusOr<std::vector<DaemonLook>> daemons = ReadDaemons(door, kPatience);
    if (!daemons.ok()) return daemons.status();
    if (screen == nullptr) {
      if (round > 0) std::this_thread::sleep_for(interval);
      if (absl::Status status = Print(DaemonsText(*daemons, 0)); !status.ok()) return status;
      continue;
    }
    if (round == 0) {
      if (absl::Status status = screen->Enter(); !status.ok()) return status;
    }
    screen->Draw(DaemonTable(*daemons).Lines(SizeOfOutput().value_or(TerminalSize()).columns));
    const ScreenEvent event = screen->Wait(interval);
    if (const auto* const key = std::get_if<char>(&event); key != nullptr && *key == 'q') return 0;
    if (const auto* const ended = std::get_if<Ended>(&event)) return ended->signal;
  }
  return 0;
}

absl::Status Top(const Flags& flags) {
  const absl::StatusOr<std::uint64_t> interval_ms = flags.Number("interval-ms", 100, 60'000);
  if (!interval_ms.ok()) return interval_ms.status();
  absl::StatusOr<std::uint64_t> rounds = flags.Number("rounds", 0, 1'000'000);
  if (!rounds.ok()) return rounds.status();
  if (flags.Has("once")) *rounds = 1;
  const Milliseconds interval(*interval_ms);
  // Before gRPC starts its threads.
  std::optional<Screen> screen;
  if (SizeOfOutput().has_value() && !flags.Has("once")) screen.emplace();
  absl::StatusOr<int> signal = 0;
  if (flags.Has("all")) {
    signal =
        WatchAll(screen.has_value() ? &*screen : nullptr, ConnectionOf(flags), interval, *rounds);
  } else {
    absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags), kPatience);
    if (!admin.ok()) return admin.status();
    Samples samples(*admin);
    if (!screen.has_value()) return PrintRounds(samples, interval, *rounds);
    signal = Watch(*screen, samples, interval, *rounds);
  }
  screen.reset();  // messages and the end by a signal come after the terminal is restored
  if (!signal.ok()) return signal.status();
  if (*signal != 0 && *signal != SIGINT) ::raise(*signal);
  return absl::OkStatus();
}

}  // namespace

CommandSpec TopSpec() {
  return {.name = "top",
          .summary = "show the same live, with rates",
          .description =
              "Shows a daemon live, with rates per second: memory, then one table of sequences,\n"
              "sessions or tenants, which fits the terminal. q quits, h lists the other keys.\n"
              "Without a terminal, prints all columns of every refresh.\n",
          .examples = {"tessera top --interval-ms=500", "tessera top --once > snapshot.txt"},
          .flags = {{"all", "", "Show all daemons of a directory, one line each.", ""},
                    {"interval-ms", "MS", "Time between refreshes.", "1000"},
                    {"once", "", "Print one refresh after the interval, then exit.", ""},
                    {"rounds", "N", "Exit after N refreshes. 0: never.", "0"}}};
}

int RunTop(std::span<const std::string_view> args) { return RunCommand(TopSpec(), args, Top); }

}  // namespace tessera::cli
