#include "client/cli/eval/eval_text.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/eval/eval_books.h"
#include "client/cli/eval/eval_flags.h"
#include "client/eval/text/text_evaluation.h"
#include "client/eval/text/text_report.h"
#include "client/tools/connection.h"
#include "client/tools/local_daemon.h"
#include "client/tools/output.h"
#include "client/tools/report.h"
#include "client/tools/table.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"

namespace tessera::cli {

namespace {

using namespace eval;  // NOLINT(google-build-using-namespace): this file is a part of its command

constexpr const char* kDefaultPolicies[] = {
    "dense",
    "fp8",
    "planes",
    "planes:small",
    "mosaickv:keep=1,select=0+int8",
    "mosaickv:keep=1,select=0+fp8",
    "mosaickv",
    "mosaickv:keep=0.375,select=0+int8",
    "quest:tokens=256",
    "chunkkv:budget=0.35",
    "snapkv:budget=0.35",
    "semantickv:keep_total=0.35,sink=4",
    "semanticache:budget=0.35",
    "h2o:heavy=358,recent=358",
    "lacache:budget=716",
    "streaming:budget=716",
};
constexpr const char* kQuickPolicies[] = {"dense", "mosaickv:keep=0.375,select=0+int8", "mosaickv",
                                          "chunkkv:budget=0.35", "streaming:budget=358"};
constexpr std::string_view kNeedles = "needles";

absl::StatusOr<std::vector<std::uint32_t>> NeedlesOf(const Flags& flags) {
  std::string list = flags.Given("tasks") ? flags.Get("tasks") : "all";
  if (list == "none") return std::vector<std::uint32_t>();
  if (list == "all") list = flags.Has("quick") ? "needles1" : "needles1,needles4,needles8";
  std::string numbers;
  for (const std::string& task : SplitList(list)) {
    if (!task.starts_with(kNeedles)) {
      return absl::InvalidArgumentError(
          Concat("--tasks: ", Quoted(task), " must be needles1 to needles16, or none"));
    }
    Append(numbers, numbers.empty() ? "" : ",", task.substr(kNeedles.size()));
  }
  auto needles = Numbers<std::uint32_t>("tasks", numbers);
  if (!needles.ok()) return needles.status();
  for (const std::uint32_t count : *needles) {
    if (count >= 1 && count <= 16) continue;
    return absl::InvalidArgumentError(
        Concat("--tasks: ", count, " needles; 1 to 16 can be hidden"));
  }
  return needles;
}

absl::StatusOr<std::uint32_t> NumberOr(const Flags& flags, const char* name,
                                       std::uint32_t otherwise, std::uint32_t min,
                                       std::uint32_t max) {
  if (!flags.Given(name)) return otherwise;
  const auto number = flags.Number(name, min, max);
  if (!number.ok()) return number.status();
  return static_cast<std::uint32_t>(*number);
}

absl::StatusOr<TextPlan> PlanOf(const Flags& flags) {
  for (const char* const flag : {"state", "depths", "seed", "show"}) {
    if (!flags.Given(flag)) continue;
    return absl::InvalidArgumentError(Concat("--", flag, " is for the recall model only"));
  }
  TextPlan plan;
  const bool quick = flags.Has("quick");
  auto policies = quick ? PoliciesOf(flags, kQuickPolicies) : PoliciesOf(flags, kDefaultPolicies);
  if (!policies.ok()) return policies.status();
  auto questions = QuestionsOf(flags);
  if (!questions.ok()) return questions.status();
  auto lengths = Numbers<std::uint32_t>("lengths", Given(flags, "lengths", "1024", "2048"));
  if (!lengths.ok()) return lengths.status();
  auto needles = NeedlesOf(flags);
  if (!needles.ok()) return needles.status();
  const struct {
    const char* name;
    std::uint32_t otherwise, min, max;
    std::uint32_t& field;
  } numbers[] = {{"samples", quick ? 2u : 6u, 1, 1000, plan.texts},
                 {"read", quick ? 128u : 256u, 32, 65536, plan.read},
                 {"generate", 0, 0, 65536, plan.generate},
                 {"batch", 16, 1, 256, plan.batch}};
  for (const auto& [name, otherwise, min, max, field] : numbers) {
    const auto number = NumberOr(flags, name, otherwise, min, max);
    if (!number.ok()) return number.status();
    field = *number;
  }
  plan.policies = *std::move(policies);
  plan.questions = *std::move(questions);
  plan.lengths = *std::move(lengths);
  plan.needles = *std::move(needles);
  for (const std::uint32_t length : plan.lengths) {
    if (length < 256 || length > 1 << 20) {
      return absl::InvalidArgumentError(
          Concat("--lengths: ", length, " tokens; language models need 256 to ", 1 << 20));
    }
  }
  return plan;
}

// What is finished, on stderr if that is a terminal.
class Progress {
 public:
  explicit Progress(std::size_t units) : units_(units) { Show(); }
  ~Progress() {
    if (screen_) std::fputs("\r\x1b[K", stderr);
  }
  void Finished() {
    ++done_;
    Show();
  }

 private:
  void Show() const {
    if (!screen_) return;
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begun_;
    const std::string left =
        done_ == 0 ? std::string()
                   : Concat(", ", Age(spent.count() / done_ * static_cast<double>(units_ - done_)),
                            " left");
    std::fprintf(stderr, "\r\x1b[K%zu of %zu texts%s", done_, units_, left.c_str());
  }

  const bool screen_ = ::isatty(STDERR_FILENO) != 0;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  const std::size_t units_;
  std::size_t done_ = 0;
};

std::string SizeOf(const std::string& model) {
  std::error_code error;  // ignored: a folder has no size to name
  const std::uintmax_t bytes = std::filesystem::file_size(model, error);
  return error ? model : Concat(model, " (", bytes, " bytes)");
}

}  // namespace

absl::Status EvaluateTexts(const Flags& flags, std::span<const std::string_view> args,
                           const std::string& model) {
  absl::StatusOr<TextPlan> plan = PlanOf(flags);
  if (!plan.ok()) return plan.status();
  const auto workers = flags.Number("workers", 0, 64);
  if (!workers.ok()) return workers.status();
  if (flags.Has("report")) {
    for (const std::string& path : {flags.Get("report"), CsvBeside(flags.Get("report"))}) {
      if (absl::Status status = CheckWritable("report", path); !status.ok()) return status;
    }
  }
  absl::StatusOr<std::vector<EvaluationText>> texts = ReadTexts(SplitList(flags.Get("texts")));
  if (!texts.ok()) return texts.status();
  const std::vector<std::string> book_files = SplitList(flags.Get("book"));
  const absl::StatusOr<std::vector<kernels::BookFile>> books = ReadBooks(book_files);
  if (!books.ok()) return books.status();
  if (absl::Status status = CheckBooks(*books, *texts, plan->policies); !status.ok()) return status;
  const std::uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  std::unique_ptr<bench::LocalDaemon> own;
  Door door = ConnectionOf(flags);
  if (door.address.empty()) {
    if (absl::Status status = CheckNoDevice(door); !status.ok()) return status;
    std::vector<std::string> daemon_flags = {Concat("--compactor-threads=", cores + 1)};
    for (const std::string& file : book_files) {
      daemon_flags.push_back(Concat("--book=", std::filesystem::absolute(file).string()));
    }
    absl::StatusOr<std::unique_ptr<bench::LocalDaemon>> daemon =
        bench::LocalDaemon::Start(daemon_flags);
    if (!daemon.ok()) return daemon.status();
    own = *std::move(daemon);
    door = {.address = own->address(), .tls = std::nullopt, .token = ""};
  }
  const absl::StatusOr<std::unique_ptr<TextEvaluation>> evaluation = TextEvaluation::Open(
      {.model = model,
       .address = door.address,
       .device = door.device,
       .tls = door.tls,
       .texts = *std::move(texts),
       .max_texts = plan->texts,
       .min_tokens = *std::ranges::max_element(plan->lengths) + plan->read + 1});
  if (!evaluation.ok()) return evaluation.status();
  plan->texts = static_cast<std::uint32_t>((*evaluation)->texts().size());
  TextResults results(*std::move(plan));
  absl::Status status;
  {
    Progress progress(results.units().size());
    status = (*evaluation)
                 ->Run(results, *workers == 0 ? cores : static_cast<std::uint32_t>(*workers),
                       [&] { progress.Finished(); });
  }
  if (!status.ok()) return status;
  const TextFacts facts = {
      .machine = bench::Machine(),
      .dense_bytes_per_token = static_cast<double>((*evaluation)->dense_bytes_per_token()),
      .version = std::string(Version()),
      .date = NowInUtc(),
      .model = SizeOf(model),
      .command = ShellCommand(args),
      .texts = (*evaluation)->texts()};
  status = Print(flags.Has("json") ? TextJson(results) : TextSummary(results, facts));
  if (!status.ok() || !flags.Has("report")) return status;
  status = WriteFile(CsvBeside(flags.Get("report")), TextCsv(results, facts));
  if (!status.ok()) return status;
  return WriteFile(flags.Get("report"), TextPage(results, facts));
}

}  // namespace tessera::cli
