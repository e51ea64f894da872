#include "common/request/validation.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

using absl::StatusCode;

RawRequest Good() {
  RawRequest raw;
  raw.batch = 2;
  raw.seq_len_q = 10;
  raw.seq_len_kv = 12;
  raw.num_heads = 4;
  raw.num_kv_heads = 2;
  raw.head_dim = 16;
  raw.head_dim_v = 8;
  raw.dtype = DType::kBFloat16;
  return raw;
}

RawRequest GoodPacked() {
  RawRequest raw = Good();
  raw.batch = 1;
  raw.packed = true;
  raw.cu_seqlens_q = {0, 4, 4, 10};
  raw.cu_seqlens_k = {0, 6, 12, 12};
  return raw;
}

Rejection Reject(const RawRequest& raw, const Limits& limits = Limits()) {
  auto result = ValidateRequest(raw, limits);
  if (Rejection* rejection = std::get_if<Rejection>(&result)) return *rejection;
  ADD_FAILURE() << "was accepted";
  return {};
}

ValidRequest Accept(const RawRequest& raw) {
  auto result = ValidateRequest(raw, Limits());
  if (ValidRequest* request = std::get_if<ValidRequest>(&result)) return *request;
  ADD_FAILURE() << std::get<Rejection>(result).ToStatus();
  return {};
}

// Changes one thing and expects exactly one violation, at `field`.
void ExpectViolation(const std::string& field, StatusCode code,
                     const std::function<void(RawRequest&)>& spoil, RawRequest raw = Good()) {
  spoil(raw);
  const Rejection rejection = Reject(raw);
  ASSERT_EQ(rejection.violations.size(), 1u) << field << " " << rejection.ToStatus();
  EXPECT_EQ(rejection.violations[0].field, field);
  EXPECT_EQ(rejection.violations[0].code, code) << field;
  EXPECT_EQ(rejection.code, code) << field;
  EXPECT_FALSE(rejection.violations[0].description.empty());
}

constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
constexpr StatusCode kTooMuch = StatusCode::kResourceExhausted;
constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

TEST(ValidationTest, AcceptsAndResolvesDefaults) {
  RawRequest raw = Good();
  raw.num_kv_heads = 0;
  raw.head_dim_v = 0;
  const ValidRequest request = Accept(raw);
  EXPECT_EQ(request.spec.shape.num_kv_heads, 4);
  EXPECT_EQ(request.spec.shape.head_dim_v, 16);
  EXPECT_EQ(request.spec.shape.cu_seqlens_q, (std::vector<int64_t>{0, 10}));
  EXPECT_EQ(request.spec.shape.cu_seqlens_k, (std::vector<int64_t>{0, 12}));
  EXPECT_DOUBLE_EQ(request.spec.options.softmax_scale, 0.25);
  EXPECT_EQ(request.spec.options.softcap, 0.0);
  EXPECT_EQ(request.spec.options.window_left, -1);
  EXPECT_FALSE(request.choice.layout.has_value());
  EXPECT_EQ(request.inputs, (std::vector<TensorId>{TensorId::kQ, TensorId::kK, TensorId::kV}));
}

TEST(ValidationTest, ZeroesThatMeanSomethingAreKept) {
  RawRequest raw = Good();
  raw.softmax_scale = 0.0;
  raw.window = RawWindow{0, 0};
  raw.seq_len_q = 0;
  raw.seq_len_kv = 0;
  const ValidRequest request = Accept(raw);
  EXPECT_EQ(request.spec.options.softmax_scale, 0.0);
  EXPECT_EQ(request.spec.options.window_left, 0);
  raw.softmax_scale = -2.5;
  EXPECT_EQ(Accept(raw).spec.options.softmax_scale, -2.5);
}

TEST(ValidationTest, PackedDocuments) {
  const ValidRequest request = Accept(GoodPacked());
  EXPECT_EQ(request.spec.shape.num_documents(), 3);
  EXPECT_EQ(request.spec.shape.cu_seqlens_k, (std::vector<int64_t>{0, 6, 12, 12}));
}

TEST(ValidationTest, BackwardNamesItsTensors) {
  RawRequest raw = Good();
  raw.direction = Direction::kBackward;
  const ValidRequest recomputed = Accept(raw);
  EXPECT_TRUE(recomputed.recompute_forward);
  EXPECT_TRUE(recomputed.choice.recompute_forward);
  EXPECT_EQ(recomputed.inputs.size(), 4u);
  raw.has_forward_result = true;
  const ValidRequest given = Accept(raw);
  EXPECT_FALSE(given.recompute_forward);
  EXPECT_EQ(given.inputs.size(), 6u);
  EXPECT_EQ(given.outputs, (std::vector<TensorId>{TensorId::kDq, TensorId::kDk, TensorId::kDv}));
}

TEST(ValidationTest, Shapes) {
  for (uint64_t bad : {uint64_t{257}, kHuge, uint64_t{1} << 32, uint64_t{0}}) {
    ExpectViolation("shape.head_dim", kInvalid, [&](RawRequest& raw) { raw.head_dim = bad; });
    if (bad != 0) {
      ExpectViolation("shape.head_dim_v", kInvalid, [&](RawRequest& raw) { raw.head_dim_v = bad; });
    }
  }
  ExpectViolation("shape.batch", kInvalid, [](RawRequest& raw) { raw.batch = 0; });
  ExpectViolation("shape.num_heads", kInvalid, [](RawRequest& raw) { raw.num_heads = 0; });
  ExpectViolation("shape.num_kv_heads", kInvalid, [](RawRequest& raw) { raw.num_kv_heads = 3; });
  for (uint64_t bad : {uint64_t{5000}, kHuge, uint64_t{1} << 63}) {
    ExpectViolation("shape.batch", kTooMuch, [&](RawRequest& raw) { raw.batch = bad; });
  }
  for (uint64_t bad : {(uint64_t{1} << 27) + 1, kHuge, uint64_t{1} << 63}) {
    ExpectViolation("shape.seq_len_q", kTooMuch, [&](RawRequest& raw) { raw.seq_len_q = bad; });
    ExpectViolation("shape.seq_len_kv", kTooMuch, [&](RawRequest& raw) { raw.seq_len_kv = bad; });
  }
  ExpectViolation("shape.num_heads", kTooMuch, [](RawRequest& raw) { raw.num_heads = 2048; });
  ExpectViolation("dtype", kInvalid, [](RawRequest& raw) { raw.dtype.reset(); });
  ExpectViolation("shape.packed", kInvalid, [](RawRequest& raw) { raw.cu_seqlens_q = {0, 10}; });
}

TEST(ValidationTest, CuSeqlens) {
  const auto expect = [](const std::string& field, StatusCode code,
                         const std::function<void(RawRequest&)>& spoil) {
    ExpectViolation(field, code, spoil, GoodPacked());
  };
  expect("shape.packed.cu_seqlens_q[0]", kInvalid,
         [](RawRequest& raw) { raw.cu_seqlens_q[0] = 1; });
  expect("shape.packed.cu_seqlens_q[2]", kInvalid,
         [](RawRequest& raw) { raw.cu_seqlens_q[2] = 3; });
  expect("shape.packed.cu_seqlens_k[3]", kInvalid,
         [](RawRequest& raw) { raw.cu_seqlens_k[3] = 13; });
  expect("shape.packed.cu_seqlens_k[3]", kInvalid,
         [](RawRequest& raw) { raw.cu_seqlens_k[3] = kHuge; });
  expect("shape.packed.cu_seqlens_k", kInvalid, [](RawRequest& raw) {
    raw.cu_seqlens_k = {0, 12};
  });
  expect("shape.batch", kInvalid, [](RawRequest& raw) { raw.batch = 2; });
  RawRequest raw = GoodPacked();
  raw.cu_seqlens_q.clear();
  raw.cu_seqlens_k.clear();
  EXPECT_EQ(Reject(raw).violations.size(), 2u);
  raw.cu_seqlens_q.assign((1 << 18) + 2, 0);
  raw.cu_seqlens_q.back() = 10;
  raw.cu_seqlens_k = raw.cu_seqlens_q;
  raw.cu_seqlens_k.back() = 12;
  EXPECT_EQ(Reject(raw).code, kTooMuch);
}

TEST(ValidationTest, Options) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (double bad : {infinity, -infinity, std::nan(""), 1e300}) {
    ExpectViolation("options.softmax_scale", kInvalid,
                    [&](RawRequest& raw) { raw.softmax_scale = bad; });
  }
  for (double bad : {0.0, -1.0, infinity, std::nan(""), 1e300, 1e-300}) {
    ExpectViolation("options.softcap", kInvalid, [&](RawRequest& raw) { raw.softcap = bad; });
  }
  ExpectViolation("options.window.left", kInvalid, [](RawRequest& raw) {
    raw.window = RawWindow{-2, 0};
  });
  ExpectViolation("options.window.right", kInvalid, [](RawRequest& raw) {
    raw.window = RawWindow{0, std::numeric_limits<int64_t>::min()};
  });
}

TEST(ValidationTest, PlanAndReply) {
  ExpectViolation("plan.world_size", kInvalid, [](RawRequest& raw) { raw.world_size = 0; });
  ExpectViolation("plan.world_size", kTooMuch, [](RawRequest& raw) { raw.world_size = kHuge; });
  ExpectViolation("plan.world_size", kInvalid, [](RawRequest& raw) {
    raw.world_size = 2;
    raw.schedule = ScheduleKind::kSingle;
  });
  ExpectViolation("plan.stripe", kInvalid, [](RawRequest& raw) { raw.stripe = 4; });
  ExpectViolation("plan.stripe", kInvalid, [](RawRequest& raw) {
    raw.stripe = 0;
    raw.layout = Layout::kStriped;
  });
  ExpectViolation("reply.max_chunk_bytes", kTooMuch,
                  [](RawRequest& raw) { raw.reply_max_chunk_bytes = 17 << 20; });
  ExpectViolation("reply.max_chunk_bytes", kInvalid,
                  [](RawRequest& raw) { raw.reply_max_chunk_bytes = 0; });
  ExpectViolation("reply.progress_interval", kInvalid,
                  [](RawRequest& raw) { raw.reply_progress_interval_seconds = std::nan(""); });
  ExpectViolation("request_id", kInvalid,
                  [](RawRequest& raw) { raw.request_id = std::string(129, 'x'); });
  ExpectViolation("request_id", kInvalid, [](RawRequest& raw) { raw.request_id = "a\nb"; });
  ExpectViolation("has_forward_result", kInvalid,
                  [](RawRequest& raw) { raw.has_forward_result = true; });
}

TEST(ValidationTest, InlineTensors) {
  RawRequest raw = Good();
  raw.inline_tensors = {{TensorId::kQ, 2 * 10 * 4 * 16 * 2}};
  Accept(raw);
  ExpectViolation(
      "inline_tensors[0].data", kInvalid, [](RawRequest& r) { r.inline_tensors[0].bytes += 1; },
      raw);
  ExpectViolation(
      "inline_tensors[1].tensor", kInvalid,
      [](RawRequest& r) { r.inline_tensors.push_back(r.inline_tensors[0]); }, raw);
  ExpectViolation(
      "inline_tensors[0].tensor", kInvalid,
      [](RawRequest& r) { r.inline_tensors[0].tensor = TensorId::kDout; }, raw);
  ExpectViolation(
      "inline_tensors[0].tensor", kInvalid,
      [](RawRequest& r) { r.inline_tensors[0].tensor.reset(); }, raw);
  ExpectViolation(
      "inline_tensors", kTooMuch, [](RawRequest& r) { r.inline_tensors[0].bytes = kHuge; }, raw);
}

TEST(ValidationTest, BytesOverTheLimit) {
  RawRequest raw = Good();
  raw.seq_len_q = 1 << 27;
  raw.num_heads = raw.num_kv_heads = 1024;
  const Rejection rejection = Reject(raw);
  EXPECT_EQ(rejection.code, kTooMuch);
  EXPECT_EQ(rejection.violations[0].field, "shape");
  // Every legal maximum at once: products stay exact, nothing wraps to "small".
  raw.batch = 4096;
  raw.seq_len_kv = 1 << 27;
  raw.head_dim = raw.head_dim_v = 256;
  raw.dtype = DType::kFloat32;
  EXPECT_EQ(Reject(raw).violations.size(), 6u);  // five tensors and their sum
}

TEST(ValidationTest, ReportsEverythingAtOnce) {
  RawRequest raw;
  raw.num_kv_heads = 3;
  raw.head_dim = 300;
  raw.softcap = -1;
  raw.window = RawWindow{-5, -6};
  raw.world_size = 1000;
  raw.found_in_decoding = {UnsupportedField("options.dropout"), UnknownField("options.field_99")};
  const Rejection rejection = Reject(raw);
  EXPECT_EQ(rejection.code, kInvalid);
  for (const char* field : {"options.dropout", "options.field_99", "shape.batch", "shape.num_heads",
                            "shape.head_dim", "dtype", "options.softcap", "options.window.left",
                            "options.window.right", "plan.world_size"}) {
    EXPECT_TRUE(std::any_of(rejection.violations.begin(), rejection.violations.end(),
                            [&](const Violation& v) { return v.field == field; }))
        << field;
  }
  EXPECT_EQ(rejection.ToStatus().code(), kInvalid);
}

TEST(ValidationTest, TheGravestCodeWins) {
  RawRequest raw = Good();
  raw.found_in_decoding = {UnsupportedField("options.alibi")};
  EXPECT_EQ(Reject(raw).code, StatusCode::kUnimplemented);
  raw.batch = kHuge;
  EXPECT_EQ(Reject(raw).code, StatusCode::kUnimplemented);
  raw.head_dim = 0;
  EXPECT_EQ(Reject(raw).code, kInvalid);
}

TEST(ValidationTest, DetailsAreBounded) {
  RawRequest raw = GoodPacked();
  raw.seq_len_q = 5000;
  raw.cu_seqlens_q.clear();
  for (int i = 0; i < 2500; ++i) {
    raw.cu_seqlens_q.push_back(10);
    raw.cu_seqlens_q.push_back(5);
  }
  raw.cu_seqlens_k.assign(5000, 0);
  const Rejection rejection = Reject(raw);
  size_t bytes = 0;
  for (const Violation& violation : rejection.violations) {
    bytes += violation.field.size() + violation.description.size();
  }
  EXPECT_LE(bytes, 4096u);
  EXPECT_GT(rejection.violations_left_out, 2000);
}

// Whatever the numbers, the answer is a spec that keeps its promises or violations.
TEST(ValidationTest, RandomHeaders) {
  std::mt19937_64 random(9);
  const auto number = [&]() -> uint64_t {
    switch (random() % 6) {
      case 0:
        return random();
      case 1:
        return uint64_t{1} << (random() % 64);
      case 2:
        return 0;
      default:
        return 1 + random() % 16;
    }
  };
  int accepted = 0;
  for (int round = 0; round < 200000; ++round) {
    RawRequest raw;
    raw.batch = number();
    raw.seq_len_q = number();
    raw.seq_len_kv = number();
    raw.num_heads = number();
    raw.num_kv_heads = random() % 2 == 0 ? 0 : number();
    raw.head_dim = number();
    raw.head_dim_v = number();
    raw.dtype = DType::kFloat32;
    raw.packed = random() % 2 == 0;
    if (raw.packed) {
      raw.batch = 1;
      raw.cu_seqlens_q = {0, number(), raw.seq_len_q};
      raw.cu_seqlens_k = {0, number(), raw.seq_len_kv};
    }
    const auto result = ValidateRequest(raw, Limits());
    if (const Rejection* rejection = std::get_if<Rejection>(&result)) {
      ASSERT_FALSE(rejection->violations.empty());
      continue;
    }
    ++accepted;
    const AttentionSpec& spec = std::get<ValidRequest>(result).spec;
    const AttentionShape& shape = spec.shape;
    ASSERT_GE(shape.batch, 1);
    ASSERT_EQ(shape.num_heads % shape.num_kv_heads, 0);
    ASSERT_LE(shape.head_dim, 256);
    ASSERT_TRUE(std::is_sorted(shape.cu_seqlens_q.begin(), shape.cu_seqlens_q.end()));
    ASSERT_EQ(shape.cu_seqlens_q.size(), shape.cu_seqlens_k.size());
    ASSERT_EQ(shape.cu_seqlens_k.back(), shape.seq_len_kv);
    ASSERT_LE(LayoutOf(spec, TensorId::kQ).bytes(), Limits().max_tensor_bytes);
  }
  EXPECT_GT(accepted, 2000);
}

}  // namespace
}  // namespace ringattn
