// Reads an input's bytes from the front. Past the end it returns zeros, so that every input is
// valid.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace tessera::fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size)
      : left_(reinterpret_cast<const char*>(data), size) {}
  explicit Input(std::string_view bytes) : left_(bytes) {}

  bool empty() const { return left_.empty(); }
  std::size_t size() const { return left_.size(); }

  // Little-endian.
  template <typename T>
  T Take() {
    static_assert(std::is_integral_v<T>);
    T value = 0;
    const std::string_view bytes = Bytes(sizeof value);
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  std::uint8_t Byte() { return Take<std::uint8_t>(); }
  // At most `count` bytes.
  std::string_view Bytes(std::size_t count) {
    const std::string_view taken = left_.substr(0, std::min(count, left_.size()));
    left_.remove_prefix(taken.size());
    return taken;
  }
  // A byte string with a two-byte length in front, cut at the end of the input.
  std::string_view Chunk() { return Bytes(Take<std::uint16_t>()); }
  std::string_view Rest() { return Bytes(left_.size()); }

 private:
  std::string_view left_;
};

// Writes seeds in the format that Input reads.
class Output {
 public:
  template <typename T>
  Output& Add(T value) {
    static_assert(std::is_integral_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Output& Byte(std::uint8_t value) { return Add(value); }
  Output& Bytes(std::string_view bytes) {
    bytes_.append(bytes);
    return *this;
  }
  Output& Chunk(std::string_view bytes) {
    return Add(static_cast<std::uint16_t>(bytes.size())).Bytes(bytes);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

}  // namespace tessera::fuzz
