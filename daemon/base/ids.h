// Typed identifiers of the objects that the daemon owns. On the wire all are 64-bit integers;
// inside the daemon each kind has its own type, so that they cannot be mixed up.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <utility>

namespace tessera {

// 0 is never assigned: a default-constructed id is invalid.
template <typename Tag, typename Rep = std::uint64_t>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep value) : value_(value) {}

  constexpr Rep value() const { return value_; }
  constexpr bool valid() const { return value_ != 0; }

  friend constexpr auto operator<=>(StrongId, StrongId) = default;

  // "session 7"; "session 0 (invalid)" for a default-constructed one.
  std::string ToString() const {
    return std::string(Tag::kName) + " " + std::to_string(value_) + (valid() ? "" : " (invalid)");
  }
  friend std::ostream& operator<<(std::ostream& out, StrongId id) { return out << id.ToString(); }

  // For Abseil's hash tables; std::hash is below.
  template <typename H>
  friend H AbslHashValue(H state, StrongId id) {
    return H::combine(std::move(state), id.value_);
  }

 private:
  Rep value_ = 0;
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
struct TenantTag {
  static constexpr const char* kName = "tenant";
};
struct SegmentTag {
  static constexpr const char* kName = "segment";
};
struct PrefixTag {
  static constexpr const char* kName = "prefix";
};
struct ComputationTag {
  static constexpr const char* kName = "computation";
};

using SessionId = StrongId<SessionTag>;
using SequenceId = StrongId<SequenceTag>;
using ModelId = StrongId<ModelTag>;
using TenantId = StrongId<TenantTag>;
using SegmentId = StrongId<SegmentTag>;
using PrefixId = StrongId<PrefixTag>;
using ComputationId = StrongId<ComputationTag>;  // of a prefix that a session announced to compute

}  // namespace tessera

template <typename Tag, typename Rep>
struct std::hash<tessera::StrongId<Tag, Rep>> {
  std::size_t operator()(tessera::StrongId<Tag, Rep> id) const noexcept {
    return std::hash<Rep>{}(id.value());
  }
};
