// The result of a benchmark: rows, findings and notes, printed as a table or as JSON.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::cli::bench {

// Whether a goal is a lower or an upper limit; without a goal: which direction of the ratio is
// better.
enum class Goal : std::uint8_t { kAtLeast, kAtMost };

struct Row {
  std::string name;
  double value = 0;  // NaN: no value, and `unit` says why
  std::string unit;
  std::string baseline;         // the row it is compared with; empty: none
  std::optional<double> ratio;  // to the baseline; `sense`: whether above 1 or below 1 is better
  bool paired = false;          // the ratio is a median within rounds, not a ratio of two values
  std::optional<double> goal;
  Goal sense = Goal::kAtLeast;
  bool goal_is_on_ratio = true;          // else on the value
  std::optional<double> held_bytes;      // stored, per token and kv head
  std::optional<double> read_bytes;      // read by one attention call, per token and kv head
  std::optional<double> kept_mass;       // share of the true attention mass that is kept
  std::optional<double> needles;         // share of needles whose tokens are all kept, per lane
  std::optional<double> anywhere;        // the same, each token kept in at least one lane
  std::optional<double> tokens;          // share of tokens kept
  std::optional<double> elements;        // share of elements kept
  std::optional<double> bytes;           // share of bytes kept
  std::optional<double> show_ms_per_1k;  // worker time to gather observations of 1,024 tokens
  std::optional<double> ms_per_1k;       // time to compress 1,024 tokens
  std::optional<double> p50_ms;          // median time per step or turn
  std::optional<double> p99_ms;          // 99th percentile of the same
  std::optional<double> daemon_cpu;      // CPU time of the daemon, % of one core
  std::optional<double> pool_mib;        // pool memory of the sequences

  bool JudgesRatio() const { return goal_is_on_ratio && ratio.has_value(); }
  // nullopt without a goal.
  std::optional<bool> Holds() const;
  // "1.21x slower", "same"; "-" without a ratio. The number is never below 1.
  std::string AgainstBaseline() const;
  // "ratio >= 2.00", "value <= 1.00 us"; "-" without a goal.
  std::string GoalText() const;
};

// The values of an earlier run, to which a report is compared.
struct EarlierRun {
  std::string source;  // file name
  std::string machine;
  std::map<std::string, double> values;  // by row
};

// A statement that the rows confirm or refute.
struct Finding {
  std::string statement;
  bool holds = false;
  std::string figures;
  bool goal = true;  // false: a further question, not a goal
};

struct Report {
  std::string name;
  std::vector<Row> rows;
  std::vector<Finding> findings;
  std::vector<std::string> notes;  // how it was measured, and what could not be measured
  double load_average = 0;         // of one minute, before the run; 0: unknown
  std::optional<EarlierRun> earlier;

  void Add(Row row) { rows.push_back(std::move(row)); }
  // Reasons to doubt the figures: a loaded machine, long tails, a comparison of unequal runs.
  std::vector<std::string> Warnings() const;
  std::string Text() const;
  std::string Json() const;
};

// About three significant digits: "0.043", "17.2".
std::string Figure(double value);

// The load average of one minute. 0: unknown.
double LoadAverage();

// "Intel(R) Xeon(R) ..., 2 cores, avx512"
std::string Machine();

double Median(std::vector<double> values);
double Percentile(std::vector<double> values, double share);

}  // namespace tessera::cli::bench
