// tessera eval: measures how policies change the answers of the recall model, a toy trained for
// exactly these tasks.

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "client/cli/command.h"
#include "client/eval/evaluation.h"
#include "client/eval/report_page.h"
#include "client/eval/result_table.h"
#include "client/eval/state_file.h"
#include "client/eval/tally.h"
#include "client/eval/unit_process.h"
#include "client/tools/connection.h"
#include "client/tools/local_daemon.h"
#include "client/tools/output.h"
#include "client/tools/report.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"

namespace tessera::cli {

namespace {

using namespace eval;  // NOLINT(google-build-using-namespace): this file is its command

constexpr const char* kDefaultPolicies[] = {
    "dense",
    "mosaickv:keep={},group=1,select=0,loss_k=1,loss_v=1",
    "chunkkv:budget={}",
    "snapkv:budget={}",
    "semantickv:sink=16,keep_total={}",
    "semanticache:tau=0.7",
    "h2o:heavy={tokens/2},recent={tokens/2}",
    "lacache:span=2,overlap=1,pass=uniform,budget={tokens}",
    "streaming:budget={tokens}",
    "chunkkv:budget={}+mosaickv:keep=0.25,group=1,select=0,loss_k=1,loss_v=1",
};

std::vector<std::string> Split(std::string_view list) {
  std::vector<std::string> items;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    items.emplace_back(Trim(list.substr(0, end)));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return items;
}

// Skips duplicates, which would be counted twice.
template <typename Value>
void AddNew(Value value, std::vector<Value>& values) {
  if (std::ranges::find(values, value) == values.end()) values.push_back(std::move(value));
}

// The flag's value, or its default with and without --quick.
std::string Given(const Flags& flags, const char* name, const char* quick, const char* full) {
  if (flags.Has(name)) return flags.Get(name);
  return flags.Has("quick") ? quick : full;
}

template <typename Value>
absl::StatusOr<std::vector<Value>> Numbers(const char* name, const std::string& list) {
  std::vector<Value> numbers;
  for (const std::string& item : Split(list)) {
    Value value = {};
    const char* const end = item.data() + item.size();
    const auto result = std::from_chars(item.data(), end, value);
    if (result.ec != std::errc() || result.ptr != end) {
      return absl::InvalidArgumentError(Concat("--", name, ": \"", item, "\" is not a number"));
    }
    AddNew(value, numbers);
  }
  if (numbers.empty()) return absl::InvalidArgumentError(Concat("--", name, " is empty"));
  return numbers;
}

absl::StatusOr<std::vector<PolicyAt>> PoliciesOf(const Flags& flags) {
  const auto budgets = Numbers<double>("budgets", flags.Get("budgets"));
  if (!budgets.ok()) return budgets.status();
  for (const double budget : *budgets) {
    if (budget > 0 && budget <= 1) continue;
    return absl::InvalidArgumentError(
        Concat("--budgets: ", budget, " is out of range; a budget is above 0 and at most 1"));
  }
  std::vector<std::string> given = flags.positional();
  if (given.empty()) given.assign(std::begin(kDefaultPolicies), std::end(kDefaultPolicies));
  std::vector<PolicyAt> policies;
  for (const std::string& text : given) {
    if (!PolicyAt::HasPlace(text)) {
      AddNew<PolicyAt>({.text = text}, policies);
      continue;
    }
    for (const double budget : *budgets) {
      AddNew<PolicyAt>({.text = text, .budget = budget}, policies);
    }
  }
  return policies;
}

absl::StatusOr<std::vector<Question>> QuestionsOf(const Flags& flags) {
  std::vector<Question> questions;
  for (const std::string& name : Split(flags.Get("question"))) {
    if (name != "blind" && name != "seen") {
      return absl::InvalidArgumentError(Concat("--question: \"", name, "\" must be blind or seen"));
    }
    AddNew(name == "blind" ? Question::kBlind : Question::kSeen, questions);
  }
  if (questions.empty()) return absl::InvalidArgumentError("--question is empty");
  return questions;
}

absl::StatusOr<EvaluationPlan> PlanOf(const Flags& flags) {
  EvaluationPlan plan;
  for (std::string& task : Split(flags.Get("tasks"))) AddNew(std::move(task), plan.tasks);
  if (plan.tasks.empty()) return absl::InvalidArgumentError("--tasks is empty");
  if (flags.Get("tasks") == "all") {
    const auto names = RecallTasks::Names();
    plan.tasks.assign(names.begin(), names.end());
  }
  auto policies = PoliciesOf(flags);
  if (!policies.ok()) return policies.status();
  auto questions = QuestionsOf(flags);
  if (!questions.ok()) return questions.status();
  auto lengths = Numbers<std::uint32_t>("lengths", Given(flags, "lengths", "1024", "512,2048"));
  if (!lengths.ok()) return lengths.status();
  auto depths = Numbers<double>("depths", flags.Get("depths"));
  if (!depths.ok()) return depths.status();
  const auto samples = Numbers<std::uint32_t>("samples", Given(flags, "samples", "1", "3"));
  if (!samples.ok()) return samples.status();
  if (samples->size() != 1 || (*samples)[0] < 1 || (*samples)[0] > 10000) {
    return absl::InvalidArgumentError("--samples must be one number from 1 to 10000");
  }
  plan.samples = (*samples)[0];
  const auto seed =
      flags.Number("seed", 0, std::numeric_limits<std::uint32_t>::max() - plan.samples);
  if (!seed.ok()) return seed.status();
  const auto batch = flags.Number("batch", 1, 256);
  if (!batch.ok()) return batch.status();
  plan.policies = *std::move(policies);
  plan.questions = *std::move(questions);
  plan.lengths = *std::move(lengths);
  plan.depths = *std::move(depths);
  plan.first_seed = static_cast<std::uint32_t>(*seed);
  plan.batch = static_cast<std::uint32_t>(*batch);
  return plan;
}

// A progress bar on stderr with the remaining time, if stderr is a terminal.
class ProgressLine {
 public:
  ProgressLine(const Results& results) {
    for (std::size_t i = 0; i < results.units().size(); ++i) {
      const double work = WorkOf(results.units()[i]) * results.plan().samples *
                          static_cast<double>(results.plan().policies.size());
      all_ += work;
      if (!results.finished(i).outcomes.empty()) done_ += work;
    }
    before_ = done_;
  }
  ~ProgressLine() {
    if (screen_) std::fputs("\r\x1b[K", stderr);
  }

  void Answered(const Unit& unit) {
    done_ += WorkOf(unit);
    if (!screen_) return;
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begun_;
    const double left = spent.count() * (all_ - done_) / (done_ - before_);
    std::fprintf(stderr, "\r\x1b[K%s %s %%, %s left", Bar(done_ / all_, 30).c_str(),
                 Fixed(100 * done_ / all_, 0).c_str(), Age(left).c_str());
  }

 private:
  // Estimated work of one answer, in arbitrary units.
  static double WorkOf(const Unit& unit) { return 200 + unit.length; }

  const bool screen_ = ::isatty(STDERR_FILENO) != 0;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  double all_ = 0, done_ = 0, before_ = 0;
};

// Escapes line breaks, which are words of the model.
std::string InOneLine(std::string text) {
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 2) {
    text.replace(at, 1, "\\n");
  }
  return text;
}

// `count` samples, spread evenly over the plan.
std::string ExamplesText(const Results& results, std::uint64_t count) {
  std::string text;
  const EvaluationPlan& plan = results.plan();
  const std::size_t units = count == 0 ? 0 : results.units().size();
  const std::size_t stride = units == 0 ? 1 : std::max<std::size_t>(1, units / count);
  for (std::size_t i = 0; i < units && count != 0; i += stride, --count) {
    const Example& example = results.finished(i).example;
    if (example.question.empty()) continue;  // written by an older version
    const Unit& unit = results.units()[i];
    Append(text, unit.length, " tokens, then: ", example.question, "\n");
    Table table({{"policy", Align::kLeft}, {"answer", Align::kLeft}, {"", Align::kLeft}});
    for (std::size_t policy = 0; policy < plan.policies.size(); ++policy) {
      const std::string& answer = example.answers[policy];
      table.Add(
          {plan.policies[policy].Name(), InOneLine(answer),
           answer == example.answer ? "right" : "wrong, expected " + InOneLine(example.answer)});
    }
    Append(text, table.Render(2), "\n");
  }
  return text;
}

std::string Text(const Results& results, double dense_bytes_per_token, std::uint64_t examples) {
  std::string text = ExamplesText(results, examples);
  const EvaluationPlan& plan = results.plan();
  for (const Question question : plan.questions) {
    const ResultTable figures = TableOf(results, question, dense_bytes_per_token);
    std::vector<Table::Column> columns;
    for (const std::string& title : figures.titles) columns.push_back({title});
    columns[0].align = Align::kLeft;
    Table table(columns);
    for (const std::vector<std::string>& row : figures.rows) table.Add(row);
    Append(text,
           question == Question::kBlind ? "blind (question after compression)"
                                        : "seen (question compressed with the text)",
           ", right answers in %\n\n", table.Render(), "\n");
  }
  for (std::size_t policy = 0; policy < plan.policies.size(); ++policy) {
    const std::string why = results.WhyRefused(policy);
    if (!why.empty()) Append(text, plan.policies[policy].Name(), " was refused: ", why, "\n");
    const std::string dense = results.WhyNotPacked(policy);
    if (dense.empty()) continue;
    Append(text, "* ", plan.policies[policy].Name(), " packed nothing, always or at times: ", dense,
           "\n");
  }
  return text;
}

std::string Json(const Results& results) {
  std::string text;
  const EvaluationPlan& plan = results.plan();
  for (std::size_t i = 0; i < results.units().size(); ++i) {
    const Unit& unit = results.units()[i];
    for (std::size_t p = 0; p < results.finished(i).outcomes.size(); ++p) {
      const Outcome& outcome = results.finished(i).outcomes[p];
      const Interval sure = WilsonInterval(outcome.right, outcome.samples);
      Append(text, text.empty() ? "" : ",\n",
             "{\"policy\": ", JsonString(plan.policies[p].For(unit.length)));
      if (plan.policies[p].budget) Append(text, ", \"budget\": ", *plan.policies[p].budget);
      Append(text, ", \"question\": ", JsonString(std::string(NameOf(unit.question))),
             ", \"task\": ", JsonString(unit.task), ", \"length\": ", unit.length,
             ", \"depth\": ", unit.depth, ", \"samples\": ", outcome.samples,
             ", \"right\": ", outcome.right, ", \"low\": ", sure.low, ", \"high\": ", sure.high,
             ", \"bytes_kept\": ", outcome.bytes_kept, ", \"step_ms\": ", outcome.step_ms);
      if (!outcome.refused.empty()) Append(text, ", \"refused\": ", JsonString(outcome.refused));
      text += "}";
    }
  }
  return Concat("{\"seed\": ", plan.first_seed, ", \"cells\": [\n", text, "\n]}\n");
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text << std::flush;
  if (file) return absl::OkStatus();
  return absl::InternalError(Concat("cannot write \"", path, "\""));
}

// Checked before the run, which may take hours.
absl::Status CheckWritable(const std::string& path) {
  std::error_code error;  // ignored: opening the file fails, too
  const bool there = std::filesystem::exists(path, error);
  if (std::ofstream(path, std::ios::binary | std::ios::app)) {
    if (!there) std::filesystem::remove(path, error);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(Concat("--report: \"", path, "\" cannot be written"));
}

// The CSV file beside a page: "eval.html" -> "eval.csv", "eval" -> "eval.csv".
std::string CsvBeside(const std::string& page) {
  std::filesystem::path path(page);
  const std::string extension = path.extension().string();
  if (extension == ".html" || extension == ".htm") path.replace_extension();
  return path.string() + ".csv";
}

// The command, quoted for a POSIX shell.
std::string ShellCommand(std::span<const std::string_view> args) {
  std::string command = "tessera eval";
  for (const std::string_view arg : args) {
    const bool plain = !arg.empty() && std::ranges::all_of(arg, [](unsigned char c) {
      return std::isalnum(c) || std::string_view("-_=.,:/+%@").find(c) != std::string_view::npos;
    });
    if (plain) {
      Append(command, " ", arg);
      continue;
    }
    command += " '";
    for (const char c : arg) command += c == '\'' ? "'\\''" : std::string(1, c);
    command += "'";
  }
  return command;
}

std::string NowInUtc() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char text[32];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &utc)};
}

// The path and the size of the weights.
std::string WeightsIn(const std::string& folder) {
  std::error_code error;  // ignored: the model was loaded from this file
  const auto path = std::filesystem::weakly_canonical(folder + "/model.safetensors", error);
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  return error ? folder : Concat(path.string(), " (", bytes, " bytes)");
}

absl::Status RunPlan(const Flags& flags, Evaluation& evaluation, Evaluation::RunOptions run,
                     Results& results) {
  std::optional<StateFile> state;
  if (flags.Has("state")) {
    absl::StatusOr<StateFile> opened = StateFile::Open(flags.Get("state"), results.plan());
    if (!opened.ok()) return opened.status();
    state.emplace(*std::move(opened));
    for (const FinishedUnit& unit : state->finished()) {
      run.except.insert(unit.unit);
      results.Add(unit);
    }
    std::fprintf(stderr,
                 "%zu of %zu units are already finished in %s; the same command resumes an "
                 "interrupted run\n",
                 run.except.size(), results.units().size(), flags.Get("state").c_str());
  }
  ProgressLine progress(results);
  return evaluation.Run(results.plan(), run,
                        {.answered = [&](const Unit& unit) { progress.Answered(unit); },
                         .finished =
                             [&](const FinishedUnit& unit) {
                               results.Add(unit);
                               return state ? state->Add(unit) : absl::OkStatus();
                             }});
}

absl::Status Evaluate(const Flags& flags, std::span<const std::string_view> args) {
  const absl::StatusOr<EvaluationPlan> plan = PlanOf(flags);
  if (!plan.ok()) return plan.status();
  const auto workers = flags.Number("workers", 0, 64);
  if (!workers.ok()) return workers.status();
  const auto examples = flags.Number("show", 0, 1000);
  if (!examples.ok()) return examples.status();
  if (flags.Has("report") && !flags.Has("serve-units")) {
    for (const std::string& path : {flags.Get("report"), CsvBeside(flags.Get("report"))}) {
      if (absl::Status status = CheckWritable(path); !status.ok()) return status;
    }
  }
  const std::uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  std::unique_ptr<bench::LocalDaemon> own;
  Door door = ConnectionOf(flags);
  if (door.address.empty()) {
    if (absl::Status status = CheckNoDevice(door); !status.ok()) return status;
    // Compression takes most of the time: one thread per core, and one for tails.
    absl::StatusOr<std::unique_ptr<bench::LocalDaemon>> daemon =
        bench::LocalDaemon::Start({Concat("--compactor-threads=", cores + 1)});
    if (!daemon.ok()) return daemon.status();
    own = *std::move(daemon);
    door = {.address = own->address(), .tls = std::nullopt, .token = ""};
  }
  const std::string model = flags.Has("model") ? flags.Get("model") : bench::RecallFolder();
  const absl::StatusOr<std::unique_ptr<Evaluation>> evaluation = Evaluation::Open(
      {.model_folder = model, .address = door.address, .device = door.device, .tls = door.tls});
  if (!evaluation.ok()) return evaluation.status();
  if (flags.Has("serve-units")) {
    const absl::StatusOr<std::unique_ptr<UnitRunner>> runner = (*evaluation)->Runner(*plan);
    return runner.ok() ? ServeUnits(**runner, UnitsOf(*plan).size()) : runner.status();
  }
  // A worker process runs this command again, on the same daemon.
  std::vector<std::string> worker_args = {"eval"};
  worker_args.insert(worker_args.end(), args.begin(), args.end());
  worker_args.push_back("--serve-units");
  if (own) worker_args.push_back(Concat("--address=", door.address));
  const double dense_bytes = static_cast<double>((*evaluation)->dense_bytes_per_token());
  Results results(*plan);
  absl::Status status =
      RunPlan(flags, **evaluation,
              {.runners = *workers == 0 ? cores : static_cast<std::uint32_t>(*workers),
               .start = [&] { return UnitProcess::Start(worker_args, *plan); }},
              results);
  if (absl::IsAborted(status) && flags.Has("state")) {
    return absl::AbortedError(Concat(AsStringView(status.message()), "; finished units are in ",
                                     flags.Get("state"), ": run the same command to resume"));
  }
  if (!status.ok()) return status;
  status = Print(flags.Has("json") ? Json(results) : Text(results, dense_bytes, *examples));
  if (!status.ok() || !flags.Has("report")) return status;
  status = WriteFile(CsvBeside(flags.Get("report")), CsvOf(results, dense_bytes));
  if (!status.ok()) return status;
  return WriteFile(flags.Get("report"), ReportPage(results, {.machine = bench::Machine(),
                                                             .dense_bytes_per_token = dense_bytes,
                                                             .version = std::string(Version()),
                                                             .date = NowInUtc(),
                                                             .model = WeightsIn(model),
                                                             .command = ShellCommand(args)}));
}

}  // namespace

CommandSpec EvalSpec() {
  return {
      .name = "eval",
      .summary = "measure how policies change a toy model's answers",
      .description =
          "Asks the recall model about needles in generated text, with its KV cache compressed by\n"
          "each policy. The recall model is a toy: 3.5 million weights, 4 layers, a vocabulary of\n"
          "768 words, trained by this project for exactly these tasks; its figures rank policies\n"
          "and prove nothing about language models.\n\n"
          "In a POLICY, {} is replaced by each of --budgets, {tokens} by that share of the text's\n"
          "tokens, {tokens/2} by half of it. Without POLICY, ten default policies are compared.\n",
      .arguments = {{.name = "POLICY", .hint = "", .required = false, .repeats = true}},
      .examples = {"tessera eval --quick --report=eval.html",
                   "tessera eval dense 'chunkkv:budget={}' --budgets=0.2,0.5 --question=blind"},
      .flags = {{"model", "FOLDER", "Folder of the recall model. Unset: the source tree's.", ""},
                {"tasks", "LIST", "Tasks, or all.", "niah_multikey,vt2,qa_place"},
                {"lengths", "LIST", "Tokens per text. Unset: 512,2048; with --quick: 1024.", ""},
                {"depths", "LIST", "Positions of the needle in the text, from 0 to 1.", "0,0.5,1"},
                {"budgets", "LIST", "Budgets that replace {}, above 0 and at most 1.",
                 "0.1,0.2,0.35,0.5"},
                {"question", "LIST",
                 "blind: the question follows compression. seen: it is compressed with the text.",
                 "blind,seen"},
                {"samples", "N", "Samples per task, length and depth. Unset: 3; with --quick: 1.",
                 ""},
                {"seed", "N", "Seed of the first sample.", "70000000"},
                {"batch", "N", "Policies per decode step. 1: time the steps of each policy.", "16"},
                {"workers", "N", "Worker processes. 0: one per core.", "0"},
                {"quick", "", "Finish within a minute on two cores.", ""},
                {"state", "FILE", "Save finished units. The same command resumes the run.", ""},
                {"report", "FILE.html",
                 "Write an HTML page with charts, and FILE.csv with one row per policy and task.",
                 ""},
                {"show", "N", "Print N samples with the answer under each policy.", "0"},
                {"json", "", "Print the figures of every cell as JSON.", ""},
                {"serve-units", "", "Run as a worker process.", "", FlagKind::kInternal}},
      .connects = Connects::kToOwnOrDaemon};
}

int RunEval(std::span<const std::string_view> args) {
  return RunCommand(EvalSpec(), args, [args](const Flags& flags) { return Evaluate(flags, args); });
}

}  // namespace tessera::cli
