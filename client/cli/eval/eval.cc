// tessera eval: measures how policies change the answers of the recall model, a toy trained for
// exactly these tasks.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
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
#include "client/cli/eval/eval_flags.h"
#include "client/cli/eval/eval_text.h"
#include "client/cli/eval/model_path.h"
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

absl::StatusOr<EvaluationPlan> PlanOf(const Flags& flags) {
  EvaluationPlan plan;
  for (std::string& task : SplitList(flags.Get("tasks"))) AddNew(std::move(task), plan.tasks);
  if (plan.tasks.empty()) return absl::InvalidArgumentError("--tasks is empty");
  if (flags.Get("tasks") == "all") {
    const auto names = RecallTasks::Names();
    plan.tasks.assign(names.begin(), names.end());
  }
  auto policies = PoliciesOf(flags, kDefaultPolicies);
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
  const absl::StatusOr<std::string> found =
      flags.Has("model") ? FindModel(flags.Get("model")) : bench::RecallFolder();
  if (!found.ok()) return found.status();
  const std::string& model = *found;
  if (IsLanguageModel(model)) return EvaluateTexts(flags, args, model);
  for (const char* const flag : {"texts", "read", "generate", "book"}) {
    if (!flags.Has(flag)) continue;
    return absl::InvalidArgumentError(
        Concat("--", flag, " needs a language model: --model=smollm2, for example"));
  }
  const absl::StatusOr<EvaluationPlan> plan = PlanOf(flags);
  if (!plan.ok()) return plan.status();
  const auto workers = flags.Number("workers", 0, 64);
  if (!workers.ok()) return workers.status();
  const auto examples = flags.Number("show", 0, 1000);
  if (!examples.ok()) return examples.status();
  if (flags.Has("report") && !flags.Has("serve-units")) {
    for (const std::string& path : {flags.Get("report"), CsvBeside(flags.Get("report"))}) {
      if (absl::Status status = CheckWritable("report", path); !status.ok()) return status;
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
      .summary = "measure how policies change a model's answers",
      .description =
          "With --model=NAME, a language model reads texts and answers questions through a cache\n"
          "that each policy has compressed, and is compared with exact attention. fp8 among the\n"
          "policies is a yardstick: the model's own cache in e4m3, one scale per lane.\n\n"
          "Without it, asks the recall model about needles in generated text, with its KV cache "
          "compressed by\n"
          "each policy. The recall model is a toy: 3.5 million weights, 4 layers, a vocabulary of\n"
          "768 words, trained by this project for exactly these tasks; its figures rank policies\n"
          "and prove nothing about language models.\n\n"
          "In a POLICY, {} is replaced by each of --budgets, {tokens} by that share of the text's\n"
          "tokens, {tokens/2} by half of it. Without POLICY, ten default policies are compared.\n",
      .arguments = {{.name = "POLICY", .hint = "", .required = false, .repeats = true}},
      .examples = {"tessera eval --quick --report=eval.html",
                   "tessera eval --model=smollm2 --report=smollm2.html",
                   "tessera eval dense 'chunkkv:budget={}' --budgets=0.2,0.5 --question=blind"},
      .flags = {{"model", "NAME|PATH",
                 "A language model that deploy/models/fetch has fetched, or its path. Unset: the "
                 "recall model.",
                 ""},
                {"tasks", "LIST",
                 "Tasks, or all. Language models: numbers of needles, such as needles1,needles8, "
                 "or none.",
                 "niah_multikey,vt2,qa_place"},
                {"lengths", "LIST",
                 "Tokens per text. Unset: 512,2048; with --quick: 1024. Language models: 2048; "
                 "1024.",
                 ""},
                {"depths", "LIST", "Positions of the needle in the text, from 0 to 1.", "0,0.5,1"},
                {"budgets", "LIST", "Budgets that replace {}, above 0 and at most 1.",
                 "0.1,0.2,0.35,0.5"},
                {"question", "LIST",
                 "blind: the question follows compression. seen: it is compressed with the text.",
                 "blind,seen"},
                {"samples", "N",
                 "Samples per task, length and depth. Unset: 3; with --quick: 1. Language models: "
                 "texts per length. Unset: 6; with --quick: 2.",
                 ""},
                {"texts", "LIST", "Files to read. Unset: documents of Debian packages.", ""},
                {"read", "N", "Tokens to read through the compressed cache. Unset: 256.", ""},
                {"generate", "N",
                 "Also generate N tokens through it, and compare them with those of dense.", ""},
                {"book", "LIST",
                 "Book files for planes:book=NAME. None may be made from a text that is read.", ""},
                {"seed", "N", "Seed of the first sample.", "70000000"},
                {"batch", "N", "Policies per decode step. 1: time the steps of each policy.", "16"},
                {"workers", "N",
                 "Worker processes, or threads with a language model. 0: one per core.", "0"},
                {"quick", "", "Finish within a minute or two on two cores.", ""},
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
