#pragma once

#include <cstddef>
#include <string_view>

namespace tessera {

// Bytes of the well-formed UTF-8 sequence that `text` (not empty) starts with, 1 to 4; 0 where it
// starts with none (a stray continuation byte, an overlong form, a surrogate, a cut sequence).
std::size_t Utf8SequenceLength(std::string_view text);

// Nothing but such sequences.
bool IsUtf8(std::string_view text);

}  // namespace tessera
