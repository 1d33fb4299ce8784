// tessera doctor: what keeps a worker on this machine from using a daemon, and how to fix it.

#include <sys/resource.h>
#include <sys/utsname.h>

#include <ctime>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/doctor_checks.h"
#include "client/rpc/channel.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
#include "client/tools/terminal.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

constexpr std::string_view kUnix = "unix:";

std::string_view WordOf(Verdict verdict) {
  constexpr std::string_view kWords[] = {"ok", "warning", "failed"};
  return kWords[static_cast<std::size_t>(verdict)];
}

std::string TextOf(const std::vector<Finding>& findings) {
  constexpr Style kStyles[] = {Style::kGreen, Style::kYellow, Style::kRed};
  const bool colours = OutputHasColours();
  std::string text;
  for (const Finding& finding : findings) {
    std::string word(WordOf(finding.verdict));
    word.resize(9, ' ');
    Append(text, Styled(word, kStyles[static_cast<std::size_t>(finding.verdict)], colours),
           finding.subject, ": ", finding.text, "\n");
    if (!finding.fix.empty()) Append(text, std::string(9, ' '), "-> ", finding.fix, "\n");
  }
  return text;
}

std::string JsonOf(const std::vector<Finding>& findings) {
  std::string items;
  for (const Finding& finding : findings) {
    Append(items, items.empty() ? "" : ",", "{\"verdict\":\"", WordOf(finding.verdict),
           "\",\"subject\":", JsonString(finding.subject), ",\"text\":", JsonString(finding.text),
           ",\"fix\":", JsonString(finding.fix), "}");
  }
  return Concat("{\"findings\":[", items, "]}\n");
}

absl::Status Examine(const Flags& flags) {
  Door door = ConnectionOf(flags);
  absl::StatusOr<std::string> address = AddressOf(door);
  if (!address.ok()) return address.status();
  door.address = *std::move(address);
  door.device.clear();
  std::vector<Finding> findings;
  const auto add = [&findings](std::vector<Finding> more) {
    for (Finding& finding : more) findings.push_back(std::move(finding));
  };
  if (client::IsUnixAddress(door.address)) {
    const std::string path = door.address.substr(kUnix.size());
    add(CheckSocket(path));
    add(CheckProcess(path));
  }
  if (door.tls.has_value()) add(CheckTlsFiles(*door.tls, std::time(nullptr)));
  add(CheckDaemon(door));
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) add(CheckOpenFiles(limit.rlim_cur));
  std::ifstream setting("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  utsname system{};
  if (::uname(&system) == 0) {
    add(CheckHugePages(std::string(std::istreambuf_iterator<char>(setting), {}), system.release));
  }
  absl::Status status = Print(flags.Has("json") ? JsonOf(findings) : TextOf(findings));
  if (!status.ok()) return status;
  int bad = 0;
  for (const Finding& finding : findings) bad += finding.verdict == Verdict::kBad;
  if (bad == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      Concat(bad, bad == 1 ? " check" : " checks", " failed; see above"));
}

}  // namespace

CommandSpec DoctorSpec() {
  return {
      .name = "doctor",
      .summary = "find what keeps this user from using a daemon, and how to fix it",
      .description =
          "Checks, as a worker of this user on this machine would meet them: the socket, its mode\n"
          "and group; TLS files and their dates; the daemon's answer, version and free memory;\n"
          "access to its GPU; limits of open files; huge pages. Prints what to do about each\n"
          "problem. Exit status 1: at least one check failed.\n",
      .examples = {"tessera doctor", "tessera doctor --address=node7:7400 --tls-ca=ca.crt"},
      .flags = {{"json", "", "Print one JSON object.", ""}}};
}

int RunDoctor(std::span<const std::string_view> args) {
  return RunCommand(DoctorSpec(), args, Examine);
}

}  // namespace tessera::cli
