// `tessera eval` as users run it: its worker processes, and recovery from a lost one.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/daemon/peer_process.h"
#include "tests/fakes/model/tiny_model.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string BytesOf(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Children started by any of the process's threads.
std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::vector<pid_t> children;
  std::error_code gone;
  for (const auto& task : fs::directory_iterator(Concat("/proc/", pid, "/task"), gone)) {
    std::ifstream list(task.path() / "children");
    children.insert(children.end(), std::istream_iterator<pid_t>(list), {});
  }
  return children;
}

class EvalCommand : public testing::Test {
 protected:
  EvalCommand() { fs::create_directory(folder_); }
  ~EvalCommand() override { fs::remove_all(folder_); }

  // Redirects its output to two files.
  PeerProcess Start(std::vector<std::string> args, const std::string& command = "eval") const {
    args.insert(args.begin(), {TESSERA_BINARY, command});
    return PeerProcess([args = std::move(args), out = (folder_ / "out").string(),
                        err = (folder_ / "err").string()](int) mutable {
      std::vector<char*> raw;
      for (std::string& arg : args) raw.push_back(arg.data());
      raw.push_back(nullptr);
      ::dup2(::open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDOUT_FILENO);
      ::dup2(::open(err.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDERR_FILENO);
      ::execv(raw[0], raw.data());
      return 127;
    });
  }
  std::string Out() const { return BytesOf(folder_ / "out"); }
  std::string Err() const { return BytesOf(folder_ / "err"); }

  // The JSON without measured times.
  std::string Cells(const std::vector<std::string>& args) const {
    EXPECT_EQ(Start(args).Wait(), 0) << Err();
    return std::regex_replace(Out(), std::regex("\"step_ms\": [^,}]*"), "");
  }

  TestRandom random_;
  const fs::path folder_ = fs::path(testing::TempDir()) / Concat("eval-", random_.Bits());
  const std::vector<std::string> plan_ = {
      "dense",       "chunkkv:budget={}",       "--budgets=0.1",
      "--json",      "--lengths=512",           "--depths=0,0.5,1",
      "--samples=1", "--tasks=niah_single,vt1", Concat("--seed=", random_.Below(1'000'000))};
  std::vector<std::string> With(std::initializer_list<std::string> more) const {
    std::vector<std::string> args = plan_;
    args.insert(args.end(), more);
    return args;
  }
};

TEST_F(EvalCommand, AnyNumberOfProcessesSaysTheSame) {
  const std::string page = (folder_ / "page.html").string();
  const std::string one = Cells(With({"--workers=1", "--report=" + page}));
  EXPECT_THAT(one, testing::HasSubstr("\"task\": \"vt1\""));
  EXPECT_THAT(BytesOf(page), testing::HasSubstr("<code>tessera eval dense 'chunkkv:budget={}'"));
  EXPECT_THAT(BytesOf((folder_ / "page.csv").string()),
              testing::HasSubstr("\nblind,chunkkv:budget=0.1,0.1,vt1,"));
  EXPECT_EQ(Cells(With({"--workers=3"})), one);
}

// A repeated cell is run once, so that it does not count as more samples.
// The command ends its worker processes; it must let them detach first.
TEST_F(EvalCommand, ItsWorkersLeaveTheDaemon) {
  const auto daemon = fakes::DaemonProcess::Start({});
  ASSERT_NE(daemon, nullptr);
  ASSERT_EQ(Start(With({"--workers=3", "--address=" + daemon->address()})).Wait(), 0) << Err();
  daemon->Kill(SIGTERM);
  ASSERT_EQ(daemon->WaitForExit(20), 0);
  EXPECT_THAT(daemon->Log(), testing::HasSubstr("reason=closed tenant=default worker=eval"));
  EXPECT_THAT(daemon->Log(), testing::Not(testing::HasSubstr("reason=lost")));
}

TEST_F(EvalCommand, WhatIsSaidTwiceIsAskedOnce) {
  const std::string once = Cells(With({"--question=seen"}));
  EXPECT_EQ(Cells(With({"dense", "--question=seen,seen", "--tasks=niah_single,vt1,niah_single"})),
            once);
}

TEST_F(EvalCommand, WhatCannotBeIsRefusedBeforeTheRun) {
  const auto refusal = [&](const std::string& flag) {
    EXPECT_NE(Start(With({flag})).Wait(), 0) << flag;
    EXPECT_EQ(Out(), "");
    return Err();
  };
  EXPECT_THAT(refusal("--tasks="), testing::HasSubstr("--tasks is empty"));
  EXPECT_THAT(refusal("--json=no"), testing::HasSubstr("--json takes no value"));
  const std::string page = (folder_ / "none" / "page.html").string();
  EXPECT_THAT(refusal("--report=" + page), testing::HasSubstr(page + "\" cannot be written"));
}

TEST_F(EvalCommand, AProcessThatIsKilledIsNamedAndTheSameCommandGoesOn) {
  const std::string state = (folder_ / "state").string();
  {
    PeerProcess eval = Start(With({"--workers=2", "--state=" + state}));
    // The daemon is a child too; worker processes are recognised by their --serve-units flag.
    pid_t victim = 0;
    while (victim == 0 && Err().find("tessera eval: ") == std::string::npos && Out().empty()) {
      for (const pid_t child : ChildrenOf(eval.pid())) {
        const std::string line = BytesOf(Concat("/proc/", child, "/cmdline"));
        if (line.find("--serve-units") != std::string::npos) victim = child;
      }
    }
    ASSERT_NE(victim, 0) << Err();
    ASSERT_EQ(::kill(victim, SIGKILL), 0);
    EXPECT_EQ(eval.Wait(), 1);
    EXPECT_THAT(Err(), testing::AllOf(testing::HasSubstr(Concat(victim, " was killed by signal 9")),
                                      testing::HasSubstr(state)));
  }
  EXPECT_EQ(Cells(With({"--workers=2", "--state=" + state})), Cells(With({"--workers=2"})));
}

// The model's files provide everything that a policy wants to observe.
TEST_F(EvalCommand, ATextIsGoneOnWithUnderAnyPolicy) {
  std::string text;
  for (int i = 0; i < 10; ++i) text += "what is the special number for lobster ? answer : ";
  for (const char* policy :
       {"dense", "semanticache:tau=0.5", "chunkkv:budget=0.5+semanticache+mosaickv"}) {
    PeerProcess generate =
        Start({"--model=" TESSERA_RECALL_FOLDER, "--tokens=40", Concat("--policy=", policy), text},
              "generate");
    EXPECT_EQ(generate.Wait(), 0) << policy << ": " << Err();
    EXPECT_FALSE(Out().empty()) << policy;
  }
}

// A random model as a GGUF file: what it says means nothing, but exact attention is exact.
class EvalOfTexts : public EvalCommand {
 protected:
  EvalOfTexts() {
    const fakes::TinyModel tiny(
        "llama", true, [&] { return static_cast<float>(random_.Below(2001)) / 5000 - 0.2f; }, 64);
    std::ofstream(folder_ / "tiny.gguf") << tiny.Gguf().File();
    std::ofstream text(folder_ / "text");
    for (int i = 0; i < 300; ++i) text << "word " << random_.Below(100) << ". ";
  }
  std::vector<std::string> Flags(std::initializer_list<std::string> more) const {
    std::vector<std::string> flags = {"--model=" + (folder_ / "tiny.gguf").string()};
    flags.insert(flags.end(), more);
    return flags;
  }
};

// The number after `name` in the cell of a policy.
double ValueOf(const std::string& json, const std::string& policy, const std::string& name) {
  const std::size_t cell = json.find("\"policy\": \"" + policy);
  const std::size_t at = json.find("\"" + name + "\": ", cell);
  EXPECT_NE(at, std::string::npos) << policy << " " << name << ": " << json;
  return at == std::string::npos ? -1 : std::stod(json.substr(at + name.size() + 4));
}

TEST_F(EvalOfTexts, IsReadThroughEachPolicyAndComparedWithExactAttention) {
  const std::string page = (folder_ / "page.html").string();
  const std::vector<std::string> args =
      Flags({"--texts=" + (folder_ / "text").string(), "--lengths=512", "--read=64", "--generate=8",
             "--tasks=needles1,needles4", "--json", "--report=" + page, "dense", "fp8",
             "streaming:budget=64"});
  ASSERT_EQ(Start(args).Wait(), 0) << Err();
  const std::string json = Out();
  EXPECT_LT(ValueOf(json, "dense", "divergence"), 1e-3);
  EXPECT_LT(std::abs(ValueOf(json, "dense", "difference")), 1e-2);
  EXPECT_GT(ValueOf(json, "dense", "same_choice"), 0.9);
  EXPECT_GT(ValueOf(json, "streaming", "divergence"), 2 * ValueOf(json, "dense", "divergence"));
  EXPECT_LT(ValueOf(json, "streaming", "bytes_kept"), 0.3);
  EXPECT_EQ(ValueOf(json, "streaming", "needles1_blind_samples"), 1);
  EXPECT_EQ(ValueOf(json, "streaming", "needles4_blind_samples"), 4);
  EXPECT_EQ(ValueOf(json, "streaming", "needles4_seen_samples"), 1);
  // The yardstick does everything that policies do, without the daemon.
  EXPECT_GT(ValueOf(json, "fp8", "divergence"), 0);
  EXPECT_LT(ValueOf(json, "fp8", "divergence"), ValueOf(json, "streaming", "divergence"));
  EXPECT_NEAR(ValueOf(json, "fp8", "bytes_kept"), 0.5, 0.01);
  EXPECT_EQ(ValueOf(json, "fp8", "needles4_blind_samples"), 4);
  EXPECT_EQ(ValueOf(json, "fp8", "needles4_seen_samples"), 1);
  EXPECT_EQ(ValueOf(json, "dense", "generated_agreement"), 1);
  EXPECT_LT(ValueOf(json, "dense", "generated_divergence"), 1e-3);
  EXPECT_GT(ValueOf(json, "fp8", "generated_divergence"), 0);
  EXPECT_THAT(BytesOf(page), testing::HasSubstr("fp8 is a yardstick, not a policy"));
  EXPECT_THAT(BytesOf(page), testing::HasSubstr("the next 64 read through the cache"));
  EXPECT_THAT(BytesOf((folder_ / "page.csv").string()), testing::HasSubstr("\n512,\"dense\","));
}

// A book is made from other texts, and a sequence is coded with it from its first tile on. Books
// prove nothing about the texts that they were made from.
TEST_F(EvalOfTexts, BooksAreMadeFromOtherTexts) {
  const std::string text = (folder_ / "text").string(), other = (folder_ / "other").string();
  std::ofstream(other) << BytesOf(text).substr(0, 1500) << " and more";
  const std::string book = (folder_ / "prose.book").string();
  ASSERT_EQ(Start(Flags({"--rows=300", "--out=" + book, other}), "calibrate").Wait(), 0) << Err();
  EXPECT_THAT(Out(), testing::HasSubstr("book prose, 4 lanes, 300 rows each"));
  const std::vector<std::string> args =
      Flags({"--texts=" + text, "--lengths=512", "--read=64", "--tasks=none", "--json",
             "--book=" + book, "dense", "planes:book=prose,recent=32", "planes:recent=32"});
  ASSERT_EQ(Start(args).Wait(), 0) << Err();
  EXPECT_LT(ValueOf(Out(), "planes:book=prose", "bytes_kept"), 0.6);
  EXPECT_GT(ValueOf(Out(), "planes:recent=32", "bytes_kept"), 0.9) << "rows wait for a book";
  EXPECT_LT(ValueOf(Out(), "planes:book=prose", "divergence"), 0.05);

  const auto refusal = [&](const std::vector<std::string>& given) {
    EXPECT_NE(Start(given).Wait(), 0);
    return Err();
  };
  EXPECT_THAT(refusal(Flags({"--texts=" + other, "--lengths=256", "--read=64", "--book=" + book,
                             "planes:book=prose"})),
              testing::HasSubstr("the book prose was made from \"other\""));
  EXPECT_THAT(refusal(Flags({"--texts=" + text, "planes:book=prose"})),
              testing::HasSubstr("name the file of the book prose with --book"));
  EXPECT_THAT(refusal(Flags({"--texts=" + text, "--book=" + text, "dense"})),
              testing::HasSubstr("it is no book file"));
}

TEST_F(EvalOfTexts, FlagsThatDoNotFitAreRefused) {
  const auto refusal = [&](const std::vector<std::string>& args) {
    EXPECT_NE(Start(args).Wait(), 0);
    return Err();
  };
  EXPECT_THAT(refusal(Flags({"--state=a"})), testing::HasSubstr("recall model only"));
  EXPECT_THAT(refusal(Flags({"--tasks=vt2"})), testing::HasSubstr("\"vt2\" must be needles1"));
  EXPECT_THAT(refusal(Flags({"--lengths=900", "--texts=" + (folder_ / "text").string()})),
              testing::HasSubstr("the model's limit is 1024"));
  EXPECT_THAT(refusal({"--read=64"}), testing::HasSubstr("--read needs a language model"));
  EXPECT_THAT(refusal({"--model=no-such-model"}), testing::HasSubstr("deploy/models/fetch --list"));
}

TEST_F(EvalOfTexts, Answers) {
  ASSERT_EQ(Start(Flags({"--tokens=5", "--policy=streaming:budget=64", "--prompt=Hello the word"}),
                  "generate")
                .Wait(),
            0)
      << Err();
  EXPECT_FALSE(Out().empty());
  EXPECT_NE(Start(Flags({"one", "--prompt=two"}), "generate").Wait(), 0);
  EXPECT_THAT(Err(), testing::HasSubstr("either as TEXT or as --prompt"));
}

}  // namespace
}  // namespace tessera
