// A daemon with metrics, a worker made of bare messages, and the values that it reports.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/metrics/names.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/daemon/scrape.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {

// The description of a series; null: there is none.
inline const metrics::DescriptionView* DescriptionOf(std::string_view series) {
  static const std::vector<metrics::DescriptionView> all = metrics::AllMetrics();
  for (const metrics::DescriptionView& metric : all) {
    if (metric.name == series) return &metric;
    if (metric.kind != metrics::Kind::kHistogram || !series.starts_with(metric.name)) continue;
    const std::string_view suffix = series.substr(metric.name.size());
    if (suffix == "_bucket" || suffix == "_sum" || suffix == "_count") return &metric;
  }
  return nullptr;
}

class Metrics : public testing::Test {
 protected:
  static std::vector<std::string> Flags() {
    return {"--metrics=127.0.0.1:0", "--pin-limit-ms=100", "--raw-copy-bytes=1048576",
            "--max-prefixes-per-tenant=2"};
  }

  // Stops the daemon and the worker of before, and starts another daemon.
  void Start(const fakes::DaemonProcess::Options& options) {
    worker_.reset();
    daemon_.reset();
    daemon_ = fakes::DaemonProcess::Start(options);
    ASSERT_NE(daemon_, nullptr);
    // The daemon serves before it has logged everything.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    std::smatch match;
    std::string log = daemon_->Log();
    while (!std::regex_search(log, match, std::regex("metrics port=([0-9]+)"))) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << log;
      log = daemon_->Log();
    }
    port_ = static_cast<std::uint16_t>(std::stoi(match[1]));
  }
  // Attaches a worker that maps memory, and registers a model.
  void Attach(const v1::Hello& hello = fakes::RawWorker::GoodHello()) {
    worker_ = std::make_unique<fakes::RawWorker>(daemon_->Connect());
    ASSERT_TRUE(worker_->Attach(hello).ok());
    ASSERT_TRUE(worker_->OpenDescriptors().ok());
    v1::RegisterModelRequest request;
    *request.mutable_model() = fakes::SmallModel();
    v1::RegisterModelResponse response;
    ASSERT_TRUE(worker_->RegisterModel(request, &response).ok());
    model_ = response.model_id();
  }

  std::uint64_t NewSequence(int tokens, const std::string& policy = "") {
    v1::CreateSequenceRequest create;
    create.set_model_id(model_);
    create.set_policy(policy);
    v1::CreateSequenceResponse created;
    EXPECT_TRUE(worker_->CreateSequence(create, &created).ok());
    const grpc::Status status = Append(created.sequence_id(), tokens, 0);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return created.sequence_id();
  }
  grpc::Status Append(std::uint64_t sequence, int tokens, std::uint64_t first) {
    v1::AppendRequest append;
    append.set_sequence_id(sequence);
    append.set_first_token(first);
    *append.mutable_key() = fakes::SmallRows(2, tokens, 1);
    *append.mutable_value() = fakes::SmallRows(2, tokens, 2);
    v1::AppendResponse appended;
    return worker_->Append(append, &appended);
  }
  // Compresses as its policy says.
  void Compress(std::uint64_t sequence) {
    v1::CompressRequest request;
    *request.mutable_session() = worker_->key();
    request.set_sequence_id(sequence);
    grpc::ClientContext context;
    v1::CompressResponse response;
    const grpc::Status status = worker_->stub().Compress(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  grpc::Status Offload(std::uint64_t sequence, v1::OffloadResponse* response) {
    v1::OffloadRequest request;
    *request.mutable_session() = worker_->key();
    request.set_sequence_id(sequence);
    grpc::ClientContext context;
    return worker_->stub().Offload(&context, request, response);
  }

  // All series of one scrape. Remembers which metrics were not 0, for MovedMetrics.
  std::vector<fakes::Series> Scrape() const {
    std::vector<fakes::Series> all = fakes::Scrape(port_);
    for (const fakes::Series& series : all) {
      const metrics::DescriptionView* const metric = DescriptionOf(series.name);
      if (metric != nullptr && series.value != 0) MovedMetrics().insert(std::string(metric->name));
    }
    return all;
  }
  // The metrics that were not 0 in any scrape of this program.
  static std::set<std::string>& MovedMetrics() {
    static std::set<std::string> moved;
    return moved;
  }

  // Sum over the series of a metric whose labels contain `labels`.
  double Value(const std::string& metric, const std::string& labels = "") const {
    double sum = 0;
    for (const fakes::Series& series : Scrape()) {
      if (series.name != metric || series.labels.find(labels) == std::string::npos) continue;
      sum += series.value;
    }
    return sum;
  }
  // Polls a bounded number of times, because the daemon works in the background. Each poll is a
  // scrape, so this needs no sleep.
  bool Becomes(const std::string& metric, const std::string& labels,
               const std::function<bool(double)>& good) const {
    for (int i = 0; i < 5000; ++i) {
      if (good(Value(metric, labels))) return true;
    }
    return false;
  }
  static bool Positive(double value) { return value > 0; }

  std::unique_ptr<fakes::DaemonProcess> daemon_;
  std::unique_ptr<fakes::RawWorker> worker_;
  std::uint16_t port_ = 0;
  std::uint64_t model_ = 0;
};

}  // namespace tessera
