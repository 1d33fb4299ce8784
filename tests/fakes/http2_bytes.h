// The bytes that an HTTP/2 peer sends.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::fakes {

inline std::string BigEndian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = bytes - 1; i >= 0; --i) text += static_cast<char>(value >> (8 * i));
  return text;
}

inline constexpr std::string_view kHttp2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

inline std::string Frame(int type, int flags, std::uint32_t stream, std::string_view payload) {
  return BigEndian(payload.size(), 3) + static_cast<char>(type) + static_cast<char>(flags) +
         BigEndian(stream, 4) + std::string(payload);
}
// A block of headers, in one frame.
inline std::string HeadersFrame(std::uint32_t stream, std::string_view block = "h") {
  return Frame(1, 0x4, stream, block);
}
// A gRPC message, or the beginning of one that has `length` bytes.
inline std::string GrpcMessage(std::string_view bytes, std::uint64_t length, char compressed = 0) {
  return compressed + BigEndian(length, 4) + std::string(bytes);
}
inline std::string GrpcMessage(std::string_view bytes) { return GrpcMessage(bytes, bytes.size()); }
inline std::string DataFrame(std::uint32_t stream, std::string_view payload, bool last = false) {
  return Frame(0, last ? 1 : 0, stream, payload);
}

}  // namespace tessera::fakes
