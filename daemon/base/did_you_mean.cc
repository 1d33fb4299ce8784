#include "daemon/base/did_you_mean.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "daemon/base/strings.h"

namespace tessera {
namespace {

// Longer words get no suggestion, which bounds the work.
constexpr std::size_t kLongest = 32;

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Edit distance with insertions, deletions, replacements and swaps of neighbours (optimal string
// alignment).
std::size_t EditDistance(std::string_view a, std::string_view b) {
  // least[i][j]: distance between a's first i and b's first j characters.
  std::vector<std::vector<std::size_t>> least(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  const auto same = [&](std::size_t i, std::size_t j) {
    return Lower(a[i - 1]) == Lower(b[j - 1]);
  };
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      std::size_t& here = least[i][j];
      if (i == 0 || j == 0) {
        here = i + j;
        continue;
      }
      here = std::min(
          {least[i - 1][j] + 1, least[i][j - 1] + 1, least[i - 1][j - 1] + (same(i, j) ? 0 : 1)});
      if (i > 1 && j > 1 && same(i, j - 1) && same(i - 1, j)) {
        here = std::min(here, least[i - 2][j - 2] + 1);
      }
    }
  }
  return least[a.size()][b.size()];
}

}  // namespace

std::string DidYouMean(std::string_view text, std::span<const std::string_view> words) {
  if (text.empty() || text.size() > kLongest) return "";
  std::string_view nearest;
  std::size_t least = text.size();
  for (const std::string_view word : words) {
    const std::size_t distance = EditDistance(text, word);
    // Up to a third of a word may be wrong, but at least one character.
    if (distance >= least || distance > std::max<std::size_t>(1, word.size() / 3)) continue;
    least = distance;
    nearest = word;
  }
  return nearest.empty() ? "" : Concat("; did you mean \"", nearest, "\"?");
}

}  // namespace tessera
