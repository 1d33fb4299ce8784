// A hostile worker with a token policy: its observations are wrong in every field, and its
// sequences are truncated and freed during decisions. The daemon survives, and its accounts
// balance.

#include "tests/e2e/hostile/hostile_tokens.h"

namespace tessera {
namespace {

// ---- Observations

struct WrongShowing {
  const char* name;
  const char* policy;
  std::function<void(v1::ObserveRequest&)> spoil;
  StatusCode code;
  const char* says;
};

void Stage(v1::ObserveRequest& request, std::uint64_t offset) {
  v1::StagingRef& staging = *request.mutable_last_queries()->mutable_staging();
  staging.set_offset(offset);
  staging.set_bytes(8 * kHeads * kHeadDim * 2);
}

const char* const kSnapKv = "snapkv:tokens=24,window=8";
constexpr auto kInvalid = StatusCode::INVALID_ARGUMENT;
constexpr auto kRange = StatusCode::OUT_OF_RANGE;

const WrongShowing kWrong[] = {
    {"nothing", kSnapKv, [](auto& r) { r.clear_last_queries(); }, kInvalid, "no queries"},
    {"layer", kSnapKv, [](auto& r) { r.set_layer(2); }, kInvalid, "2"},
    {"sequence", kSnapKv, [](auto& r) { r.set_sequence_id(kHuge); }, StatusCode::NOT_FOUND, ""},
    {"session", kSnapKv, [](auto& r) { r.mutable_session()->set_secret(1); },
     StatusCode::UNAUTHENTICATED, ""},
    {"type", kSnapKv, [](auto& r) { r.mutable_last_queries()->set_dtype(v1::DTYPE_FP16); },
     kInvalid, "last_queries"},
    {"heads", kSnapKv,
     [](auto& r) {
       *r.mutable_last_queries() = Numbers(v1::DTYPE_BF16, {8, 3, kHeadDim});
     },
     kInvalid, "last_queries"},
    {"huge shape", kSnapKv,
     [](auto& r) { r.mutable_last_queries()->set_shape(0, std::uint64_t{1} << 62); }, kInvalid,
     "last_queries"},
    {"too few bytes", kSnapKv,
     [](auto& r) {
       *r.mutable_last_queries() = Numbers(v1::DTYPE_BF16, {8, 4, 64}, 100);
     },
     kInvalid, "last_queries"},
    {"too many rows", kSnapKv,
     [](auto& r) {
       *r.mutable_last_queries() = Numbers(v1::DTYPE_BF16, {9, 4, 64});
       r.set_first_query_position(kTokens - 9);
     },
     kInvalid, "9 last queries; the policy asks for 8"},
    {"beyond the tokens", kSnapKv, [](auto& r) { r.set_first_query_position(kTokens - 7); },
     kInvalid, "up to position 101"},
    {"far beyond", kSnapKv, [](auto& r) { r.set_first_query_position(kHuge - 4); }, kRange,
     "first_query_position"},
    {"far beyond, by norm", kSnapKv, [](auto& r) { r.set_first_norm_token(kHuge); }, kRange,
     "first_norm_token"},
    {"far behind, by norm", kSnapKv, [](auto& r) { r.set_norm_token_end(kHuge); }, kRange,
     "norm_token_end"},
    {"backwards, by norm", kSnapKv,
     [](auto& r) {
       r.set_first_norm_token(9);
       r.set_norm_token_end(8);
     },
     kInvalid, "from 9 to before 8"},
    {"staging", kSnapKv, [](auto& r) { Stage(r, kHuge - 63); }, kRange, "staging offset"},
    {"NaN", kSnapKv,
     [](auto& r) { r.mutable_last_queries()->set_inline_(std::string(8 * 4 * 64 * 2, '\xff')); },
     kInvalid, "not finite"},
    {"sums", kSnapKv,
     [](auto& r) {
       *r.mutable_attention_sums() = Numbers(v1::DTYPE_FP32, {2, 100});
     },
     kInvalid, "it has sums of attention; the policy asks for none"},
    {"norms", kSnapKv,
     [](auto& r) {
       *r.mutable_norm_queries() = Numbers(v1::DTYPE_BF16, {4, 1, 64});
       for (int i = 0; i < 4; ++i) r.add_norm_positions(1);
     },
     kInvalid, "queries by norm"},
    {"norm positions", kSnapKv,
     [](auto& r) {
       *r.mutable_norm_queries() = Numbers(v1::DTYPE_BF16, {4, 1, 64});
       for (int i = 0; i < 5; ++i) r.add_norm_positions(kHuge);
     },
     kInvalid, "norm_positions has 5"},
    {"token ids", kSnapKv, [](auto& r) { r.add_token_ids(5); }, StatusCode::FAILED_PRECONDITION,
     "does not need this observation"},
    {"a policy that asks for nothing", "streaming", [](auto&) {}, kInvalid, "asks for none"},
    {"a dense sequence", "dense", [](auto&) {}, StatusCode::FAILED_PRECONDITION,
     "does not need this observation"},
    {"a policy without tokens", "quest", [](auto&) {}, StatusCode::FAILED_PRECONDITION,
     "does not need this observation"},
    {"more sums than tokens", "h2o",
     [](auto& r) {
       *r.mutable_attention_sums() = Numbers(v1::DTYPE_FP32, {2, 101});
     },
     kInvalid, "up to position 101"},
    {"sums from beyond", "h2o", [](auto& r) { r.set_first_sum_position(101); }, kRange,
     "first_sum_position"},
    {"sums that are negative", "h2o",
     [](auto& r) {
       *r.mutable_attention_sums() = Numbers(v1::DTYPE_FP32, {2, 100});
       r.mutable_attention_sums()->set_inline_(std::string(800, '\xbf'));
     },
     kInvalid, "of the sums of attention is -"},
    {"ids beyond the tokens", "semanticache",
     [](auto& r) {
       r.clear_last_queries();
       for (int i = 0; i < 101; ++i) r.add_token_ids(5);
     },
     kRange, "101 token ids"},
    {"ids from far beyond", "semanticache",
     [](auto& r) {
       r.clear_last_queries();
       r.add_token_ids(5);
       r.set_first_token_id(kHuge);
     },
     kRange, "first_token_id"},
};

TEST_F(HostileTokens, WrongObservationsAreRefusedAndNotKept) {
  for (const WrongShowing& wrong : kWrong) {
    SCOPED_TRACE(wrong.name);
    const std::uint64_t sequence = NewSequence(wrong.policy);
    ASSERT_TRUE(Append(sequence, 0, kTokens).ok());
    v1::ObserveRequest request = GoodObserve(sequence);
    wrong.spoil(request);
    const grpc::Status status = Observe(request);
    EXPECT_EQ(status.error_code(), wrong.code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(wrong.says));
    EXPECT_EQ(TenantStats().observation_bytes(), 0u);
  }
  // A sequence of another tenant, and a freed one.
  const std::uint64_t mine = NewSequence(kSnapKv);
  ASSERT_TRUE(Append(mine, 0, kTokens).ok());
  v1::ObserveRequest request = GoodObserve(mine);
  *request.mutable_session() = stranger_.key();
  v1::ObserveResponse response;
  grpc::ClientContext context;
  EXPECT_EQ(stranger_.stub().Observe(&context, request, &response).error_code(),
            StatusCode::NOT_FOUND);
  EXPECT_EQ(Compress(stranger_, mine).error_code(), StatusCode::NOT_FOUND);
  v1::FreeRequest free;
  free.add_sequence_ids(mine);
  v1::FreeResponse freed;
  ASSERT_TRUE(worker_.Free(free, &freed).ok());
  EXPECT_EQ(Observe(GoodObserve(mine)).error_code(), StatusCode::NOT_FOUND);
}

// A worker with another client library, which neither observes nor compresses before it publishes.
TEST_F(HostileTokens, UnobservedPromptsAreNotPublished) {
  for (const char* policy : {"tova:budget=80", "h2o:heavy=40,recent=40"}) {
    SCOPED_TRACE(policy);
    const std::uint64_t sequence = NewSequence(policy);
    ASSERT_TRUE(Append(sequence, 0, kTokens).ok());
    v1::PublishRequest request;
    *request.mutable_session() = worker_.key();
    request.set_sequence_id(sequence);
    for (std::uint32_t id = 0; id < kTokens; ++id) request.add_token_ids(id);
    v1::PublishResponse response;
    grpc::ClientContext context;
    const grpc::Status status = worker_.stub().Publish(&context, request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("has not decided about"));
    EXPECT_EQ(TenantStats().prefixes(), 0u);
  }
}

TEST_F(HostileTokens, AnyNumbersAreRefusedOrTaken) {
  const char* const policies[] = {kSnapKv, "h2o", "tova", "semantickv", "semanticache", "chunkkv"};
  std::vector<std::uint64_t> sequences;
  for (const char* policy : policies) {
    sequences.push_back(NewSequence(policy));
    ASSERT_TRUE(Append(sequences.back(), 0, kTokens).ok());
  }
  int taken = 0;
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t sequence = random_.Pick(sequences);
    v1::ObserveRequest request = GoodObserve(sequence, random_.OneIn(9) ? 7 : round % kLayers);
    const auto number = [&] { return random_.OneIn(2) ? random_.Below(130) : random_.Border(); };
    const auto rows = [&] { return random_.OneIn(9) ? random_.Border() : random_.Below(20); };
    const auto tensor = [&](v1::DType type, std::vector<std::uint64_t> shape, v1::Tensor& out) {
      std::vector<std::uint64_t> small = shape;
      for (std::uint64_t& dimension : small) dimension = std::min<std::uint64_t>(dimension, 200);
      out = Numbers(type, small);
      for (std::size_t i = 0; i < shape.size(); ++i) {
        out.set_shape(static_cast<int>(i), shape[i]);
      }
    };
    if (random_.OneIn(2)) {
      tensor(v1::DTYPE_BF16, {rows(), kHeads, kHeadDim}, *request.mutable_last_queries());
      request.set_first_query_position(number());
    }
    if (random_.OneIn(3)) {
      const std::uint64_t count = rows();
      tensor(v1::DTYPE_BF16, {kHeads, count, kHeadDim}, *request.mutable_norm_queries());
      for (std::uint64_t i = 0; i < std::min<std::uint64_t>(kHeads * count, 400); ++i) {
        request.add_norm_positions(random_.OneIn(9) ? number()
                                                    : i % std::max<std::uint64_t>(count, 1));
      }
      if (random_.OneIn(2)) request.set_first_norm_token(random_.OneIn(2) ? 0 : number());
      if (random_.OneIn(2)) request.set_norm_token_end(random_.OneIn(2) ? kTokens : number());
      request.set_all_norms(random_.OneIn(2));
    }
    if (random_.OneIn(3)) {
      tensor(v1::DTYPE_FP32, {kKvHeads, random_.OneIn(2) ? kTokens : number()},
             *request.mutable_attention_sums());
      if (random_.OneIn(2)) request.set_first_sum_position(number());
    }
    if (random_.OneIn(3)) {
      for (std::uint64_t i = random_.Below(120); i > 0; --i) request.add_token_ids(5);
      if (random_.OneIn(2)) request.set_first_token_id(number());
    }
    const grpc::Status status = Observe(request);
    taken += status.ok();
    ASSERT_NE(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
    ASSERT_NE(status.error_code(), StatusCode::INTERNAL) << status.error_message();
    if (random_.OneIn(8)) (void)Compress(worker_, sequence);
  }
  std::printf("%d taken\n", taken);
  v1::FreeRequest free;
  for (const std::uint64_t sequence : sequences) free.add_sequence_ids(sequence);
  v1::FreeResponse freed;
  ASSERT_TRUE(worker_.Free(free, &freed).ok());
}

// ---- Requests

TEST_F(HostileTokens, ADescriptionThatFitsIntoNoMessageIsRefused) {
  const std::uint64_t sequence = NewSequence("dense");
  constexpr int kAtOnce = 500;
  for (std::uint64_t first = 0; first < 120'000; first += kAtOnce) {
    const grpc::Status status = Append(sequence, first, kAtOnce);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  v1::DescribeRequest request;
  request.set_sequence_id(sequence);
  request.set_entries(true);
  v1::DescribeResponse response;
  const grpc::Status refused = worker_.Describe(request, &response);
  EXPECT_EQ(refused.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("ask without entries"));
  request.set_entries(false);
  request.set_lanes(true);
  EXPECT_TRUE(worker_.Describe(request, &response).ok());
  EXPECT_EQ(response.lane_size(), kLayers * kKvHeads);
}

TEST_F(HostileTokens, AForkWithABadPolicyLeavesNothing) {
  const std::uint64_t sequence = NewSequence("streaming");
  ASSERT_TRUE(Append(sequence, 0, kTokens).ok());
  const v1::TenantStats before = TenantStats();
  for (const char* policy : {"thimk", "think:ratio=0", "streaming:sink=-1", "streaming:pos=slot",
                             "lacache:span=16", "mosaickv:group=3", "\n+", "+", ":"}) {
    v1::ForkRequest fork;
    fork.set_parent_id(sequence);
    fork.set_policy(policy);
    v1::ForkResponse forked;
    const grpc::Status status = worker_.Fork(fork, &forked);
    EXPECT_FALSE(status.ok()) << policy;
    EXPECT_EQ(forked.sequence_id(), 0u);
  }
  const v1::TenantStats after = TenantStats();
  EXPECT_EQ(after.sequences(), before.sequences());
  EXPECT_EQ(after.used_bytes_by_tag().at("tiles"), before.used_bytes_by_tag().at("tiles"));
}

TEST_F(HostileTokens, WordsThatHoldWhatPartsThemAreNoPolicy) {
  const auto create = [&](const std::function<void(v1::PolicySpec&)>& fill) {
    v1::CreateSequenceRequest request;
    request.set_model_id(model_);
    fill(*request.mutable_policy_spec());
    v1::CreateSequenceResponse response;
    return worker_.CreateSequence(request, &response);
  };
  const std::string strange[] = {"",
                                 "+",
                                 ":",
                                 "streaming+quest",
                                 "streaming:sink=3",
                                 "stream\ning",
                                 "stre\0aming",
                                 std::string(900'000, 'x')};
  for (const std::string& name : strange) {
    const grpc::Status status = create([&](auto& spec) { spec.add_terms()->set_name(name); });
    EXPECT_FALSE(status.ok()) << name.substr(0, 40);
    EXPECT_LT(status.error_message().size(), 2000u);
  }
  for (const std::string& word :
       {std::string(""), std::string("4,recent=5"), std::string("4+quest"), std::string("4\n4"),
        std::string("=4"), std::string(900'000, '4')}) {
    const grpc::Status as_value = create([&](v1::PolicySpec& spec) {
      v1::PolicyTermSpec& term = *spec.add_terms();
      term.set_name("streaming");
      (*term.mutable_options())["sink"] = word;
    });
    EXPECT_EQ(as_value.error_code(), kInvalid) << word.substr(0, 40);
    EXPECT_LT(as_value.error_message().size(), 2000u);
    const grpc::Status as_key = create([&](v1::PolicySpec& spec) {
      v1::PolicyTermSpec& term = *spec.add_terms();
      term.set_name("streaming");
      (*term.mutable_options())[word] = "4";
    });
    EXPECT_EQ(as_key.error_code(), kInvalid) << word.substr(0, 40);
  }
  const grpc::Status many = create([&](v1::PolicySpec& spec) {
    for (int i = 0; i < 50'000; ++i) spec.add_terms()->set_name("quest");
  });
  EXPECT_EQ(many.error_code(), kInvalid);
  const grpc::Status good = create([&](v1::PolicySpec& spec) {
    v1::PolicyTermSpec& term = *spec.add_terms();
    term.set_name("streaming");
    (*term.mutable_options())["sink"] = "3";
    spec.add_terms()->set_name("quest");
  });
  EXPECT_TRUE(good.ok()) << good.error_message();
}

// ---- Everything at once

TEST_F(HostileTokens, EveryCallAtTheSameTimeOnOneSequence) {
  for (const char* policy :
       {"streaming:sink=4,recent=40", "h2o:heavy=20,recent=20", "semanticache:max_chunk=16",
        "streaming:sink=4,recent=90+mosaickv:sinks=0,recent=0,min_segment=32,segment=64,select="
        "0"}) {
    SCOPED_TRACE(policy);
    const std::uint64_t sequence = NewSequence(policy);
    std::atomic<std::uint64_t> tokens{0};
    std::atomic<bool> stop{false};
    std::atomic<int> compressed{0};
    std::vector<std::thread> threads;
    const auto repeat = [&](const std::function<void(TestRandom&)>& call) {
      const std::uint64_t seed = random_.Bits();
      threads.emplace_back([&stop, call, seed] {
        TestRandom mine(seed);
        while (!stop.load()) call(mine);
      });
    };
    repeat([&](TestRandom&) { compressed += Compress(worker_, sequence).ok(); });
    repeat([&](TestRandom& random) {
      v1::TruncateRequest truncate;
      truncate.set_sequence_id(sequence);
      const std::uint64_t held = tokens.load();
      truncate.set_tokens(random.OneIn(4) ? 0
                                          : held - std::min<std::uint64_t>(held, random.Below(60)));
      v1::TruncateResponse response;
      (void)worker_.Truncate(truncate, &response);
    });
    repeat([&](TestRandom& random) {
      v1::ForkRequest fork;
      fork.set_parent_id(sequence);
      if (random.OneIn(2)) fork.set_policy("streaming:sink=1,recent=9");
      v1::ForkResponse forked;
      if (!worker_.Fork(fork, &forked).ok()) return;
      (void)Compress(worker_, forked.sequence_id());
      v1::FreeRequest free;
      free.add_sequence_ids(forked.sequence_id());
      v1::FreeResponse freed;
      EXPECT_TRUE(worker_.Free(free, &freed).ok());
    });
    for (int round = 0; round < 250; ++round) {
      v1::DescribeRequest describe;
      describe.set_sequence_id(sequence);
      v1::DescribeResponse described;
      const grpc::Status status = worker_.Describe(describe, &described);
      ASSERT_TRUE(status.ok()) << status.error_message();
      tokens.store(described.tokens());
      (void)Append(sequence, described.tokens(), static_cast<int>(random_.Between(1, 80)));
      v1::ObserveRequest shown;
      *shown.mutable_session() = worker_.key();
      shown.set_sequence_id(sequence);
      shown.add_token_ids(3);
      (void)Observe(shown);
    }
    stop.store(true);
    for (std::thread& thread : threads) thread.join();
    std::printf("%d compressed under %s\n", compressed.load(), policy);
    v1::FreeRequest free;
    free.add_sequence_ids(sequence);
    v1::FreeResponse freed;
    ASSERT_TRUE(worker_.Free(free, &freed).ok());
  }
  EXPECT_EQ(TenantStats().sequences(), 0u);
}

}  // namespace
}  // namespace tessera
