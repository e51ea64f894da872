#include "common/request/validation.h"

#include <google/protobuf/text_format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using absl::StatusCode;

constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
constexpr StatusCode kTooMuch = StatusCode::kResourceExhausted;
constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

constexpr char kGood[] = R"(
  shape { batch: 2 seq_len_q: 10 seq_len_kv: 12 num_heads: 4 num_kv_heads: 2 head_dim: 16
          head_dim_v: 8 }
  dtype: DATA_TYPE_BFLOAT16)";
constexpr char kGoodPacked[] = R"(
  shape { batch: 1 seq_len_q: 10 seq_len_kv: 12 num_heads: 4 num_kv_heads: 2 head_dim: 16
          head_dim_v: 8
          packed { cu_seqlens_q: [0, 4, 4, 10] cu_seqlens_k: [0, 6, 12, 12] } }
  dtype: DATA_TYPE_BFLOAT16)";

// Merges `text` over `base`.
template <typename Header = v1::ForwardHeader>
Header Parse(const char* base, const std::string& text = "") {
  Header header;
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(base, &header));
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(text, &header)) << text;
  return header;
}

template <typename Header>
Rejection Reject(const Header& header, const Limits& limits = Limits()) {
  auto result = ValidateRequest(header, limits);
  if (Rejection* rejection = std::get_if<Rejection>(&result)) return *rejection;
  ADD_FAILURE() << "was accepted: " << header.ShortDebugString();
  return {};
}

template <typename Header>
ValidRequest Accept(const Header& header) {
  auto result = ValidateRequest(header, Limits());
  if (ValidRequest* request = std::get_if<ValidRequest>(&result)) return *request;
  ADD_FAILURE() << std::get<Rejection>(result).ToStatus();
  return {};
}

template <typename Header>
void ExpectOneViolation(const Header& header, const std::string& field, StatusCode code) {
  const Rejection rejection = Reject(header);
  ASSERT_EQ(rejection.violations.size(), 1u) << field << " " << rejection.ToStatus();
  EXPECT_EQ(rejection.violations[0].field, field);
  EXPECT_EQ(rejection.violations[0].code, code) << field;
  EXPECT_EQ(rejection.code, code) << field;
  EXPECT_FALSE(rejection.violations[0].description.empty());
}

// Changes one field and expects exactly one violation, at `field`.
void ExpectViolation(const std::string& field, StatusCode code, const std::string& text) {
  ExpectOneViolation(Parse(kGood, text), field, code);
}

TEST(ValidationTest, AcceptsAndResolvesDefaults) {
  v1::ForwardHeader header = Parse(kGood);
  header.mutable_shape()->set_num_kv_heads(0);
  header.mutable_shape()->set_head_dim_v(0);
  const ValidRequest request = Accept(header);
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
  v1::ForwardHeader header =
      Parse(kGood, "options { softmax_scale: 0 window {} } shape { seq_len_q: 0 seq_len_kv: 0 }");
  const ValidRequest request = Accept(header);
  EXPECT_EQ(request.spec.options.softmax_scale, 0.0);
  EXPECT_EQ(request.spec.options.window_left, 0);
  header.mutable_options()->set_softmax_scale(-2.5);
  EXPECT_EQ(Accept(header).spec.options.softmax_scale, -2.5);
}

TEST(ValidationTest, PackedDocuments) {
  const ValidRequest request = Accept(Parse(kGoodPacked));
  EXPECT_EQ(request.spec.shape.num_documents(), 3);
  EXPECT_EQ(request.spec.shape.cu_seqlens_k, (std::vector<int64_t>{0, 6, 12, 12}));
}

TEST(ValidationTest, BackwardNamesItsTensors) {
  auto header = Parse<v1::BackwardHeader>(kGood);
  const ValidRequest recomputed = Accept(header);
  EXPECT_TRUE(recomputed.recompute_forward);
  EXPECT_TRUE(recomputed.choice.recompute_forward);
  EXPECT_EQ(recomputed.inputs.size(), 4u);
  header.set_has_forward_result(true);
  const ValidRequest given = Accept(header);
  EXPECT_FALSE(given.recompute_forward);
  EXPECT_EQ(given.inputs.size(), 6u);
  EXPECT_EQ(given.outputs, (std::vector<TensorId>{TensorId::kDq, TensorId::kDk, TensorId::kDv}));
}

TEST(ValidationTest, Shapes) {
  for (const char* bad : {"577", "4294967295"}) {
    ExpectViolation("shape.head_dim", kInvalid, absl::StrCat("shape { head_dim: ", bad, " }"));
    ExpectViolation("shape.head_dim_v", kInvalid, absl::StrCat("shape { head_dim_v: ", bad, " }"));
  }
  ExpectViolation("shape.head_dim", kInvalid, "shape { head_dim: 0 }");
  ExpectViolation("shape.num_heads", kInvalid, "shape { num_heads: 0 }");
  ExpectViolation("shape.num_kv_heads", kInvalid, "shape { num_kv_heads: 3 }");
  for (uint64_t bad : {uint64_t{65536}, kHuge, uint64_t{1} << 63}) {
    ExpectViolation("shape.batch", kTooMuch, absl::StrCat("shape { batch: ", bad, " }"));
  }
  for (uint64_t bad : {(uint64_t{1} << 27) + 1, kHuge, uint64_t{1} << 63}) {
    ExpectViolation("shape.seq_len_q", kTooMuch, absl::StrCat("shape { seq_len_q: ", bad, " }"));
    ExpectViolation("shape.seq_len_kv", kTooMuch, absl::StrCat("shape { seq_len_kv: ", bad, " }"));
  }
  ExpectViolation("shape.num_heads", kTooMuch, "shape { num_heads: 2048 }");
  ExpectViolation("dtype", kInvalid, "dtype: DATA_TYPE_UNSPECIFIED");
}

TEST(ValidationTest, CuSeqlens) {
  using Packed = v1::PackedDocuments;
  const auto expect = [](const std::string& field, const std::function<void(Packed&)>& spoil) {
    v1::ForwardHeader header = Parse(kGoodPacked);
    spoil(*header.mutable_shape()->mutable_packed());
    ExpectOneViolation(header, field, kInvalid);
  };
  expect("shape.packed.cu_seqlens_q[0]", [](Packed& p) { p.set_cu_seqlens_q(0, 1); });
  expect("shape.packed.cu_seqlens_q[2]", [](Packed& p) { p.set_cu_seqlens_q(2, 3); });
  expect("shape.packed.cu_seqlens_k[3]", [](Packed& p) { p.set_cu_seqlens_k(3, 13); });
  expect("shape.packed.cu_seqlens_k[3]", [](Packed& p) { p.set_cu_seqlens_k(3, kHuge); });
  expect("shape.packed.cu_seqlens_k", [](Packed& p) {
    p.mutable_cu_seqlens_k()->Truncate(1);
    p.add_cu_seqlens_k(12);
  });
  ExpectOneViolation(Parse(kGoodPacked, "shape { batch: 2 }"), "shape.batch", kInvalid);

  v1::ForwardHeader header = Parse(kGoodPacked);
  Packed& packed = *header.mutable_shape()->mutable_packed();
  packed.clear_cu_seqlens_q();
  packed.clear_cu_seqlens_k();
  EXPECT_EQ(Reject(header).violations.size(), 2u);
  packed.mutable_cu_seqlens_q()->Resize((1 << 18) + 1, 0);
  packed.add_cu_seqlens_q(10);
  packed.mutable_cu_seqlens_k()->Resize((1 << 18) + 1, 0);
  packed.add_cu_seqlens_k(12);
  EXPECT_EQ(Reject(header).code, kTooMuch);
}

TEST(ValidationTest, Options) {
  for (const char* bad : {"inf", "-inf", "nan", "1e300"}) {
    ExpectViolation("options.softmax_scale", kInvalid,
                    absl::StrCat("options { softmax_scale: ", bad, " }"));
  }
  for (const char* bad : {"0", "-1", "inf", "nan", "1e300", "1e-300"}) {
    ExpectViolation("options.softcap", kInvalid, absl::StrCat("options { softcap: ", bad, " }"));
  }
  ExpectViolation("options.window.left", kInvalid, "options { window { left: -2 } }");
  ExpectViolation("options.window.right", kInvalid,
                  "options { window { right: -9223372036854775808 } }");
}

TEST(ValidationTest, PlanAndReply) {
  ExpectViolation("plan.world_size", kInvalid, "plan { world_size: 0 }");
  ExpectViolation("plan.world_size", kTooMuch, "plan { world_size: 4294967295 }");
  ExpectViolation("plan.world_size", kInvalid, "plan { world_size: 2 schedule: SCHEDULE_SINGLE }");
  ExpectViolation("plan.stripe", kInvalid, "plan { stripe: 4 }");
  ExpectViolation("plan.stripe", kInvalid, "plan { stripe: 0 layout: LAYOUT_STRIPED }");
  ExpectViolation("plan.heads_per_step", kInvalid, "plan { heads_per_step: 1 }");
  ExpectViolation("plan.heads_per_step", kInvalid,
                  "plan { schedule: SCHEDULE_ALL_GATHER heads_per_step: 0 }");
  ExpectViolation("plan.heads_per_step", kTooMuch,
                  "plan { schedule: SCHEDULE_ALL_GATHER heads_per_step: 4294967295 }");
  for (const char* schedule : {"SCHEDULE_PASS_Q", "SCHEDULE_REPLICATED_Q"}) {
    ExpectViolation("plan.schedule", kInvalid,
                    absl::StrCat("plan { schedule: ", schedule,
                                 " } options { mask { encoding: MASK_ENCODING_BITS } }"));
    for (const char* term : {"bias {}", "mask {}"}) {
      const std::string text =
          absl::StrCat("plan { schedule: ", schedule, " } options { ", term, " }");
      Accept(Parse(kGood, text));
      ExpectOneViolation(Parse(kGoodPacked, text), "plan.schedule", kInvalid);
    }
    Accept(Parse(kGoodPacked, absl::StrCat("plan { schedule: ", schedule, " }")));
  }
  ExpectViolation("reply.max_chunk_bytes", kTooMuch, "reply { max_chunk_bytes: 17825792 }");
  ExpectViolation("reply.max_chunk_bytes", kInvalid, "reply { max_chunk_bytes: 0 }");
  ExpectViolation("reply.progress_interval", kInvalid, "reply { progress_interval {} }");
  ExpectViolation("request_id", kInvalid,
                  absl::StrCat("request_id: '", std::string(129, 'x'), "'"));
  ExpectViolation("request_id", kInvalid, R"(request_id: "a\nb")");
}

TEST(ValidationTest, EnumsThatAreNoValue) {
  v1::ForwardHeader header = Parse(kGood);
  header.mutable_plan()->set_layout(static_cast<v1::Layout>(99));
  ExpectOneViolation(header, "plan.layout", kInvalid);
  header = Parse(kGood);
  header.mutable_plan()->set_schedule(static_cast<v1::Schedule>(99));
  ExpectOneViolation(header, "plan.schedule", kInvalid);
}

TEST(ValidationTest, InlineTensors) {
  v1::ForwardHeader good = Parse(kGood, "inline_tensors { tensor: TENSOR_ID_Q }");
  good.mutable_inline_tensors(0)->set_data(std::string(2 * 10 * 4 * 16 * 2, '\0'));
  Accept(good);

  v1::ForwardHeader header = good;
  header.mutable_inline_tensors(0)->mutable_data()->push_back('\0');
  ExpectOneViolation(header, "inline_tensors[0].data", kInvalid);
  header = good;
  *header.add_inline_tensors() = good.inline_tensors(0);
  ExpectOneViolation(header, "inline_tensors[1].tensor", kInvalid);
  for (int tensor : {static_cast<int>(v1::TENSOR_ID_DOUT), 0, 99}) {
    header = good;
    header.mutable_inline_tensors(0)->set_tensor(static_cast<v1::TensorId>(tensor));
    ExpectOneViolation(header, "inline_tensors[0].tensor", kInvalid);
  }
  header = good;
  header.mutable_inline_tensors(0)->mutable_data()->resize((1 << 20) + 1);
  ExpectOneViolation(header, "inline_tensors", kTooMuch);
}

TEST(ValidationTest, BytesOverTheLimit) {
  v1::ForwardHeader header =
      Parse(kGood, "shape { seq_len_q: 134217728 num_heads: 1024 num_kv_heads: 1024 }");
  const Rejection rejection = Reject(header);
  EXPECT_EQ(rejection.code, kTooMuch);
  EXPECT_EQ(rejection.violations[0].field, "shape");
  // All legal maxima at once: sizes saturate and do not wrap around.
  header = Parse(kGood, R"(
    shape { batch: 65535 seq_len_q: 134217728 seq_len_kv: 134217728 num_heads: 1024
            num_kv_heads: 1024 head_dim: 576 head_dim_v: 576 }
    dtype: DATA_TYPE_FLOAT32)");
  EXPECT_EQ(Reject(header).violations.size(), 6u);  // five tensors and their sum
}

TEST(ValidationTest, WideRowsAndManyOrNoBatchRows) {
  const AttentionShape wide =
      Accept(Parse(kGood, "shape { head_dim: 576 head_dim_v: 512 }")).spec.shape;
  EXPECT_EQ(wide.head_dim, 576);
  EXPECT_EQ(wide.head_dim_v, 512);
  EXPECT_EQ(Accept(Parse(kGood, "shape { batch: 65535 }")).spec.shape.batch, 65535);
  const ValidRequest none = Accept(Parse(kGood, "shape { batch: 0 }"));
  EXPECT_EQ(none.spec.shape.batch, 0);
  for (const TensorId id : none.inputs) EXPECT_EQ(BytesOf(none.spec, id), 0);
  for (const TensorId id : none.outputs) EXPECT_EQ(BytesOf(none.spec, id), 0);
}

TEST(ValidationTest, ReportsEverythingAtOnce) {
  v1::ForwardHeader header = Parse("", R"(
    shape { batch: 70000 num_kv_heads: 3 head_dim: 600 }
    options { softcap: -1 window { left: -5 right: -6 } dilation_levels {} }
    plan { world_size: 1000 })");
  header.mutable_options()
      ->GetReflection()
      ->MutableUnknownFields(header.mutable_options())
      ->AddVarint(99, 1);
  const Rejection rejection = Reject(header);
  EXPECT_EQ(rejection.code, kInvalid);
  for (const char* field :
       {"options.dilation_levels[0].segment_length", "options.99", "shape.batch", "shape.num_heads",
        "shape.head_dim", "dtype", "options.softcap", "options.window.left", "options.window.right",
        "plan.world_size"}) {
    EXPECT_TRUE(std::any_of(rejection.violations.begin(), rejection.violations.end(),
                            [&](const Violation& v) { return v.field == field; }))
        << field;
  }
  EXPECT_EQ(rejection.violations[0].description,
            "is not a field of this version of the protocol; remove it or upgrade the service");
  EXPECT_EQ(rejection.ToStatus().code(), kInvalid);
}

// Open enums of proto3 carry any number.
TEST(ValidationTest, EnumFieldsListTheirValues) {
  const auto text = [](const std::string& field, const std::string& fields) {
    for (const Violation& violation : Reject(Parse(kGood, fields)).violations) {
      if (violation.field == field) return violation.description;
    }
    return std::string("no violation");
  };
  v1::ForwardHeader unset = Parse(kGood);
  unset.clear_dtype();
  const std::string types = "must be DATA_TYPE_FLOAT32, DATA_TYPE_BFLOAT16 or DATA_TYPE_FLOAT16";
  const Rejection rejection = Reject(unset);
  ASSERT_EQ(rejection.violations.size(), 1u);
  EXPECT_EQ(rejection.violations[0].description, "is not set, " + types);
  EXPECT_EQ(text("dtype", "dtype: 9"), "is 9, " + types);
  EXPECT_EQ(text("dtype", "dtype: DATA_TYPE_INT32"), "is 4, " + types);
  EXPECT_EQ(text("reply.output_dtype", "reply { output_dtype: 9 }"), "is 9, " + types);
  EXPECT_EQ(text("reply.lse_format", "reply { lse_format: 9 }"),
            "is 9, must be LSE_FORMAT_PER_DOCUMENT");
  EXPECT_EQ(text("shape.packing", "shape { packing: 9 }"),
            "is 9, must be PACKING_QKV or PACKING_KV");
  EXPECT_EQ(text("plan.layout", "plan { layout: 9 }"),
            "is 9, must be LAYOUT_CONTIGUOUS, LAYOUT_ZIGZAG, LAYOUT_STRIPED or "
            "LAYOUT_ZIGZAG_PER_DOCUMENT");
  EXPECT_EQ(text("plan.schedule", "plan { schedule: 99 }"),
            "is 99, must be SCHEDULE_SINGLE, SCHEDULE_RING, SCHEDULE_ALL_GATHER, SCHEDULE_PASS_Q, "
            "SCHEDULE_REPLICATED_Q or SCHEDULE_DOUBLE_RING");
  EXPECT_EQ(text("options.mask.encoding", "options { mask { encoding: -1 } }"),
            "is -1, must be MASK_ENCODING_BYTES or MASK_ENCODING_BITS");
  EXPECT_EQ(text("options.deterministic", "options { deterministic: 9 }"),
            "is 9, must be DETERMINISM_SAME_RING");
  EXPECT_EQ(text("options.compute_dtype", "options { compute_dtype: 9 }"),
            "is 9, must be COMPUTE_DTYPE_FLOAT8_E4M3");
}

TEST(ValidationTest, NumbersOutOfRangeAreShown) {
  const auto error = [](const std::string& fields) {
    return std::string(Reject(Parse(kGood, fields)).ToStatus().message());
  };
  EXPECT_EQ(error("options { softcap: -5 }"),
            "options.softcap: is -5, must be finite and greater than 0 in fp32");
  EXPECT_EQ(error("options { softmax_scale: 1e300 }"),
            "options.softmax_scale: is 1e+300, must be finite in fp32");
  EXPECT_EQ(error("options { dropout { rate: 1 } }"),
            "options.dropout.rate: is 1, must be at least 0 and less than 1");
  EXPECT_EQ(error("options { alibi { slopes: [1, 2, inf, 4] } }"),
            "options.alibi.slopes[2]: is inf, must be finite");
  EXPECT_EQ(error("reply { progress_interval { seconds: -1 } }").substr(0, 45),
            "reply.progress_interval: is -1 s, must be at ");
}

TEST(ValidationTest, TheGravestCodeWins) {
  EXPECT_EQ(Reject(Parse(kGood, "shape { batch: 70000 }")).code, StatusCode::kResourceExhausted);
  EXPECT_EQ(Reject(Parse(kGood, "shape { batch: 70000 head_dim: 0 }")).code, kInvalid);
}

TEST(ValidationTest, DetailsAreBounded) {
  v1::ForwardHeader header = Parse(kGoodPacked, "shape { seq_len_q: 5000 }");
  v1::PackedDocuments& packed = *header.mutable_shape()->mutable_packed();
  packed.clear_cu_seqlens_q();
  for (int i = 0; i < 2500; ++i) {
    packed.add_cu_seqlens_q(10);
    packed.add_cu_seqlens_q(5);
  }
  packed.clear_cu_seqlens_k();
  packed.mutable_cu_seqlens_k()->Resize(5000, 0);
  const Rejection rejection = Reject(header);
  size_t bytes = 0;
  for (const Violation& violation : rejection.violations) {
    bytes += violation.field.size() + violation.description.size();
  }
  EXPECT_LE(bytes, 4096u);
  EXPECT_GT(rejection.violations_left_out, 2000);
}

TEST(ValidationTest, PackedTensorsReplaceTheirParts) {
  using Ids = std::vector<TensorId>;
  const ValidRequest kv = Accept(Parse(kGood, "shape { packing: PACKING_KV head_dim_v: 16 }"));
  EXPECT_EQ(kv.spec.shape.packing, Packing::kKv);
  EXPECT_EQ(kv.inputs, (Ids{TensorId::kQ, TensorId::kKv}));
  const std::string qkv =
      "shape { packing: PACKING_QKV seq_len_kv: 10 num_kv_heads: 4 head_dim_v: 16 }";
  const ValidRequest backward = Accept(Parse<v1::BackwardHeader>(kGood, qkv));
  EXPECT_EQ(backward.inputs, (Ids{TensorId::kDout, TensorId::kQkv}));
  EXPECT_EQ(backward.outputs, (Ids{TensorId::kDqkv}));
  ExpectOneViolation(Parse(kGood, "shape { packing: PACKING_KV }"), "shape.head_dim_v", kInvalid);
  ExpectOneViolation(Parse(kGood, qkv + "shape { seq_len_q: 9 }"), "shape.seq_len_kv", kInvalid);
}

TEST(ValidationTest, LsePerDocumentIsOfPackedDocuments) {
  const std::string per_document = "reply { lse_format: LSE_FORMAT_PER_DOCUMENT }";
  const ValidRequest request = Accept(Parse(kGoodPacked, per_document));
  EXPECT_TRUE(request.spec.lse_per_document);
  EXPECT_EQ(DimensionsOf(request.spec, TensorId::kLse), (std::vector<int64_t>{3, 4, 6}));
  EXPECT_FALSE(Accept(Parse(kGoodPacked)).spec.lse_per_document);
  ExpectOneViolation(Parse(kGood, per_document), "reply.lse_format", kInvalid);
  // Larger than the flat tensor: one document has all tokens.
  auto header = Parse(kGoodPacked, per_document);
  header.mutable_shape()->set_seq_len_q(100'000'000);
  header.mutable_shape()->set_num_heads(1);
  header.mutable_shape()->set_num_kv_heads(1);
  header.mutable_shape()->set_head_dim(1);
  auto* documents = header.mutable_shape()->mutable_packed()->mutable_cu_seqlens_q();
  documents->Clear();
  header.mutable_shape()->mutable_packed()->clear_cu_seqlens_k();
  for (int d = 0; d <= 2048; ++d) {
    documents->Add(d == 2048 ? 100'000'000 : 0);
    header.mutable_shape()->mutable_packed()->add_cu_seqlens_k(d == 2048 ? 12 : 0);
  }
  ExpectOneViolation(header, "shape", kTooMuch);
  header.mutable_reply()->clear_lse_format();
  Accept(header);
}

TEST(ValidationTest, ProbabilityRows) {
  const std::string rows =
      "reply { probability_rows { batch: 1 position: 9 } probability_rows {} "
      "probability_rows { batch: 1 position: 9 } }";
  const ValidRequest request = Accept(Parse(kGood, rows));
  EXPECT_EQ(request.spec.probability_rows, (std::vector<ProbabilityRow>{{1, 9}, {0, 0}, {1, 9}}));
  EXPECT_EQ(request.outputs.back(), TensorId::kProbabilities);
  EXPECT_EQ(DimensionsOf(request.spec, TensorId::kProbabilities), (std::vector<int64_t>{3, 4, 12}));
  ExpectOneViolation(Parse<v1::BackwardHeader>(kGood, rows), "reply.probability_rows", kInvalid);
  ExpectOneViolation(Parse(kGood, "reply { probability_rows { position: 10 } }"),
                     "reply.probability_rows[0].position", kInvalid);
  ExpectOneViolation(Parse(kGoodPacked, "reply { probability_rows { batch: 1 } }"),
                     "reply.probability_rows[0].position", kInvalid);  // an empty document
  ExpectOneViolation(Parse(kGoodPacked, "reply { probability_rows { batch: 3 } }"),
                     "reply.probability_rows[0].batch", kInvalid);
  auto many = Parse(kGood);
  for (int i = 0; i < 4096; ++i) many.mutable_reply()->add_probability_rows();
  Accept(many);
  many.mutable_reply()->add_probability_rows();
  ExpectOneViolation(many, "reply.probability_rows", kTooMuch);
}

// Every level and offset has its own program, so their number is limited although each has only one
// segment.
TEST(ValidationTest, DilatedPartsAreLimited) {
  const std::string shape =
      "shape { seq_len_q: 131072 seq_len_kv: 131072 num_heads: 256 num_kv_heads: 256 head_dim: 1 "
      "head_dim_v: 1 } ";
  const auto levels = [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) {
      text += "options { dilation_levels { segment_length: 131072 dilation_rate: 131071 } } ";
    }
    return text;
  };
  Accept(Parse(kGood, shape + levels(4)));
  ExpectOneViolation(Parse(kGood, shape + levels(5)), "options.dilation_levels", kTooMuch);
  ExpectOneViolation(Parse(kGood, shape + levels(64)), "options.dilation_levels", kTooMuch);
  // A level with a fixed offset is one part.
  Accept(Parse(kGood, shape + levels(3) +
                          "options { dilation_levels { segment_length: 131072 "
                          "dilation_rate: 131071 offset: 7 } }"));
}

TEST(ValidationTest, ComputeDTypeGoesTogetherWithWhatItSays) {
  const std::string fp8 = "options { compute_dtype: COMPUTE_DTYPE_FLOAT8_E4M3 } ";
  const ValidRequest plain = Accept(Parse(kGood, fp8));
  EXPECT_EQ(plain.spec.options.compute_dtype, ComputeDType::kFloat8E4M3);
  for (const char* with :
       {"options { causal: true softcap: 3 softmax_scale: -1 sinks {} }",
        "options { window { left: 2 right: 1 } deterministic: DETERMINISM_SAME_RING }",
        "shape { seq_len_kv: 10 } options { dilation_levels { segment_length: 4 dilation_rate: 2 } "
        "}",
        "dtype: DATA_TYPE_FLOAT16 shape { head_dim: 128 head_dim_v: 128 }",
        "reply { output_dtype: DATA_TYPE_FLOAT32 } plan { schedule: SCHEDULE_PASS_Q }"}) {
    Accept(Parse(kGood, fp8 + with));
  }
  const struct {
    const char* field;
    const char* with;
  } refused[] = {
      {"options.compute_dtype", "dtype: DATA_TYPE_FLOAT32"},
      {"options.compute_dtype", "options { compute_dtype: 2 }"},
      {"shape.head_dim", "shape { head_dim: 136 }"},
      {"shape.head_dim", "shape { head_dim: 127 }"},
      {"shape.head_dim_v", "shape { head_dim_v: 256 }"},
      {"shape.head_dim_v", "shape { head_dim_v: 20 }"},
      {"options.dropout", "options { dropout { rate: 0.5 } }"},
      {"options.alibi", "options { alibi { slopes: [1, 2, 3, 4] } }"},
      {"options.bias", "options { bias {} }"},
      {"options.mask", "options { mask {} }"},
      {"options.segment_ids", "options { segment_ids {} }"},
      {"reply.probability_rows", "reply { probability_rows {} }"},
      {"retain", "retain {}"},
  };
  for (const auto& row : refused) {
    ExpectOneViolation(Parse(kGood, fp8 + row.with), row.field, kInvalid);
  }
  ExpectOneViolation(Parse<v1::BackwardHeader>(kGood, fp8), "options.compute_dtype", kInvalid);
}

TEST(ValidationTest, PreparedRequestsHaveNoTensors) {
  const ValidRequest prepared = Accept(Parse(kGood, "prepare {}"));
  EXPECT_EQ(prepared.prepare_ttl, Limits().default_prepare_ttl);
  EXPECT_TRUE(prepared.inputs.empty());
  EXPECT_TRUE(prepared.outputs.empty());
  EXPECT_EQ(Accept(Parse(kGood, "prepare { ttl { seconds: 600 } }")).prepare_ttl,
            absl::Seconds(600));
  EXPECT_EQ(Accept(Parse(kGood, "")).prepare_ttl, std::nullopt);
  ExpectOneViolation(Parse(kGood, "prepare { ttl { seconds: 601 } }"), "prepare.ttl", kInvalid);
  ExpectOneViolation(Parse(kGood, "prepare {} retain {}"), "retain", kInvalid);
  ExpectOneViolation(Parse(kGood, "prepare {} transport {}"), "transport", kInvalid);
  ExpectOneViolation(Parse<v1::BackwardHeader>(kGood, "prepare {} residual_handle: 'x'"),
                     "residual_handle", kInvalid);
}

TEST(ValidationTest, TuningAndMembers) {
  const ValidRequest tuned = Accept(Parse(kGood, "plan { tuning { tile_q: 96 key_splits: 1 } }"));
  EXPECT_EQ(tuned.choice.tuning, (Tuning{96, 0, 1}));
  ExpectOneViolation(Parse(kGood, "plan { tuning { tile_kv: 0 } }"), "plan.tuning.tile_kv",
                     kInvalid);
  // A backward that recomputes the forward has a forward to tune.
  Accept(Parse<v1::BackwardHeader>(kGood, "plan { tuning { key_splits: 1 } }"));
  const ValidRequest named = Accept(Parse(kGood, "plan { members: 'b' members: 'a' }"));
  EXPECT_EQ(named.choice.members, (std::vector<std::string>{"b", "a"}));
  EXPECT_EQ(named.choice.world_size, 2);
  Accept(Parse(kGood, "plan { schedule: SCHEDULE_SINGLE members: 'b' }"));
  ExpectOneViolation(Parse(kGood, "plan { schedule: SCHEDULE_SINGLE members: 'b' members: 'a' }"),
                     "plan.members", kInvalid);
  ExpectOneViolation(Parse(kGood, "plan { world_size: 3 members: 'b' members: 'a' }"),
                     "plan.members", kInvalid);
  ExpectOneViolation(Parse(kGood, "plan { members: 'b' members: 'b' }"), "plan.members[1]",
                     kInvalid);
  auto many = Parse(kGood);
  for (int i = 0; i < 65; ++i) many.mutable_plan()->add_members(absl::StrCat("worker-", i));
  ExpectOneViolation(many, "plan.members", kTooMuch);
}

// For random headers the result is a valid spec or violations.
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
  for (int round = 0; round < 100000; ++round) {
    v1::ForwardHeader header;
    header.set_dtype(v1::DATA_TYPE_FLOAT32);
    v1::AttentionShape& raw = *header.mutable_shape();
    raw.set_batch(number());
    raw.set_seq_len_q(number());
    raw.set_seq_len_kv(number());
    raw.set_num_heads(number());
    raw.set_num_kv_heads(random() % 2 == 0 ? 0 : number());
    raw.set_head_dim(number());
    raw.set_head_dim_v(number());
    if (random() % 2 == 0) {
      raw.set_batch(1);
      for (uint64_t end : {uint64_t{0}, number(), raw.seq_len_q()}) {
        raw.mutable_packed()->add_cu_seqlens_q(end);
      }
      for (uint64_t end : {uint64_t{0}, number(), raw.seq_len_kv()}) {
        raw.mutable_packed()->add_cu_seqlens_k(end);
      }
    }
    const auto result = ValidateRequest(header, Limits());
    if (const Rejection* rejection = std::get_if<Rejection>(&result)) {
      ASSERT_FALSE(rejection->violations.empty());
      continue;
    }
    ++accepted;
    const AttentionSpec& spec = std::get<ValidRequest>(result).spec;
    const AttentionShape& shape = spec.shape;
    ASSERT_GE(shape.batch, 0);
    ASSERT_EQ(shape.num_heads % shape.num_kv_heads, 0);
    ASSERT_LE(shape.head_dim, kMaxHeadDim);
    ASSERT_TRUE(std::is_sorted(shape.cu_seqlens_q.begin(), shape.cu_seqlens_q.end()));
    ASSERT_EQ(shape.cu_seqlens_q.size(), shape.cu_seqlens_k.size());
    ASSERT_EQ(shape.cu_seqlens_k.back(), shape.seq_len_kv);
    ASSERT_LE(BytesOf(spec, TensorId::kQ), Limits().max_tensor_bytes);
  }
  EXPECT_GT(accepted, 1000);
}

}  // namespace
}  // namespace ringattn
