// tessera calibrate: makes a book file for planes:book=NAME from texts.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/eval/eval_flags.h"
#include "client/cli/eval/model_path.h"
#include "client/eval/text/calibration.h"
#include "client/eval/text/texts.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

// The name of the output file without its extension, unless --name is given.
absl::StatusOr<std::string> BookNameOf(const Flags& flags) {
  const std::string name = flags.Has("name")
                               ? flags.Get("name")
                               : std::filesystem::path(flags.Get("out")).stem().string();
  if (kernels::IsBookName(name) && name != "auto" && name != "own") return name;
  return absl::InvalidArgumentError(
      Concat("the book's name is ", Quoted(name), "; it must have 1 to ", kernels::kMaxBookName,
             " letters, digits, '.', '_' and '-', and must not be auto or own: give --name"));
}

absl::Status MakeBooks(const Flags& flags) {
  for (const char* const needed : {"model", "out"}) {
    if (!flags.Has(needed)) return absl::InvalidArgumentError(Concat("--", needed, " is missing"));
  }
  const absl::StatusOr<std::string> name = BookNameOf(flags);
  if (!name.ok()) return name.status();
  const auto rows = flags.Number("rows", 256, 1 << 20);
  if (!rows.ok()) return rows.status();
  const std::string& out = flags.Get("out");
  if (absl::Status status = CheckWritable("out", out); !status.ok()) return status;
  const absl::StatusOr<std::vector<eval::EvaluationText>> texts =
      eval::ReadTexts(flags.positional());
  if (!texts.ok()) return texts.status();
  const absl::StatusOr<std::string> path = FindModel(flags.Get("model"));
  if (!path.ok()) return path.status();
  const absl::StatusOr<std::unique_ptr<llm::Tokenizer>> tokenizer = llm::ReadTokenizer(*path);
  if (!tokenizer.ok()) return tokenizer.status();
  const absl::StatusOr<std::unique_ptr<llm::Model>> model = llm::Model::Load(*path);
  if (!model.ok()) return model.status();
  const absl::StatusOr<kernels::BookFile> book = eval::Calibrate(
      **model, **tokenizer, *texts, {.name = *name, .rows = static_cast<std::uint32_t>(*rows)});
  if (!book.ok()) return book.status();
  const std::vector<std::byte> bytes = kernels::BytesOf(*book);
  const absl::Status written =
      WriteFile(out, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  if (!written.ok()) return written;
  return Print(Concat("wrote ", out, ": book ", book->name, ", ", book->lanes.size(), " lanes, ",
                      book->rows, " rows each, ", FormatBytes(bytes.size()), "; model ",
                      kernels::FingerprintText(book->fingerprint), "\n"));
}

}  // namespace

CommandSpec CalibrateSpec() {
  return {
      .name = "calibrate",
      .summary = "make a model's book file from texts",
      .description =
          "Computes texts with a language model, and makes the means and rotations of all its\n"
          "lanes from what it would cache. A daemon that is started with --book=FILE has the\n"
          "book, and sequences use it with the policy planes:book=NAME from their first tile on.\n"
          "A few thousand tokens of any text suffice. Never evaluate a policy on texts that its\n"
          "book was made from; 'tessera eval' refuses to.\n",
      .arguments = {{.name = "TEXT", .hint = "a file with text", .repeats = true}},
      .examples = {"tessera calibrate --model=smollm2 --out=smollm2.book README.md CONTRIBUTING.md",
                   "tesserad --book=smollm2.book"},
      .flags = {{"model", "NAME|PATH",
                 "A language model that deploy/models/fetch has fetched, or its path. Required.",
                 ""},
                {"out", "FILE", "The book file to write. Required.", ""},
                {"name", "NAME", "Name of the book. Unset: that of the file, without extension.",
                 ""},
                {"rows", "N", "Rows of each lane, in equal parts from all texts.", "4096"}},
      .connects = Connects::kNowhere};
}

int RunCalibrate(std::span<const std::string_view> args) {
  return RunCommand(CalibrateSpec(), args, MakeBooks);
}

}  // namespace tessera::cli
