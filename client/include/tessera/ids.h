// Identifiers of what the daemon holds. Each kind has its own type, so they cannot be mixed up.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <utility>

namespace tessera::client {

// A default-constructed id is invalid: the daemon never assigns 0.
template <typename Tag>
class Id {
 public:
  constexpr Id() = default;
  constexpr explicit Id(std::uint64_t value) : value_(value) {}

  constexpr std::uint64_t value() const { return value_; }
  constexpr bool valid() const { return value_ != 0; }

  friend constexpr auto operator<=>(Id, Id) = default;

  // "session 7"; "session 0 (invalid)" for a default-constructed one.
  std::string ToString() const {
    return std::string(Tag::kName) + " " + std::to_string(value_) + (valid() ? "" : " (invalid)");
  }
  friend std::ostream& operator<<(std::ostream& out, Id id) { return out << id.ToString(); }

  // For absl's hash tables; std::hash is below.
  template <typename H>
  friend H AbslHashValue(H state, Id id) {
    return H::combine(std::move(state), id.value_);
  }

 private:
  std::uint64_t value_ = 0;
};

struct SessionTag {
  static constexpr const char* kName = "session";
};
struct SequenceTag {
  static constexpr const char* kName = "sequence";
};
struct ModelTag {
  static constexpr const char* kName = "model";
};
struct PrefixTag {
  static constexpr const char* kName = "prefix";
};
struct ComputationTag {
  static constexpr const char* kName = "computation";
};

using SessionId = Id<SessionTag>;
using SequenceId = Id<SequenceTag>;
using ModelId = Id<ModelTag>;
using PrefixId = Id<PrefixTag>;
using ComputationId = Id<ComputationTag>;  // of a prefix that a session has announced to compute

}  // namespace tessera::client

template <typename Tag>
struct std::hash<tessera::client::Id<Tag>> {
  std::size_t operator()(tessera::client::Id<Tag> id) const noexcept {
    return std::hash<std::uint64_t>{}(id.value());
  }
};
