#include "client/cli/doctor_checks.h"

#include <dlfcn.h>
#include <grp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "client/tools/admin.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "daemon/platform/unix_socket.h"

namespace tessera::cli {

namespace {

Finding Good(std::string subject, std::string text) {
  return {.verdict = Verdict::kGood, .subject = std::move(subject), .text = std::move(text)};
}
Finding Doubtful(std::string subject, std::string text, std::string fix) {
  return {.verdict = Verdict::kDoubtful,
          .subject = std::move(subject),
          .text = std::move(text),
          .fix = std::move(fix)};
}
Finding Bad(std::string subject, std::string text, std::string fix) {
  return {.verdict = Verdict::kBad,
          .subject = std::move(subject),
          .text = std::move(text),
          .fix = std::move(fix)};
}

// The name of a group, or its number.
std::string GroupName(gid_t gid) {
  const group* const found = ::getgrgid(gid);
  return found == nullptr ? Concat(gid) : std::string(found->gr_name);
}

std::string Octal(mode_t mode) {
  char digits[8];
  const auto end = std::to_chars(digits, digits + sizeof(digits), mode & 07777u, 8);
  return "0" + std::string(digits, end.ptr);
}

struct CertificateDeleter {
  void operator()(X509* certificate) const { X509_free(certificate); }
};

// Every certificate of the file; of a chain, the one that ends first counts.
Finding CheckCertificates(const std::string& flag, const std::string& path, std::time_t now) {
  constexpr int kSoonDays = 14;
  std::FILE* const file = std::fopen(path.c_str(), "r");
  if (file == nullptr) {
    return Bad(flag, Concat(path, ": ", std::strerror(errno)),
               "give the path of a PEM file that this user can read");
  }
  int certificates = 0;
  int least_days = 36500;
  bool not_yet = false;
  while (const std::unique_ptr<X509, CertificateDeleter> one{
      PEM_read_X509(file, nullptr, nullptr, nullptr)}) {
    ++certificates;
    std::unique_ptr<ASN1_TIME, decltype(&ASN1_TIME_free)> today(ASN1_TIME_set(nullptr, now),
                                                                &ASN1_TIME_free);
    int days = 0;
    int seconds = 0;
    if (ASN1_TIME_diff(&days, &seconds, today.get(), X509_get0_notAfter(one.get())) == 1) {
      least_days = std::min(least_days, seconds < 0 ? days - 1 : days);
    }
    not_yet |= ASN1_TIME_compare(X509_get0_notBefore(one.get()), today.get()) > 0;
  }
  std::fclose(file);
  if (certificates == 0) {
    return Bad(flag, path + " has no certificate in PEM form",
               "convert it: openssl x509 -inform der");
  }
  if (not_yet) {
    return Bad(flag, path + " is not valid yet", "check the clock of this machine");
  }
  if (least_days < 0) {
    return Bad(flag, Concat(path, " expired ", -least_days, " days ago"), "renew it");
  }
  const std::string text = Concat(path, " is valid for ", least_days, " days");
  return least_days < kSoonDays ? Doubtful(flag, text, "renew it soon") : Good(flag, text);
}

// The value of a line of /proc/PID/limits: "Max open files   1024   524288   files".
std::uint64_t OpenFilesLimit(std::int64_t pid) {
  std::ifstream limits(Concat("/proc/", pid, "/limits"));
  constexpr std::string_view kName = "Max open files";
  for (std::string line; std::getline(limits, line);) {
    if (!line.starts_with(kName)) continue;
    const std::string_view number = Trim(std::string_view(line).substr(kName.size()));
    std::uint64_t limit = 0;
    std::from_chars(number.data(), number.data() + number.size(), limit);
    return limit;
  }
  return 0;
}

}  // namespace

std::vector<Finding> CheckSocket(const std::string& path) {
  constexpr const char* kSubject = "socket";
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) {
    const int error = errno;
    const std::string folder = std::filesystem::path(path).parent_path().string();
    if (error == EACCES) {
      struct stat of_folder {};
      const bool known = ::stat(folder.c_str(), &of_folder) == 0;
      return {Bad(kSubject, Concat(path, ": this user may not enter ", folder),
                  known ? Concat("join the group ", GroupName(of_folder.st_gid), ": usermod -aG ",
                                 GroupName(of_folder.st_gid), " USER, then log in again")
                        : "ask for the folder's group")};
    }
    return {Bad(kSubject, Concat(path, ": ", std::strerror(error)),
                "start tesserad, or name its address with --address or TESSERA_ADDRESS")};
  }
  if (!S_ISSOCK(found.st_mode)) {
    return {Bad(kSubject, path + " is not a socket", "name the daemon's socket with --address")};
  }
  const std::string what =
      Concat(path, ", mode ", Octal(found.st_mode), ", group ", GroupName(found.st_gid));
  if (::access(path.c_str(), W_OK) != 0) {
    const std::string name = GroupName(found.st_gid);
    return {Bad(kSubject, what + ": this user may not connect",
                Concat("usermod -aG ", name,
                       " USER, then log in again; or tesserad "
                       "--unix-socket-mode=0666 with tokens for every tenant"))};
  }
  std::vector<Finding> findings = {Good(kSubject, what)};
  if ((found.st_mode & S_IWOTH) != 0) {
    findings.push_back(Doubtful(kSubject, "every user of this machine may connect",
                                "tesserad --unix-socket-mode=0660, or --unix-peers"));
  }
  return findings;
}

std::vector<Finding> CheckTlsFiles(const client::TlsOptions& tls, std::time_t now) {
  std::vector<Finding> findings;
  if (!tls.ca_file.empty()) findings.push_back(CheckCertificates("--tls-ca", tls.ca_file, now));
  if (!tls.certificate_file.empty()) {
    findings.push_back(CheckCertificates("--tls-certificate", tls.certificate_file, now));
  }
  if (tls.key_file.empty()) return findings;
  struct stat found {};
  if (::stat(tls.key_file.c_str(), &found) != 0 || ::access(tls.key_file.c_str(), R_OK) != 0) {
    findings.push_back(Bad("--tls-key", Concat(tls.key_file, ": ", std::strerror(errno)),
                           "give the path of a PEM file that this user can read"));
  } else if ((found.st_mode & S_IROTH) != 0) {
    findings.push_back(Doubtful("--tls-key", tls.key_file + " can be read by every user",
                                "chmod 0600 " + tls.key_file));
  } else {
    findings.push_back(Good("--tls-key", tls.key_file));
  }
  return findings;
}

std::vector<Finding> CheckProcess(const std::string& path) {
  constexpr std::uint64_t kFew = 4096;
  const absl::StatusOr<Fd> socket = ConnectUnix(path);
  if (!socket.ok()) return {};  // CheckSocket or CheckDaemon says why
  const absl::StatusOr<PeerCredentials> peer = PeerOf(socket->get());
  if (!peer.ok() || peer->pid == 0) return {};
  const std::uint64_t limit = OpenFilesLimit(peer->pid);
  if (limit == 0) return {};
  const std::string text =
      Concat("the daemon (process ", peer->pid, ") may open ", limit, " files");
  if (limit >= kFew) return {Good("daemon files", text)};
  return {Doubtful("daemon files", text,
                   "raise it: LimitNOFILE=65536 in its unit, or ulimit -n 65536 before it starts")};
}

std::vector<Finding> CheckDaemon(const Door& door) {
  constexpr double kFull = 0.95;
  absl::StatusOr<Admin> admin = Admin::At(door);
  if (absl::IsPermissionDenied(admin.status())) {
    return {Doubtful("daemon", std::string(AsStringView(admin.status().message())),
                     "workers need no more; run tessera doctor as that user to see its state")};
  }
  if (!admin.ok()) {
    return {Bad("daemon", std::string(AsStringView(admin.status().message())), "")};
  }
  const absl::StatusOr<v1::StatsResponse> stats = admin->Stats();
  if (!stats.ok()) {
    return {Bad("daemon", std::string(AsStringView(stats.status().message())), "")};
  }
  std::vector<Finding> findings;
  const std::string text = Concat("tesserad ", stats->version(), " on ", stats->device());
  if (stats->version() == AsStringView(Version())) {
    findings.push_back(Good("daemon", text));
  } else {
    findings.push_back(Doubtful("daemon", Concat(text, ", but this is tessera ", Version()),
                                "install both from one release"));
  }
  if (stats->draining()) {
    findings.push_back(
        Bad("daemon", "it is draining and accepts no new sessions", "attach to its successor"));
  }
  const auto used = static_cast<double>(stats->pool_reserved_bytes());
  const auto limit = static_cast<double>(stats->pool_limit_bytes());
  const std::string pool = Concat(FormatBytes(stats->pool_reserved_bytes()), " of ",
                                  FormatBytes(stats->pool_limit_bytes()), " in use");
  findings.push_back(
      used > kFull * limit
          ? Doubtful("pool", pool, "free or offload sequences, or raise --pool-bytes")
          : Good("pool", pool));
  for (Finding& finding : CheckGpu(stats->device())) findings.push_back(std::move(finding));
  return findings;
}

std::vector<Finding> CheckGpu(std::string_view device) {
  if (!device.starts_with("cuda")) return {};
  constexpr const char* kNode = "/dev/nvidiactl";
  if (::access(kNode, R_OK | W_OK) != 0) {
    return {Bad("GPU", Concat(kNode, ": ", std::strerror(errno)),
                "in a container: the NVIDIA runtime with NVIDIA_VISIBLE_DEVICES; else the driver's "
                "device files")};
  }
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) {
    return {Bad("GPU", "the driver's library libcuda.so.1 cannot be loaded",
                "install the driver; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility")};
  }
  ::dlclose(driver);
  return {Good("GPU", Concat("the driver is there, and the daemon uses ", device))};
}

std::vector<Finding> CheckHugePages(std::string_view setting, std::string_view release) {
  const std::size_t begin = setting.find('[');
  const std::size_t end = setting.find(']');
  if (begin == std::string_view::npos || end == std::string_view::npos || end < begin) return {};
  const std::string_view chosen = setting.substr(begin + 1, end - begin - 1);
  int major = 0;
  int minor = 0;
  const auto first = std::from_chars(release.data(), release.data() + release.size(), major);
  if (first.ec == std::errc() && first.ptr != release.data() + release.size()) {
    std::from_chars(first.ptr + 1, release.data() + release.size(), minor);
  }
  const std::string text = Concat("shmem_enabled is ", chosen, ", Linux ", release);
  // From 6.1 on the daemon asks for them whatever the setting is.
  const bool asks = major > 6 || (major == 6 && minor >= 1);
  if (chosen == "deny" || (!asks && chosen == "never")) {
    return {Doubtful("huge pages", text + ": pools use small pages, which costs speed",
                     "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, before "
                     "tesserad starts")};
  }
  return {Good("huge pages", text)};
}

std::vector<Finding> CheckOpenFiles(std::uint64_t limit) {
  constexpr std::uint64_t kFew = 1024;
  const std::string text = Concat("this user may open ", limit, " files");
  if (limit >= kFew) return {Good("files", text)};
  return {Doubtful("files", text + "; a mapped session needs one for each extent",
                   "ulimit -n 4096, or nofile in /etc/security/limits.conf")};
}

}  // namespace tessera::cli
