// Suggests the intended word for a misspelt one.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace tessera {

// Returns "; did you mean \"quest\"?" if one of `words` is close to `text`, ignoring case; else "".
std::string DidYouMean(std::string_view text, std::span<const std::string_view> words);

}  // namespace tessera
