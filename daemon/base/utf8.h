// UTF-8 validation.
#pragma once

#include <cstddef>
#include <string_view>

namespace tessera {

// Length in bytes (1 to 4) of the well-formed UTF-8 sequence at the start of `text`, which must not
// be empty. 0 if it is malformed: a stray continuation byte, an overlong form, a surrogate or a cut
// sequence.
std::size_t Utf8SequenceLength(std::string_view text);

// Whether `text` consists of well-formed sequences only.
bool IsUtf8(std::string_view text);

}  // namespace tessera
