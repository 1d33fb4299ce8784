#include "client/cli/eval/eval_books.h"

#include <algorithm>
#include <filesystem>
#include <span>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/platform/read_file.h"
#include "daemon/policies/grammar/parse.h"

namespace tessera::cli {

absl::StatusOr<std::vector<kernels::BookFile>> ReadBooks(const std::vector<std::string>& paths) {
  std::vector<kernels::BookFile> books;
  for (const std::string& path : paths) {
    std::error_code error;  // ignored: reading the file fails, too
    const std::uintmax_t bytes = std::filesystem::file_size(path, error);
    const absl::StatusOr<std::string> content = ReadFile(path, error ? 0 : bytes);
    if (!content.ok()) return content.status();
    kernels::BookFile book;
    const std::string problem = kernels::ReadBookFile(std::as_bytes(std::span(*content)), book);
    if (!problem.empty()) {
      return absl::InvalidArgumentError(Concat("--book: ", Quoted(path), ": ", problem));
    }
    books.push_back(std::move(book));
  }
  return books;
}

absl::Status CheckBooks(const std::vector<kernels::BookFile>& books,
                        const std::vector<eval::EvaluationText>& texts,
                        const std::vector<eval::PolicyAt>& policies) {
  for (const kernels::BookFile& book : books) {
    for (const eval::EvaluationText& text : texts) {
      const kernels::BookText read = kernels::BookTextOf(text.path, text.text);
      for (const kernels::BookText& of_book : book.texts) {
        if (!of_book.IsLike(read)) continue;
        return absl::InvalidArgumentError(
            Concat("--book: the book ", book.name, " was made from ", Quoted(of_book.name),
                   ", and ", Quoted(text.path),
                   " is to be read; name other texts with --texts, or "
                   "make the book from others"));
      }
    }
  }
  for (const eval::PolicyAt& at : policies) {
    // A text that is no policy is refused by the daemon.
    const auto policy = policies::ParsePolicy(at.For(1024));
    if (!policy.ok() || !policy->planes.has_value() || !policy->planes->has_book_of_file()) {
      continue;
    }
    const std::string& name = policy->planes->book;
    if (std::ranges::find(books, name, &kernels::BookFile::name) != books.end()) continue;
    return absl::InvalidArgumentError(
        Concat(at.Name(), ": name the file of the book ", name,
               " with --book, so that its texts can be compared with those that are read"));
  }
  return absl::OkStatus();
}

}  // namespace tessera::cli
