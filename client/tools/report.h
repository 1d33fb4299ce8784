// What a benchmark says: rows that are ratios within one run, as a table and as JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::cli::bench {

enum class Goal : std::uint8_t { kAtLeast, kAtMost };

struct Row {
  std::string name;
  double value = 0;  // not a number: there is none, and the unit says why
  std::string unit;
  std::string baseline;         // the row it is compared with; empty: none
  std::optional<double> ratio;  // to the baseline, as the goal is worded
  std::optional<double> goal;
  Goal sense = Goal::kAtLeast;
  bool goal_is_on_ratio = true;          // else on the value
  std::optional<double> held_bytes;      // per token and kv head
  std::optional<double> read_bytes;      // likewise, by one look at everything
  std::optional<double> kept_mass;       // share of the true attention that stays where it was
  std::optional<double> needles;         // share of needles of which every token stayed
  std::optional<double> anywhere;        // likewise, each in some lane of some layer
  std::optional<double> tokens;          // shares that stayed: of tokens,
  std::optional<double> elements;        // of elements,
  std::optional<double> bytes;           // of bytes
  std::optional<double> show_ms_per_1k;  // to gather what the policy asks for of 1,024 tokens
  std::optional<double> ms_per_1k;       // to compress them
  std::optional<double> p50_ms;          // per token, the median
  std::optional<double> p99_ms;          // likewise, all but 1 %
  std::optional<double> daemon_cpu;      // % of a core that the daemon took meanwhile
  std::optional<double> pool_mib;        // that the sequences take in the daemon's pool

  // Nothing where there is no goal.
  std::optional<bool> Holds() const;
};

// A statement that the rows support or not.
struct Finding {
  std::string statement;
  bool holds = false;
  std::string figures;
  bool goal = true;  // else a question that was asked besides
};

struct Report {
  std::string name;
  std::vector<Row> rows;
  std::vector<Finding> findings;
  std::vector<std::string> notes;  // how it was measured; what could not be

  void Add(Row row) { rows.push_back(std::move(row)); }
  std::string Text() const;
  std::string Json() const;
};

// Three significant digits, so that both 0.043 and 17.2 can be read.
std::string Figure(double value);

// "Intel(R) Xeon(R) ..., 2 cores, avx512"
std::string Machine();

double Median(std::vector<double> values);
double Percentile(std::vector<double> values, double share);

}  // namespace tessera::cli::bench
