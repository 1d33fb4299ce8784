// `tessera bench` as users run it: the command, its JSON, and properties of its rows that hold on
// any machine. No test checks speed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "client/model/checkpoint/json.h"
#include "daemon/base/strings.h"

namespace tessera {
namespace {

using testing::DoubleNear;
using testing::HasSubstr;
using testing::IsSupersetOf;
using testing::Not;

struct Output {
  std::string text;
  int status = -1;
};

Output RunShell(const std::string& command) {
  Output output;
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return output;
  std::array<char, 4096> piece{};
  for (std::size_t got; (got = ::fread(piece.data(), 1, piece.size(), pipe)) > 0;) {
    output.text.append(piece.data(), got);
  }
  output.status = ::pclose(pipe);
  return output;
}

Output RunBench(const std::string& arguments) {
  return RunShell(Concat(TESSERA_BINARY " bench ", arguments, " 2>/dev/null"));
}

using Values = std::map<std::string, double>;

// The values of all rows, by name.
Values RowsOf(const std::string& arguments) {
  const Output output = RunBench(arguments + " --quick --json");
  EXPECT_EQ(output.status, 0) << output.text;
  const absl::StatusOr<llm::Json> json = llm::ParseJson(output.text);
  EXPECT_TRUE(json.ok()) << json.status().message() << "\n" << output.text;
  Values values;
  if (!json.ok()) return values;
  const llm::JsonValue* const rows = llm::Find(*json, "rows");
  EXPECT_NE(rows, nullptr) << output.text;
  if (rows == nullptr) return values;
  for (const llm::JsonValue& row : rows->list_value().values()) {
    const auto& fields = row.struct_value().fields();
    values[fields.at("name").string_value()] = fields.at("value").number_value();
  }
  return values;
}

std::vector<std::string> NamesOf(const Values& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

TEST(BenchTest, ScaleTimesEveryPartOfALifeAmongFewAndMany) {
  const Values rows = RowsOf("scale --layers=1");
  std::vector<std::string> wanted;
  for (const char* op : {"create", "append_first_tile", "fork", "free_fork", "free"}) {
    for (const int living : {10, 100, 1000}) {
      wanted.push_back(Concat(op, "_p50_at_", living));
      wanted.push_back(Concat(op, "_p99_at_", living));
    }
  }
  EXPECT_THAT(NamesOf(rows), IsSupersetOf(wanted));
  for (const auto& [name, value] : rows) EXPECT_GT(value, 0) << name;
}

TEST(BenchTest, PressureGoesOnWhateverIsHeld) {
  const Values rows = RowsOf("pressure");
  for (const char* held : {"0.500", "1.00", "1.50", "2.00", "4.00"}) {
    ASSERT_TRUE(rows.contains(Concat("turns_at_", held, "x")));
    EXPECT_GT(rows.at(Concat("turns_at_", held, "x")), 0);
    EXPECT_GT(rows.at(Concat("least_worker_at_", held, "x")), 0) << "somebody starves";
  }
}

// Memory accounting does not depend on the machine: eight workers share one copy.
TEST(BenchTest, SharingHoldsOneCopyForEightWorkers) {
  constexpr double kMib = 1 << 20;
  const Values rows = RowsOf("sharing --tokens=1024 --layers=1");
  ASSERT_THAT(NamesOf(rows),
              IsSupersetOf({"private_dense_one_layer", "private_dense_arithmetic", "shared_by_1",
                            "shared_by_8", "compute_first_attend", "join_first_attend",
                            "match_p50_of_10", "match_p99_of_1000", "match_p99_of_10000"}));
  const double dense = 8.0 * 1024 * 8 * 512 / kMib;  // copies x tokens x kv heads x bytes
  EXPECT_THAT(rows.at("private_dense_one_layer"), DoubleNear(dense, dense / 100));
  EXPECT_LT(rows.at("shared_by_1"), dense / 8);
  // A fork adds a block and snapshots, but no tiles.
  EXPECT_THAT(rows.at("shared_by_8"), DoubleNear(rows.at("shared_by_1"), 0.1));
  for (const auto& [name, value] : rows) EXPECT_GT(value, 0) << name;
}

// Attention errors of the forms of packing are ordered as in the paper's ablation.
TEST(BenchTest, FidelityPutsTheFormsInTheirOrder) {
  const Values rows = RowsOf("fidelity");
  for (const char* share : {"125", "250", "375"}) {
    const auto error = [&](const char* form) { return rows.at(Concat(form, "_", share)); };
    EXPECT_LT(error("svd_mask"), error("raw_mask")) << share;
    EXPECT_LT(error("svd_rows_g1"), error("svd_mask")) << share;
    EXPECT_LT(error("svd_rows_g1"), error("raw_rows")) << share;
    EXPECT_LT(error("svd_rows_g1"), error("svd_rows_g2")) << share;
    EXPECT_LT(error("svd_rows_g2"), error("svd_rows_g4")) << share;
  }
  EXPECT_LT(rows.at("drifting_per_segment_key_loss"), rows.at("drifting_global_key_loss"));
  EXPECT_LT(rows.at("drifting_per_segment_value_loss"), rows.at("drifting_global_value_loss"));
  EXPECT_LE(rows.at("similar_dynamic"), rows.at("similar_fixed_250_g1"));
  EXPECT_LT(rows.at("similar_dynamic"), rows.at("similar_fixed_first"));
  EXPECT_THAT(NamesOf(rows), IsSupersetOf({"mean_b16_0625", "min_max_b16_0625"}));
}

TEST(BenchTest, CompactionSavesWhatIsPublishedAndNeverCosts) {
  const Values rows = RowsOf("compaction");
  for (const char* tokens : {"1k", "4k", "16k", "64k"}) {
    for (const char* kind : {"_memory", "_memory_chosen"}) {
      const std::string name = Concat("mosaickv_", tokens, kind);
      EXPECT_LT(rows.at(name), 512) << name << ": larger than dense";
      EXPECT_GE(rows.at(name + "_peak"), rows.at(name)) << name;
      EXPECT_GT(rows.at(name + "_raw_copies"), 0) << name;
    }
  }
  EXPECT_LE(rows.at("mosaickv_64k_memory"), 512 / 2.99);
  EXPECT_LT(rows.at("mosaickv_16k_8_layers_peak"), 512) << "no layer is encoded while others come";
}

TEST(BenchTest, StrategyTimesWhatItSays) {
  const Values rows = RowsOf("strategy");
  EXPECT_FALSE(rows.empty());
  for (const auto& [name, value] : rows) EXPECT_GT(value, 0) << name;
}

// Runs every policy at every budget through a daemon, and compares how much attention is preserved.
TEST(BenchTest, PoliciesLoseLessTheMoreTheyKeep) {
  const Values rows = RowsOf("policies --tokens=1024");
  EXPECT_LT(rows.at("dense"), 1e-5);
  for (const char* policy : {"chunkkv", "chunkkv_kvpress", "semantickv", "semanticache_no_ends",
                             "lacache", "streaming", "h2o", "snapkv", "tova"}) {
    double before = 1;
    for (const char* budget : {"_20", "_35", "_50"}) {
      const std::string name = Concat(policy, budget);
      ASSERT_TRUE(rows.contains(name)) << name;
      EXPECT_LT(rows.at(name), before) << name;
      before = rows.at(name);
    }
  }
  // The larger a pyramid's beta, the more its first layers keep and the less its last ones.
  for (const char* composed :
       {"pyramidkv_20", "pyramidkv_50", "mosaickv", "chunkkv+mosaickv", "semantickv+mosaickv",
        "semanticache+mosaickv+int8", "chunkkv+semanticache"}) {
    EXPECT_GT(rows.at(composed), 0) << composed;
  }
  EXPECT_LT(rows.at("mosaickv_reads_all"), rows.at("mosaickv_reads_tenth"));
  EXPECT_LE(rows.at("mosaickv"), rows.at("mosaickv_reads_tenth"));
  // 1,024 entries in each of 4 lanes, 256 bytes each, plus one or two tiles.
  for (const char* endless : {"lacache_endless", "lacache_endless_slot"}) {
    EXPECT_GE(rows.at(endless), 1024) << endless;
    EXPECT_LT(rows.at(endless), 1024 * 1.1) << endless;
  }
}

// The benchmark does not wait for a daemon that has exited, and reports its exit status.
TEST(BenchTest, ADaemonThatDoesNotStartIsTold) {
  const std::filesystem::path folder = testing::TempDir() + Concat("bench_alone_", ::getpid());
  std::filesystem::create_directory(folder);
  std::filesystem::copy_file(TESSERA_BINARY, folder / "tessera");
  const std::string run = Concat((folder / "tessera").string(), " bench overhead --quick 2>&1");
  const Output without = RunShell(run);
  EXPECT_NE(without.status, 0);
  EXPECT_THAT(without.text, HasSubstr((folder / "tesserad").string()));
  EXPECT_THAT(without.text, HasSubstr("the file is missing or not executable"));
  std::filesystem::create_symlink("/bin/false", folder / "tesserad");
  const Output fails = RunShell(run);
  EXPECT_NE(fails.status, 0);
  EXPECT_THAT(fails.text, HasSubstr("exited before it could serve, with exit status 1"));
  std::filesystem::remove_all(folder);
}

// Every benchmark of the list explains its rows and lists its own flags only.
TEST(BenchTest, EveryBenchmarkHasAHelpPage) {
  const Output general = RunBench("--help");
  EXPECT_EQ(general.status, 0);
  EXPECT_THAT(general.text, HasSubstr("Exit status: 0 measured"));
  EXPECT_THAT(general.text, Not(HasSubstr("--steps"))) << "an internal flag";
  for (const char* name : {"attend", "compaction", "fidelity", "gpu", "overhead", "policies",
                           "pressure", "scale", "serve", "sharing", "strategy"}) {
    EXPECT_THAT(general.text, HasSubstr(Concat("\n  ", name, " ")));
    const Output page = RunBench(Concat(name, " --help"));
    EXPECT_EQ(page.status, 0) << name;
    for (const std::string& part :
         {Concat("Usage: tessera bench ", name, " [flags]"), std::string("\nRows:\n"),
          Concat("\nExample:\n  tessera bench ", name), std::string("  --baseline=FILE"),
          std::string("\nExit status: 0 measured")}) {
      EXPECT_THAT(page.text, HasSubstr(part)) << name;
    }
    EXPECT_THAT(page.text, Not(HasSubstr("--address"))) << name;
  }
  EXPECT_THAT(RunBench("serve --help").text, HasSubstr("--workers"));
  EXPECT_THAT(RunBench("scale --help").text, Not(HasSubstr("--workers")));
}

TEST(BenchTest, ARunIsComparedWithAnEarlierOne) {
  const std::string file = testing::TempDir() + Concat("bench_earlier_", ::getpid(), ".json");
  ASSERT_EQ(RunShell(Concat(TESSERA_BINARY " bench strategy --quick --json > ", file)).status, 0);
  const Output text = RunBench(Concat("strategy --quick --baseline=", file));
  EXPECT_EQ(text.status, 0);
  EXPECT_THAT(text.text, HasSubstr(" earlier "));
  EXPECT_THAT(text.text, HasSubstr(file));
  const Output other = RunShell(Concat(TESSERA_BINARY " bench scale --baseline=", file, " 2>&1"));
  EXPECT_NE(other.status, 0);
  EXPECT_THAT(other.text, HasSubstr("is a run of strategy, not of scale"));
  std::filesystem::remove(file);
}

TEST(BenchTest, WrongUsageIsRefused) {
  EXPECT_NE(RunBench("scale --workers=2 --quick").status, 0) << "a flag of serve";
  EXPECT_NE(RunBench("scale --baseline=/nonexistent --quick").status, 0);
  EXPECT_NE(RunBench("policies --tokens=512 --quick").status, 0);
  EXPECT_NE(RunBench("scale --layers=0 --quick").status, 0);
  EXPECT_NE(RunBench("serve --tokens=4096 --quick").status, 0);
  EXPECT_NE(RunBench("nothing").status, 0);
}

}  // namespace
}  // namespace tessera
