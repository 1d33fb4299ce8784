// Every invalid packing, rotation or selection gets an error that names the value and the limit,
// and leaves the sequence unchanged.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/format/element.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using fakes::SmallModel;
using fakes::SmallRows;
using grpc::StatusCode;
using testing::HasSubstr;

constexpr int kPackedHeadDim = 64;

// [2 layers][2 kv heads][64 channels][64]: the identity, in bf16.
v1::Tensor Identities() {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_BF16);
  for (int dimension : {2, 2, kPackedHeadDim, kPackedHeadDim}) tensor.add_shape(dimension);
  std::vector<std::uint16_t> values(4 * kPackedHeadDim * kPackedHeadDim);
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int i = 0; i < kPackedHeadDim; ++i) {
      values[(matrix * kPackedHeadDim + i) * kPackedHeadDim + i] = kernels::FloatToBf16(1.0f);
    }
  }
  tensor.set_inline_(values.data(), values.size() * sizeof(std::uint16_t));
  return tensor;
}

// Overwrites one element of one matrix: layer 1, kv head 0, row 5.
void Spoil(v1::Tensor& tensor, int column, float value) {
  const std::uint16_t bits = kernels::FloatToBf16(value);
  std::memcpy(
      tensor.mutable_inline_()->data() + ((2 * kPackedHeadDim + 5) * kPackedHeadDim + column) * 2,
      &bits, sizeof bits);
}

struct PackingMistake {
  std::string name;
  std::function<void(v1::CompressRequest&)> make;
  StatusCode code;
  std::vector<std::string> message;  // must name the value and the limit
};

struct SelectMistake {
  std::string name;
  std::function<void(v1::SelectRequest&)> make;
  StatusCode code;
  std::vector<std::string> message;
};

class BadPacking : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    ASSERT_TRUE(worker_.Attach().ok());
    v1::RegisterModelRequest model;
    *model.mutable_model() = SmallModel(2);
    v1::RegisterModelResponse registered;
    ASSERT_TRUE(worker_.RegisterModel(model, &registered).ok());
    sequence_ = NewSequence(registered.model_id());
    // Layers that differ.
    model.mutable_model()->set_name("mixed");
    model.mutable_model()->mutable_layers(1)->set_head_dim(128);
    ASSERT_TRUE(worker_.RegisterModel(model, &registered).ok());
    mixed_ = NewSequence(registered.model_id());
    v1::AppendRequest append;
    append.set_sequence_id(sequence_);
    *append.mutable_key() = SmallRows(2, 40, 1);
    *append.mutable_value() = SmallRows(2, 40, 2);
    v1::AppendResponse appended;
    ASSERT_TRUE(worker_.Append(append, &appended).ok());
  }

  std::uint64_t NewSequence(std::uint64_t model) {
    v1::CreateSequenceRequest create;
    create.set_model_id(model);
    v1::CreateSequenceResponse created;
    EXPECT_TRUE(worker_.CreateSequence(create, &created).ok());
    return created.sequence_id();
  }
  v1::CompressRequest GoodCompress() const {
    v1::CompressRequest request;
    *request.mutable_session() = worker_.key();
    request.set_sequence_id(sequence_);
    request.mutable_packing()->set_kept_channels(16);
    return request;
  }
  v1::SelectRequest GoodSelect() const {
    v1::SelectRequest request;
    *request.mutable_session() = worker_.key();
    request.set_sequence_id(sequence_);
    v1::Tensor& query = *request.mutable_query();
    query.set_dtype(v1::DTYPE_BF16);
    for (int dimension : {1, 4, kPackedHeadDim}) query.add_shape(dimension);
    query.set_inline_(std::string(4 * kPackedHeadDim * 2, '\0'));
    request.mutable_selection()->set_rate(0.5);
    return request;
  }
  std::string Described() {
    v1::DescribeRequest request;
    request.set_sequence_id(sequence_);
    request.set_lanes(true);
    v1::DescribeResponse response;
    EXPECT_TRUE(worker_.Describe(request, &response).ok());
    return response.SerializeAsString();
  }

  void Check(const std::vector<PackingMistake>& mistakes) {
    const std::string before = Described();
    for (const PackingMistake& mistake : mistakes) {
      SCOPED_TRACE(mistake.name);
      v1::CompressRequest request = GoodCompress();
      mistake.make(request);
      grpc::ClientContext context;
      v1::CompressResponse response;
      const grpc::Status status = worker_.stub().Compress(&context, request, &response);
      EXPECT_EQ(status.error_code(), mistake.code) << status.error_message();
      for (const std::string& part : mistake.message) {
        EXPECT_THAT(status.error_message(), HasSubstr(part));
      }
      EXPECT_EQ(Described(), before);
    }
  }

  std::unique_ptr<DaemonProcess> daemon_ = DaemonProcess::Start({});
  RawWorker worker_{daemon_->Connect()};
  std::uint64_t sequence_ = 0;
  std::uint64_t mixed_ = 0;
};

TEST_F(BadPacking, Shapes) {
  constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  Check({
      {"no kept channels",
       [](auto& r) { r.mutable_packing()->set_kept_channels(0); },
       kInvalid,
       {"kept_channels is 0", "1 to 64"}},
      {"more than there are",
       [](auto& r) { r.mutable_packing()->set_kept_channels(65); },
       kInvalid,
       {"kept_channels is 65", "1 to 64"}},
      {"more than 16 bits",
       [](auto& r) { r.mutable_packing()->set_kept_channels(65536 + 16); },
       kInvalid,
       {"kept_channels is 65552", "1 to 64"}},
      {"a group of 3",
       [](auto& r) { r.mutable_packing()->set_group(3); },
       kInvalid,
       {"group is 3", "1, 2 or 4"}},
      {"a group of 257",
       [](auto& r) { r.mutable_packing()->set_group(257); },
       kInvalid,
       {"group is 257", "1, 2 or 4"}},
      {"kept and group do not match",
       [](auto& r) {
         r.mutable_packing()->set_kept_channels(18);
         r.mutable_packing()->set_group(4);
       },
       kInvalid,
       {"kept_channels 18", "group 4", "not a multiple"}},
      {"an unknown value type",
       [](auto& r) { r.mutable_packing()->set_values(static_cast<v1::ValueType>(9)); },
       kInvalid,
       {"values is 9", "FP8 (4)"}},
      {"more channels than head_dim",
       [](auto& r) { r.mutable_packing()->set_channels(128); },
       kInvalid,
       {"channels is 128", "head_dim, 64"}},
      {"channels cut without rotations",
       [](auto& r) { r.mutable_packing()->set_channels(48); },
       kInvalid,
       {"channels is 48", "head_dim 64", "rotat"}},
      {"an unknown summary",
       [](auto& r) { r.mutable_packing()->set_summary(static_cast<v1::BlockSummary>(4)); },
       kInvalid,
       {"summary is 4", "MIN_MAX (2)"}},
      {"an index of signs",
       [](auto& r) { r.mutable_packing()->set_summary(v1::BLOCK_SUMMARY_SIGNS); },
       kInvalid,
       {"summary is SIGNS (3)", "planes+signs"}},
      {"a block without a summary",
       [](auto& r) { r.mutable_packing()->set_block(8); },
       kInvalid,
       {"block is 8", "without"}},
      {"a block of 32",
       [](auto& r) {
         r.mutable_packing()->set_summary(v1::BLOCK_SUMMARY_MEAN);
         r.mutable_packing()->set_block(32);
       },
       kInvalid,
       {"block is 32", "4, 8 or 16"}},
      {"a block of 260",
       [](auto& r) {
         r.mutable_packing()->set_summary(v1::BLOCK_SUMMARY_MEAN);
         r.mutable_packing()->set_block(260);
       },
       kInvalid,
       {"block is 260", "4, 8 or 16"}},
      {"dense, and channels dropped",
       [](auto& r) {
         r.mutable_packing()->set_dense(true);
         r.mutable_packing()->set_summary(v1::BLOCK_SUMMARY_MEAN);
       },
       kInvalid,
       {"kept_channels is 16", "dense"}},
      {"dense, and nothing else",
       [](auto& r) {
         r.mutable_packing()->Clear();
         r.mutable_packing()->set_dense(true);
       },
       kInvalid,
       {"dense", "nothing would change"}},
      {"dense, and rotated",
       [](auto& r) {
         r.mutable_packing()->Clear();
         r.mutable_packing()->set_dense(true);
         r.mutable_packing()->set_summary(v1::BLOCK_SUMMARY_MEAN);
         *r.mutable_rotations()->mutable_key() = Identities();
         *r.mutable_rotations()->mutable_value() = Identities();
       },
       kInvalid,
       {"rotations", "dense"}},
      {"a layer beyond the model",
       [](auto& r) { r.set_first_layer(2); },
       kInvalid,
       {"first_layer is 2", "2 layers"}},
      {"layers beyond the model",
       [](auto& r) { r.set_layers(3); },
       kInvalid,
       {"layers is 3", "2 layers"}},
      {"no such sequence",
       [](auto& r) { r.set_sequence_id(77); },
       StatusCode::NOT_FOUND,
       {"sequence 77"}},
      {"rotations without a packing",
       [](auto& r) {
         r.clear_packing();
         *r.mutable_rotations()->mutable_key() = Identities();
       },
       kInvalid,
       {"rotations", "without a packing"}},
  });
}

TEST_F(BadPacking, Rotations) {
  constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  const auto rotated = [](std::function<void(v1::Tensor & key, v1::Tensor & value)> spoil) {
    return [spoil](v1::CompressRequest& request) {
      v1::Rotations& rotations = *request.mutable_rotations();
      *rotations.mutable_key() = Identities();
      *rotations.mutable_value() = Identities();
      spoil(*rotations.mutable_key(), *rotations.mutable_value());
    };
  };
  Check({
      {"another dtype",
       rotated([](auto& key, auto&) { key.set_dtype(v1::DTYPE_FP16); }),
       kInvalid,
       {"rotations.key is fp16", "bf16 or fp32"}},
      {"no dtype",
       rotated([](auto& key, auto&) { key.set_dtype(v1::DTYPE_UNSPECIFIED); }),
       kInvalid,
       {"rotations.key", "dtype 0"}},
      {"two dtypes",
       rotated([](auto&, auto& value) { value.set_dtype(v1::DTYPE_FP32); }),
       kInvalid,
       {"rotations.value has dtype 3", "rotations.key 1"}},
      {"layers missing",
       rotated([](auto& key, auto&) { key.set_shape(0, 1); }),
       kInvalid,
       {"rotations.key has shape [1, 2, 64, 64]", "[2, 2, 64, 64]"}},
      {"heads missing",
       rotated([](auto&, auto& value) { value.set_shape(1, 1); }),
       kInvalid,
       {"rotations.value has shape [2, 1, 64, 64]", "[2, 2, 64, 64]"}},
      {"channels missing",
       rotated([](auto& key, auto&) { key.set_shape(2, 48); }),
       kInvalid,
       {"[2, 2, 48, 64]", "[2, 2, 64, 64]"}},
      {"another head_dim",
       rotated([](auto& key, auto&) { key.set_shape(3, 128); }),
       kInvalid,
       {"[2, 2, 64, 128]", "[2, 2, 64, 64]"}},
      {"a value is missing",
       rotated([](auto&, auto& value) { value.Clear(); }),
       kInvalid,
       {"rotations.value"}},
      {"bytes missing",
       rotated([](auto& key, auto&) { key.mutable_inline_()->pop_back(); }),
       kInvalid,
       {"has 32767 bytes", "needs 32768"}},
      {"not finite",
       rotated(
           [](auto&, auto& value) { Spoil(value, 7, std::numeric_limits<float>::quiet_NaN()); }),
       kInvalid,
       {"rotations.value of layer 1, kv head 0", "row 5, column 7", "not finite"}},
      {"infinite",
       rotated([](auto& key, auto&) { Spoil(key, 7, std::numeric_limits<float>::infinity()); }),
       kInvalid,
       {"rotations.key of layer 1, kv head 0", "row 5, column 7", "not finite"}},
      {"a row that is too long",
       rotated([](auto& key, auto&) { Spoil(key, 5, 1.0078125f); }),
       kInvalid,
       {"rotations.key of layer 1, kv head 0", "row 5 times itself is 1.01", "limit for bf16",
        "0.0078125"}},
      {"a row that is zero",
       rotated([](auto& key, auto&) { Spoil(key, 5, 0); }),
       kInvalid,
       {"row 5 times itself is 0", "which is 1 from orthonormal"}},
      {"rows that are not orthogonal",
       rotated([](auto&, auto& value) { Spoil(value, 3, 0.01f); }),
       kInvalid,
       {"rotations.value of layer 1, kv head 0", "row 5 times row 3 is 0.01"}},
      {"outside the staging arena",
       rotated([](auto& key, auto&) {
         key.mutable_staging()->set_offset(1 << 30);
         key.mutable_staging()->set_bytes(32768);
       }),
       StatusCode::FAILED_PRECONDITION,
       {"staging arena"}},
  });
  Check({{"layers that are not alike",
          [this](v1::CompressRequest& request) {
            request.set_sequence_id(mixed_);
            *request.mutable_rotations()->mutable_key() = Identities();
            *request.mutable_rotations()->mutable_value() = Identities();
          },
          kInvalid,
          {"layers 0 and 1 differ"}}});
}

TEST_F(BadPacking, Selections) {
  constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<SelectMistake> mistakes = {
      {"no selection", [](auto& r) { r.clear_selection(); }, kInvalid, {"selection.rate is 0"}},
      {"a negative rate",
       [](auto& r) { r.mutable_selection()->set_rate(-0.5); },
       kInvalid,
       {"selection.rate is -0.5", "above 0 and at most 1"}},
      {"a rate above 1",
       [](auto& r) { r.mutable_selection()->set_rate(1.5); },
       kInvalid,
       {"selection.rate is 1.5", "at most 1"}},
      {"a rate that is none",
       [nan](auto& r) { r.mutable_selection()->set_rate(nan); },
       kInvalid,
       {"selection.rate is nan"}},
      {"rate and entries",
       [](auto& r) { r.mutable_selection()->set_entries(9); },
       kInvalid,
       {"entries 9", "rate 0.5"}},
      {"an unknown judge",
       [](auto& r) { r.mutable_selection()->set_judge(static_cast<v1::Selection::Judge>(5)); },
       kInvalid,
       {"judge is 5", "LOGIT (1)"}},
      {"a layer beyond the model",
       [](auto& r) { r.set_layer(2); },
       kInvalid,
       {"layer is 2", "2 layers"}},
      {"another query",
       [](auto& r) { r.mutable_query()->set_shape(1, 5); },
       kInvalid,
       {"[1, 5, 64]", "[any, 4, 64]"}},
      {"too many queries",
       [](auto& r) {
         r.mutable_query()->set_shape(0, 257);
         r.mutable_query()->mutable_inline_()->resize(257 * 4 * kPackedHeadDim * 2);
       },
       kInvalid,
       {"query has 257 rows", "limit is 256"}},
      {"more queries than tokens",
       [](auto& r) {
         r.mutable_query()->set_shape(0, 41);
         r.mutable_query()->mutable_inline_()->resize(41 * 4 * kPackedHeadDim * 2);
       },
       kInvalid,
       {"41 rows", "40 tokens"}},
      {"a position beyond reason",
       [](auto& r) { r.set_first_query_position(~std::uint64_t{0}); },
       kInvalid,
       {"first_query_position is 18446744073709551615"}},
      {"no such sequence",
       [](auto& r) { r.set_sequence_id(77); },
       StatusCode::NOT_FOUND,
       {"sequence 77"}},
  };
  for (const SelectMistake& mistake : mistakes) {
    SCOPED_TRACE(mistake.name);
    v1::SelectRequest request = GoodSelect();
    mistake.make(request);
    {
      grpc::ClientContext context;
      v1::SelectResponse response;
      const grpc::Status status = worker_.stub().Select(&context, request, &response);
      EXPECT_EQ(status.error_code(), mistake.code) << status.error_message();
      for (const std::string& part : mistake.message) {
        EXPECT_THAT(status.error_message(), HasSubstr(part));
      }
    }
    // Attend refuses it with the same words.
    v1::AttendRequest attend;
    *attend.mutable_session() = request.session();
    attend.set_layer(request.layer());
    v1::AttendItem& item = *attend.add_items();
    item.set_sequence_id(request.sequence_id());
    *item.mutable_query() = request.query();
    *item.mutable_selection() = request.selection();
    if (request.has_first_query_position()) {
      item.set_first_query_position(request.first_query_position());
    }
    v1::AttendResponse response;
    const grpc::Status status = worker_.Attend(attend, &response);
    EXPECT_EQ(status.error_code(), mistake.code) << status.error_message();
    for (const std::string& part : mistake.message) {
      EXPECT_THAT(status.error_message(), HasSubstr(part));
    }
  }
}

}  // namespace
}  // namespace tessera
