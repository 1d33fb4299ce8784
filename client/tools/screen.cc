#include "client/tools/screen.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "client/tools/output.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

// Alternate screen, no cursor, no wrapping at the right margin; and back.
constexpr char kEnter[] = "\x1b[?1049h\x1b[?25l\x1b[?7l";
constexpr char kLeave[] = "\x1b[?7h\x1b[?25h\x1b[?1049l";

constexpr std::chrono::milliseconds kRestOfSequence{25};

sigset_t WatchedSignals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH, SIGTSTP, SIGCONT}) {
    ::sigaddset(&set, signal);
  }
  return set;
}

// The sequences after ESC of terminals in use: xterm and its kin, the Linux console, tmux.
constexpr std::pair<std::string_view, Key> kSequences[] = {
    {"[A", Key::kUp},        {"OA", Key::kUp},    {"[B", Key::kDown}, {"OB", Key::kDown},
    {"[C", Key::kRight},     {"OC", Key::kRight}, {"[D", Key::kLeft}, {"OD", Key::kLeft},
    {"[5~", Key::kPageUp},   {"[H", Key::kHome},  {"OH", Key::kHome}, {"[1~", Key::kHome},
    {"[6~", Key::kPageDown}, {"[F", Key::kEnd},   {"OF", Key::kEnd},  {"[4~", Key::kEnd},
};

bool IsReadable(int fd, std::chrono::milliseconds limit) {
  pollfd wait = {.fd = fd, .events = POLLIN, .revents = 0};
  return ::poll(&wait, 1, static_cast<int>(limit.count())) > 0;
}

}  // namespace

Screen::Screen() {
  const sigset_t watched = WatchedSignals();
  ::pthread_sigmask(SIG_BLOCK, &watched, &blocked_before_);
  signals_ = ::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
}

Screen::~Screen() {
  Leave();
  if (signals_ >= 0) ::close(signals_);
  ::pthread_sigmask(SIG_SETMASK, &blocked_before_, nullptr);
}

absl::Status Screen::Enter() {
  if (::isatty(STDOUT_FILENO) == 0 || signals_ < 0) {
    return absl::FailedPreconditionError("standard output is not a terminal");
  }
  has_keys_ = ::isatty(STDIN_FILENO) != 0 && ::tcgetattr(STDIN_FILENO, &before_) == 0;
  if (has_keys_) {
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);  // Ctrl-C and Ctrl-Z remain signals
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
  }
  entered_ = true;
  return Print(kEnter);
}

void Screen::Leave() {
  if (!entered_) return;
  entered_ = false;
  static_cast<void>(Print(kLeave));  // the terminal may be gone
  if (has_keys_) ::tcsetattr(STDIN_FILENO, TCSAFLUSH, &before_);
}

void Screen::Draw(const std::vector<std::string>& lines) {
  // Every line is overwritten and its rest is cleared: no flicker.
  std::string frame = "\x1b[H";
  for (const std::string& line : lines) {
    Append(frame, &line == lines.data() ? "" : "\r\n", line, "\x1b[K");
  }
  frame += "\x1b[J";
  static_cast<void>(Print(frame));  // a terminal that is gone sends SIGHUP
}

void Screen::Stop() {
  Leave();
  sigset_t stop;
  ::sigemptyset(&stop);
  ::sigaddset(&stop, SIGTSTP);
  ::raise(SIGTSTP);  // pending until it is unblocked
  ::pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
  ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  static_cast<void>(Enter());
}

ScreenEvent Screen::NextKey() {
  const char first = pending_.front();
  if (first != '\x1b') {
    pending_.erase(0, 1);
    if (first == '\t') return Key::kTab;
    return first;
  }
  if (pending_.size() == 1 && IsReadable(STDIN_FILENO, kRestOfSequence)) {
    char more[16];
    const ssize_t got = ::read(STDIN_FILENO, more, sizeof(more));
    if (got > 0) pending_.append(more, static_cast<std::size_t>(got));
  }
  const std::string_view rest = std::string_view(pending_).substr(1);
  for (const auto& [sequence, key] : kSequences) {
    if (!rest.starts_with(sequence)) continue;
    pending_.erase(0, 1 + sequence.size());
    return key;
  }
  // The Escape key. A sequence that has no meaning here ends at its first letter or "~".
  std::size_t end = 1;
  if (rest.starts_with('[') || rest.starts_with('O')) {
    end = 2;
    while (end < pending_.size() && (pending_[end] < '@' || pending_[end] > '~')) ++end;
    ++end;
  }
  pending_.erase(0, end);
  return '\x1b';
}

ScreenEvent Screen::Wait(std::chrono::milliseconds limit) {
  if (!pending_.empty()) return NextKey();
  pollfd waits[] = {{.fd = signals_, .events = POLLIN, .revents = 0},
                    {.fd = has_keys_ ? STDIN_FILENO : -1, .events = POLLIN, .revents = 0}};
  const int ready = ::poll(waits, 2, static_cast<int>(limit.count()));
  if (ready == 0 || (ready < 0 && errno == EINTR)) return TimedOut();
  signalfd_siginfo info = {};
  if (::read(signals_, &info, sizeof(info)) == sizeof(info)) {
    const auto signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGWINCH || signal == SIGCONT) return Resized();
    if (signal != SIGTSTP) return Ended{.signal = signal};
    Stop();
    return Resized();
  }
  if (waits[1].revents == 0) return TimedOut();
  char typed[64];
  const ssize_t got = ::read(STDIN_FILENO, typed, sizeof(typed));
  if (got <= 0) return Ended{.signal = SIGHUP};  // the terminal is gone
  pending_.assign(typed, static_cast<std::size_t>(got));
  return NextKey();
}

}  // namespace tessera::cli
