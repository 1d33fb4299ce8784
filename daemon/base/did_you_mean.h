// A guess at what a misspelt word was meant to be.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace tessera {

// "; did you mean \"quest\"?" where one of `words` is close to `text`, upper and lower case being
// the same; else nothing.
std::string DidYouMean(std::string_view text, std::span<const std::string_view> words);

}  // namespace tessera
