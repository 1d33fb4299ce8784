// TLS over TCP: who is admitted, who is refused, and what each side reports.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "client/bench/workload/synthetic.h"
#include "client/rpc/channel.h"
#include "tessera/tessera.h"
#include "tessera/worker.h"
#include "tests/fakes/daemon/certificates.h"
#include "tests/fakes/daemon/daemon_process.h"

namespace tessera {
namespace {

using client::TlsOptions;
using fakes::CertificateAuthority;
using fakes::DaemonProcess;
using fakes::KeyPair;
using testing::HasSubstr;

class Tls : public testing::Test {
 protected:
  ~Tls() override {
    daemon_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  // Replaces the file atomically, as certificate renewal does. Returns the path.
  std::string Write(const std::string& name, const std::string& text) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path + ".new") << text;
    std::filesystem::permissions(path + ".new", std::filesystem::perms(0600));
    std::filesystem::rename(path + ".new", path);
    return path;
  }
  void WriteServer(const KeyPair& pair) const {
    Write("server.pem", pair.certificate);
    Write("server.key", pair.key);
  }

  void Start(const KeyPair& pair, std::vector<std::string> flags = {}) {
    WriteServer(pair);
    flags.insert(flags.end(),
                 {"--listen=127.0.0.1:0", "--tls-certificate-file=" + folder_ + "/server.pem",
                  "--tls-key-file=" + folder_ + "/server.key"});
    daemon_ = DaemonProcess::Start({.flags = flags, .folder = folder_});
    ASSERT_NE(daemon_, nullptr);
    std::smatch match;
    const std::string log = daemon_->Log();
    ASSERT_TRUE(std::regex_search(log, match, std::regex("address=(127.0.0.1:[0-9]+)"))) << log;
    address_ = match[1];
  }

  absl::Status Attach(const std::optional<TlsOptions>& tls) {
    return client::Worker::Attach(
               {.address = address_, .tls = tls, .attach_timeout = std::chrono::seconds(5)})
        .status();
  }
  TlsOptions Caller(const KeyPair& pair) const {
    return {.ca_file = ca_file_,
            .certificate_file = Write("caller.pem", pair.certificate),
            .key_file = Write("caller.key", pair.key)};
  }

  const std::string folder_ = fakes::MakeTemporaryFolder();
  CertificateAuthority ca_{"one"};
  CertificateAuthority other_ca_{"another"};
  const std::string ca_file_ = Write("ca.pem", ca_.certificate());
  const std::string other_ca_file_ = Write("other.pem", other_ca_.certificate());
  std::unique_ptr<DaemonProcess> daemon_;
  std::string address_;
};

TEST_F(Tls, AWorkerThatTrustsTheDaemonDecodes) {
  ASSERT_NO_FATAL_FAILURE(Start(ca_.Issue("127.0.0.1")));
  auto worker =
      client::Worker::Attach({.address = address_, .tls = TlsOptions{.ca_file = ca_file_}});
  ASSERT_TRUE(worker.ok()) << worker.status();
  EXPECT_FALSE((*worker)->mapped());
  const cli::SyntheticShape shape = {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
  const auto model = (*worker)->RegisterModel(shape.Geometry());
  ASSERT_TRUE(model.ok()) << model.status();
  auto sequence = (*worker)->CreateSequence(*model);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  cli::SyntheticSequence truth(shape, 1);
  truth.Grow(100);
  const auto key = truth.KeysOfAllLayers(0, 100);
  const auto value = truth.ValuesOfAllLayers(0, 100);
  const auto held = sequence->Append({.key = std::as_bytes(std::span(key)),
                                      .value = std::as_bytes(std::span(value)),
                                      .tokens = 100});
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(*held, 100u);

  // Clients that do not trust the daemon or use no TLS are not connected.
  EXPECT_TRUE(absl::IsUnavailable(Attach(std::nullopt)));
  EXPECT_TRUE(absl::IsUnavailable(Attach(TlsOptions{.ca_file = other_ca_file_})));
  EXPECT_TRUE(absl::IsUnavailable(Attach(TlsOptions())));  // the system's roots

  // The same through the C interface.
  tessera_attach_options options = TESSERA_ATTACH_OPTIONS_INIT;
  options.address = address_.c_str();
  options.tls_ca_file = ca_file_.c_str();
  tessera_worker* c_worker = nullptr;
  tessera_error error;
  EXPECT_EQ(tessera_attach(&options, &c_worker, &error), TESSERA_OK) << error.message;
  tessera_detach(c_worker);
}

TEST_F(Tls, TheNameInTheCertificateCounts) {
  ASSERT_NO_FATAL_FAILURE(Start(ca_.Issue("node.example")));
  EXPECT_TRUE(absl::IsUnavailable(Attach(TlsOptions{.ca_file = ca_file_})));
  const absl::Status named = Attach(TlsOptions{.ca_file = ca_file_, .server_name = "node.example"});
  EXPECT_TRUE(named.ok()) << named;
}

TEST_F(Tls, CallersMustShowACertificateWhereOneIsAskedFor) {
  ASSERT_NO_FATAL_FAILURE(Start(ca_.Issue("127.0.0.1"), {"--tls-client-ca-file=" + ca_file_}));
  EXPECT_TRUE(absl::IsUnavailable(Attach(TlsOptions{.ca_file = ca_file_})));
  EXPECT_TRUE(absl::IsUnavailable(Attach(Caller(other_ca_.Issue("stranger")))));
  const TlsOptions known = Caller(ca_.Issue("worker"));
  const absl::Status attached = Attach(known);
  EXPECT_TRUE(attached.ok()) << attached;
}

// The worker learns what to do, for every wrong use of TLS.
TEST_F(Tls, ErrorsSayWhatToDo) {
  ASSERT_NO_FATAL_FAILURE(Start(ca_.Issue("node.example")));
  const auto error = [](const std::string& address, const std::optional<TlsOptions>& tls) {
    const auto worker = client::Worker::Attach(
        {.address = address, .tls = tls, .attach_timeout = std::chrono::seconds(5)});
    return std::string(worker.status().message());
  };
  EXPECT_THAT(error(address_, std::nullopt), HasSubstr("it may speak TLS: give --tls-ca=FILE"));
  EXPECT_THAT(error(address_, TlsOptions{.ca_file = ca_file_}),
              HasSubstr("its certificate is for another name: give --tls-name"));
  EXPECT_THAT(error(address_, TlsOptions{.ca_file = other_ca_file_, .server_name = "node.example"}),
              HasSubstr("not from an authority in --tls-ca"));
  EXPECT_EQ(error(address_, TlsOptions{.ca_file = ca_file_, .server_name = "node.example"}), "");

  const auto plain = DaemonProcess::Start({.flags = {"--listen=127.0.0.1:0"}});
  ASSERT_NE(plain, nullptr);
  std::smatch match;
  const std::string log = plain->Log();
  ASSERT_TRUE(std::regex_search(log, match, std::regex("address=(127.0.0.1:[0-9]+)"))) << log;
  EXPECT_THAT(error(match[1], TlsOptions{.ca_file = ca_file_}),
              HasSubstr("it does not speak TLS: leave out the --tls flags"));
}

TEST_F(Tls, AMissingClientCertificateIsNamed) {
  ASSERT_NO_FATAL_FAILURE(Start(ca_.Issue("127.0.0.1"), {"--tls-client-ca-file=" + ca_file_}));
  EXPECT_THAT(std::string(Attach(TlsOptions{.ca_file = ca_file_}).message()),
              HasSubstr("it may ask for a client certificate: give --tls-certificate"));
}

TEST_F(Tls, RenewedCertificatesAreTakenUp) {
  ASSERT_NO_FATAL_FAILURE(Start(ca_.Issue("127.0.0.1")));
  ASSERT_TRUE(Attach(TlsOptions{.ca_file = ca_file_}).ok());
  WriteServer(other_ca_.Issue("127.0.0.1"));
  // The daemon checks its files every few seconds; the channel retries until it is admitted.
  grpc::ChannelArguments arguments;
  arguments.SetInt("grpc.initial_reconnect_backoff_ms", 300);
  arguments.SetInt("grpc.min_reconnect_backoff_ms", 300);
  arguments.SetInt("grpc.max_reconnect_backoff_ms", 300);
  const auto renewed =
      client::OpenChannel(address_, TlsOptions{.ca_file = other_ca_file_}, arguments);
  ASSERT_TRUE(renewed.ok()) << renewed.status();
  EXPECT_TRUE(
      (*renewed)->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(60)));
  EXPECT_TRUE(absl::IsUnavailable(Attach(TlsOptions{.ca_file = ca_file_})));
}

TEST_F(Tls, ADaemonWhoseFilesDoNotFitSaysSo) {
  const KeyPair pair = ca_.Issue("127.0.0.1");
  const std::string certificate = Write("c.pem", pair.certificate);
  const std::string key = Write("c.key", pair.key);
  const std::string foreign = Write("foreign.key", ca_.Issue("127.0.0.1").key);
  const std::string text = Write("text", "no certificate at all");
  struct Case {
    std::vector<std::string> flags;
    std::vector<std::string> said;
    int exit_code = 1;  // 2: the configuration alone is wrong, whatever the files contain
  };
  const std::vector<Case> cases = {
      {{"--tls-certificate-file=" + certificate}, {"tls_key_file", "missing", certificate}, 2},
      {{"--tls-key-file=" + key}, {"tls_certificate_file", "missing", key}, 2},
      {{"--tls-client-ca-file=" + ca_file_}, {"tls_client_ca_file", "tls_certificate_file"}, 2},
      {{"--tls-certificate-file=" + folder_ + "/absent", "--tls-key-file=" + key},
       {"tls_certificate_file", "absent"}},
      {{"--tls-certificate-file=" + text, "--tls-key-file=" + key}, {"tls_certificate_file", text}},
      {{"--tls-certificate-file=" + certificate, "--tls-key-file=" + foreign},
       {"tls_key_file", foreign}},
      {{"--tls-certificate-file=" + certificate, "--tls-key-file=" + text}, {"tls_key_file", text}},
      {{"--tls-certificate-file=" + certificate, "--tls-key-file=" + key,
        "--tls-client-ca-file=" + text},
       {"tls_client_ca_file", text}},
  };
  for (const Case& bad : cases) {
    std::vector<std::string> flags = {"--listen=unix:" + folder_ + "/s", "--listen=127.0.0.1:0",
                                      "--pool-bytes=64MiB", "--metrics=", "--device=cpu"};
    flags.insert(flags.end(), bad.flags.begin(), bad.flags.end());
    const fakes::FinishedDaemon daemon = fakes::RunDaemonToEnd(flags);
    EXPECT_EQ(daemon.exit_code, bad.exit_code) << daemon.output;
    for (const std::string& word : bad.said) EXPECT_THAT(daemon.output, HasSubstr(word));
  }
}

TEST_F(Tls, AWorkerWhoseFilesDoNotFitSaysSo) {
  address_ = "127.0.0.1:1";
  const absl::Status absent = Attach(TlsOptions{.ca_file = folder_ + "/absent"});
  EXPECT_TRUE(absl::IsInvalidArgument(absent)) << absent;
  EXPECT_THAT(std::string(absent.message()), HasSubstr(folder_ + "/absent"));
  const absl::Status half = Attach(TlsOptions{.ca_file = ca_file_, .certificate_file = ca_file_});
  EXPECT_TRUE(absl::IsInvalidArgument(half)) << half;
  EXPECT_THAT(std::string(half.message()), HasSubstr("only the certificate"));
  address_ = "unix:" + folder_ + "/s";
  const absl::Status socket = Attach(TlsOptions{.ca_file = ca_file_});
  EXPECT_TRUE(absl::IsInvalidArgument(socket)) << socket;
  EXPECT_THAT(std::string(socket.message()), HasSubstr("Unix socket"));
}

}  // namespace
}  // namespace tessera
