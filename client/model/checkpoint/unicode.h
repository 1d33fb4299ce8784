// UTF-8 and the classes of characters that tokenizers split text by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::llm {

struct Character {
  char32_t code = 0;
  std::size_t bytes = 0;  // at least 1
};
// The first character of a text that is not empty. A byte that does not start a valid character
// counts as U+FFFD.
Character FirstCharacter(std::string_view text);
void AppendUtf8(char32_t code, std::string& text);

bool IsLetter(char32_t code);  // general category L
bool IsNumber(char32_t code);  // general category N
bool IsSpace(char32_t code);   // property White_Space

}  // namespace tessera::llm
