// The handles of the C interface, and helpers that its functions share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "client/api/c_events.h"
#include "tessera/tessera.h"
#include "tessera/worker.h"

struct tessera_worker {
  std::unique_ptr<tessera::client::Worker> worker;
  std::unique_ptr<tessera::client::CEvents> events = nullptr;  // null in tests

  // The worker's lease thread pushes events until the worker is gone.
  ~tessera_worker() { worker = nullptr; }
};
struct tessera_model {
  tessera::client::Model model;
};
struct tessera_sequence {
  tessera::client::Sequence sequence;
};

namespace tessera::client {

tessera_code Report(const absl::Status& status, tessera_error* error);

// A pointer argument. It may be NULL only if it has no elements.
struct CArgument {
  const char* name;
  const void* pointer;
  std::size_t elements = 1;
};
// INVALID_ARGUMENT names the call and the first argument that must not be NULL but is.
absl::Status CheckArguments(const char* call, std::initializer_list<CArgument> arguments);

// Copies the caller's struct into one of this library's size. Fields that an older header lacks get
// the values of `defaults`.
template <typename Struct>
Struct Adopt(const Struct* given, Struct defaults) {
  if (given == nullptr) return defaults;
  std::memcpy(&defaults, given, std::min(given->struct_size, sizeof(Struct)));
  return defaults;
}

// Unknown numbers become 0, which no call accepts.
inline ElementType ToElementType(tessera_type type) {
  const bool known = type >= TESSERA_BF16 && type <= TESSERA_FP32;
  return static_cast<ElementType>(known ? type : 0);
}

inline std::string Text(const char* text) { return text == nullptr ? "" : text; }

inline std::span<const std::byte> Bytes(const void* data, std::size_t size) {
  return {static_cast<const std::byte*>(data), size};
}

inline std::string ByteString(const void* data, std::size_t size) {
  return size == 0 ? std::string() : std::string(static_cast<const char*>(data), size);
}

inline tessera_code Hand(absl::StatusOr<Sequence> sequence, tessera_sequence** out,
                         tessera_error* error) {
  if (sequence.ok()) *out = new tessera_sequence{*std::move(sequence)};
  return Report(sequence.status(), error);
}

}  // namespace tessera::client
