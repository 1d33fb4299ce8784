// The whole terminal, for a command that redraws it: the alternate screen without a cursor, keys
// without Enter and without echo.
#pragma once

#include <termios.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"

namespace tessera::cli {

enum class Key : std::uint8_t { kUp, kDown, kLeft, kRight, kPageUp, kPageDown, kHome, kEnd, kTab };
struct Resized {};  // the size changed, or the process continues after it was stopped
struct TimedOut {};
struct Ended {
  int signal = 0;  // SIGINT, SIGTERM, SIGHUP or SIGQUIT
};
// A character is a key without a name.
using ScreenEvent = std::variant<TimedOut, char, Key, Resized, Ended>;

// Single-threaded. Create it before the process starts threads: it blocks the signals that it waits
// for, and threads inherit that. Only SIGKILL and a crash leave the terminal as it is; every other
// end restores it, and so does a stop by Ctrl-Z until the process continues.
class Screen {
 public:
  Screen();
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  // Takes the terminal. FAILED_PRECONDITION: standard output is not one.
  absl::Status Enter();
  // Gives it back. Enter may follow.
  void Leave();

  // Shows these lines, which must fit the terminal.
  void Draw(const std::vector<std::string>& lines);

  ScreenEvent Wait(std::chrono::milliseconds limit);

 private:
  // Stops the process as Ctrl-Z does, with the terminal restored meanwhile.
  void Stop();
  ScreenEvent NextKey();

  bool entered_ = false;
  bool has_keys_ = false;  // standard input is a terminal, too
  termios before_ = {};
  sigset_t blocked_before_ = {};
  int signals_ = -1;     // signalfd
  std::string pending_;  // input that was read but not returned
};

}  // namespace tessera::cli
