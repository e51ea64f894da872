// Invalid requests, sent to a real server. Each must end with the right code and name its field,
// reserve no memory and leave the ring unchanged.
#include <google/protobuf/text_format.h>
#include <grpcpp/generic/generic_stub.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/wire/crc32c.h"
#include "common/wire/grpc_slices.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "server/edge/header/error_details.h"
#include "server/edge/services/bad_header_rows.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

using grpc::StatusCode;

// A call of raw bytes, because a client may send invalid protobuf.
struct Outcome {
  bool accepted = false;
  grpc::Status status;
};

class BadRequestsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { cluster_ = new TestCluster(2); }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }

  void SetUp() override { generation_ = cluster_->topology().generation(); }

  // Afterwards the ring is unchanged and no memory is reserved.
  void TearDown() override {
    EXPECT_TRUE(cluster_->WaitIdle());
    EXPECT_EQ(cluster_->topology().generation(), generation_);
    for (const auto& worker : cluster_->workers) EXPECT_EQ(worker->wrong_bytes(), 0);
  }

  static int Reserves() {
    int count = 0;
    for (const auto& worker : cluster_->workers) count += worker->reserves();
    return count;
  }

  // Sends the first message, waits for its answer, then sends the rest.
  static Outcome Call(bool backward, const std::vector<std::string>& messages) {
    grpc::GenericStub stub(cluster_->channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareCall(&context,
                                       backward ? "/ringattn.v1.AttentionService/Backward"
                                                : "/ringattn.v1.AttentionService/Forward",
                                       &queue);
    const auto wait = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    const auto send = [&](const std::string& bytes) {
      grpc::Slice slice(bytes);
      call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
      return wait();
    };
    Outcome outcome;
    call->StartCall(nullptr);
    wait();
    grpc::ByteBuffer reply;
    if (!messages.empty() && send(messages[0])) {
      if (messages.size() > 1) {
        call->Read(&reply, nullptr);
        outcome.accepted = wait();
      }
      for (size_t i = 1; outcome.accepted && i < messages.size(); ++i) {
        if (!send(messages[i])) break;
      }
    }
    call->WritesDone(nullptr);
    wait();
    do {
      call->Read(&reply, nullptr);
    } while (wait());
    call->Finish(&outcome.status, nullptr);
    wait();
    queue.Shutdown();
    return outcome;
  }

  static std::set<std::string> FieldsOf(const grpc::Status& status) {
    EXPECT_LE(status.error_details().size() + status.error_message().size(), 4096u + 200);
    google::rpc::Status details;
    EXPECT_TRUE(details.ParseFromString(status.error_details()));
    EXPECT_EQ(details.code(), static_cast<int>(status.error_code()));
    std::set<std::string> fields;
    bool has_info = false;
    for (const auto& detail : details.details()) {
      google::rpc::BadRequest bad_request;
      google::rpc::ErrorInfo info;
      if (detail.UnpackTo(&bad_request)) {
        for (const auto& violation : bad_request.field_violations()) {
          fields.insert(violation.field());
          EXPECT_FALSE(violation.description().empty());
        }
      } else if (detail.UnpackTo(&info)) {
        has_info = info.domain() == "ringattn" && !info.reason().empty();
      }
    }
    EXPECT_TRUE(has_info);
    return fields;
  }

  static void Expect(const Outcome& outcome, StatusCode code, const std::string& field) {
    EXPECT_EQ(CodeName(outcome.status.error_code()), std::string(CodeName(code)))
        << outcome.status.error_message();
    EXPECT_THAT(FieldsOf(outcome.status), ::testing::Contains(field))
        << outcome.status.error_message();
    ++checked_;
  }

  static TestCluster* cluster_;
  static int checked_;
  uint64_t generation_ = 0;
};
TestCluster* BadRequestsTest::cluster_ = nullptr;
int BadRequestsTest::checked_ = 0;

template <typename Header>
Header Parse(const std::string& base, const std::string& text) {
  Header header;
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(base, &header)) << base;
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(text, &header)) << text;
  return header;
}

template <typename Header>
std::string First(const Header& header) {
  std::conditional_t<std::is_same_v<Header, v1::ForwardHeader>, v1::ForwardRequest,
                     v1::BackwardRequest>
      request;
  *request.mutable_header() = header;
  return request.SerializeAsString();
}

std::string First(bool backward, const std::string& base, const std::string& text) {
  return backward ? First(Parse<v1::BackwardHeader>(base, text))
                  : First(Parse<v1::ForwardHeader>(base, text));
}

std::string Chunk(int tensor, uint64_t offset, uint64_t bytes,
                  std::optional<uint32_t> crc = std::nullopt) {
  v1::ForwardRequest request;
  v1::TensorChunk* chunk = request.mutable_chunk();
  chunk->set_tensor(static_cast<v1::TensorId>(tensor));
  chunk->set_offset(offset);
  chunk->set_data(Pattern(tensor, offset, bytes));
  if (crc.has_value()) chunk->set_crc32c(*crc);
  return request.SerializeAsString();
}

constexpr int kQ = 1, kK = 2, kV = 3, kOut = 4, kLse = 5, kDout = 6;

TEST_F(BadRequestsTest, TheBaseRequestsAreValid) {
  for (bool backward : {false, true}) {
    std::vector<std::string> messages = {First(backward, kBase, ""), Chunk(kQ, 0, 4096),
                                         Chunk(kK, 0, 2048), Chunk(kV, 0, 2048)};
    if (backward) messages.push_back(Chunk(kDout, 0, 4096));
    const Outcome outcome = Call(backward, messages);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.error_message();
  }
  const std::string packed = "shape { packed { cu_seqlens_q: [0, 8] cu_seqlens_k: [0, 9] } }";
  const Outcome outcome = Call(false, {First(false, kPackedBase, packed), Chunk(kQ, 0, 64),
                                       Chunk(kK, 0, 72), Chunk(kV, 0, 72)});
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.error_message();
}

TEST_F(BadRequestsTest, Headers) {
  const int before = Reserves();
  for (bool backward : {false, true}) {
    for (const BadHeader& row : kHeaderRows) {
      SCOPED_TRACE(absl::StrCat(backward ? "backward " : "forward ", row.text));
      Expect(Call(backward, {First(backward, kBase, row.text)}), row.code, row.field);
    }
    for (const BadHeader& row : kPackedRows) {
      SCOPED_TRACE(absl::StrCat(backward ? "backward " : "forward ", row.text));
      Expect(Call(backward, {First(backward, kPackedBase, row.text)}), row.code, row.field);
    }
  }
  for (const BadHeader& row : kForwardRows) {
    SCOPED_TRACE(row.text);
    Expect(Call(false, {First(false, kBase, row.text)}), row.code, row.field);
  }
  for (const BadHeader& row : kBackwardRows) {
    SCOPED_TRACE(row.text);
    Expect(Call(true, {First(true, kBase, row.text)}), row.code, row.field);
  }
  EXPECT_EQ(Reserves(), before);
}

TEST_F(BadRequestsTest, LargeHeaders) {
  const int before = Reserves();
  v1::ForwardHeader header = Parse<v1::ForwardHeader>(kBase, "");
  header.set_request_id(std::string(129, 'r'));
  Expect(Call(false, {First(header)}), kInvalid, "request_id");

  header = Parse<v1::ForwardHeader>(kBase, "shape { seq_len_q: 4096 }");
  v1::InlineTensor* tensor = header.add_inline_tensors();
  tensor->set_tensor(v1::TENSOR_ID_Q);
  tensor->set_data(std::string((1 << 20) + 1, 'x'));
  Expect(Call(false, {First(header)}), kOver, "inline_tensors");
  tensor->set_data(std::string(5 << 20, 'x'));
  Expect(Call(false, {First(header)}), kOver, "header");

  header = Parse<v1::ForwardHeader>(kPackedBase, "");
  for (int i = 0; i < (1 << 18) + 2; ++i) {
    header.mutable_shape()->mutable_packed()->add_cu_seqlens_q(0);
    header.mutable_shape()->mutable_packed()->add_cu_seqlens_k(0);
  }
  Expect(Call(false, {First(header)}), kOver, "shape.packed.cu_seqlens_q");

  header = Parse<v1::ForwardHeader>(kBase, "");
  for (int i = 0; i < 4097; ++i) header.mutable_reply()->add_probability_rows();
  Expect(Call(false, {First(header)}), kOver, "reply.probability_rows");

  header = Parse<v1::ForwardHeader>(kBase, "");
  for (int i = 0; i < 65; ++i) {
    v1::DilationLevel* level = header.mutable_options()->add_dilation_levels();
    level->set_segment_length(8);
    level->set_dilation_rate(1);
  }
  Expect(Call(false, {First(header)}), kOver, "options.dilation_levels");

  // More violations than an answer may list.
  header = Parse<v1::ForwardHeader>(kBase, "");
  for (int i = 0; i < 5000; ++i) header.add_inline_tensors();
  Expect(Call(false, {First(header)}), kInvalid, "inline_tensors[0].tensor");

  header = Parse<v1::ForwardHeader>(kBase, "");
  for (int i = 0; i < 2; ++i) {
    tensor = header.add_inline_tensors();
    tensor->set_tensor(v1::TENSOR_ID_K);
    tensor->set_data(Pattern(kK, 0, 2048));
  }
  Expect(Call(false, {First(header)}), kInvalid, "inline_tensors[1].tensor");
  EXPECT_EQ(Reserves(), before);
}

TEST_F(BadRequestsTest, UnknownFieldsAtAnyDepth) {
  const int before = Reserves();
  v1::BackwardHeader header;
  const auto full = [&] {
    header = Parse<v1::BackwardHeader>(kBase, R"(
      options { window { left: 1 } } plan {} reply { progress_interval { seconds: 1 } }
      inline_tensors { tensor: TENSOR_ID_Q })");
    return &header;
  };
  const auto check = [&](google::protobuf::Message* message, const std::string& field) {
    SCOPED_TRACE(field);
    auto* unknown = message->GetReflection()->MutableUnknownFields(message);
    unknown->AddVarint(99, 1);
    Expect(Call(true, {First(header)}), kInvalid, field + "99");
    unknown->Clear();
    unknown->AddLengthDelimited(1000, "text");
    Expect(Call(true, {First(header)}), kInvalid, field + "1000");
  };
  check(full(), "");
  check(full()->mutable_shape(), "shape.");
  check(full()->mutable_options(), "options.");
  check(full()->mutable_options()->mutable_window(), "options.window.");
  check(full()->mutable_plan(), "plan.");
  check(full()->mutable_reply(), "reply.");
  check(full()->mutable_reply()->mutable_progress_interval(), "reply.progress_interval.");
  check(full()->mutable_inline_tensors(0), "inline_tensors[0].");
  check(full()->mutable_shape()->mutable_packed(), "shape.packed.");
  EXPECT_EQ(Reserves(), before);
}

TEST_F(BadRequestsTest, FirstMessages) {
  const int before = Reserves();
  for (bool backward : {false, true}) {
    Expect(Call(backward, {}), kInvalid, "header");
    Expect(Call(backward, {""}), kInvalid, "header");
    Expect(Call(backward, {Chunk(kQ, 0, 8)}), kInvalid, "header");
    Expect(Call(backward, {Chunk(kQ, 0, 3 << 20)}), kInvalid, "header");
    Expect(Call(backward, {"\xff\xff\xff\xff\xff\xff"}), kInvalid, "header");
    Expect(Call(backward, {std::string("\x0a\x05"
                                       "abc",
                                       5)}),
           kInvalid, "header");                                                    // truncated
    Expect(Call(backward, {std::string("\x0b\x0b\x0b", 3)}), kInvalid, "header");  // open groups
    Expect(Call(backward, {std::string("\x98\x06\x01", 3)}), kInvalid, "99");  // an unknown field
    // A header whose request_id is not UTF-8.
    Expect(Call(backward, {std::string("\x0a\x04\x0a\x02\xff\xfe", 6)}), kInvalid, "header");
  }
  EXPECT_EQ(Reserves(), before);
}

struct ChunkRow {
  const char* what;
  std::vector<std::string> chunks;
  const char* field;
};

TEST_F(BadRequestsTest, Chunks) {
  const std::string data = Pattern(kQ, 0, 64);
  const uint32_t crc = wire::Crc32c(data.data(), data.size());
  constexpr uint64_t kMax = ~uint64_t{0};
  const ChunkRow rows[] = {
      {"no tensor", {Chunk(0, 0, 8)}, "chunk.tensor"},
      {"tensor 10", {Chunk(10, 0, 8)}, "chunk.tensor"},
      {"tensor -1", {Chunk(-1, 0, 8)}, "chunk.tensor"},
      {"tensor 2^31-1", {Chunk(2147483647, 0, 8)}, "chunk.tensor"},
      {"out as input", {Chunk(kOut, 0, 8)}, "chunk.tensor"},
      {"lse as input", {Chunk(kLse, 0, 8)}, "chunk.tensor"},
      {"dq as input", {Chunk(7, 0, 8)}, "chunk.tensor"},
      {"dk as input", {Chunk(8, 0, 8)}, "chunk.tensor"},
      {"dv as input", {Chunk(9, 0, 8)}, "chunk.tensor"},
      {"begins at the end", {Chunk(kQ, 4096, 1)}, "chunk.data"},
      {"begins behind the end", {Chunk(kQ, 4097, 1)}, "chunk.offset"},
      {"ends behind the end", {Chunk(kQ, 4095, 2)}, "chunk.data"},
      {"one byte too long", {Chunk(kK, 0, 2049)}, "chunk.data"},
      {"offset 2^64-1", {Chunk(kQ, kMax, 1)}, "chunk.offset"},
      {"offset + size overflows", {Chunk(kQ, kMax - 3, 8)}, "chunk.offset"},
      {"offset 2^63", {Chunk(kV, uint64_t{1} << 63, 8)}, "chunk.offset"},
      {"no data at 0", {Chunk(kQ, 0, 0)}, "chunk.data"},
      {"no data in the middle", {Chunk(kQ, 100, 0)}, "chunk.data"},
      {"no data at the end", {Chunk(kV, 2048, 0)}, "chunk.data"},
      {"sent twice", {Chunk(kQ, 0, 64), Chunk(kQ, 0, 64)}, "chunk.offset"},
      {"overlaps the end", {Chunk(kQ, 0, 64), Chunk(kQ, 63, 64)}, "chunk.offset"},
      {"overlaps the begin", {Chunk(kQ, 64, 64), Chunk(kQ, 0, 65)}, "chunk.offset"},
      {"lies inside", {Chunk(kQ, 0, 64), Chunk(kQ, 10, 4)}, "chunk.offset"},
      {"encloses", {Chunk(kQ, 10, 4), Chunk(kQ, 0, 64)}, "chunk.offset"},
      {"bridges a gap too long",
       {Chunk(kK, 0, 10), Chunk(kK, 20, 10), Chunk(kK, 9, 11)},
       "chunk.offset"},
      {"the whole again", {Chunk(kQ, 0, 4096), Chunk(kQ, 0, 4096)}, "chunk.offset"},
      {"one byte again", {Chunk(kQ, 0, 4096), Chunk(kQ, 4095, 1)}, "chunk.offset"},
      {"crc 0", {Chunk(kQ, 0, 64, 0)}, "chunk.crc32c"},
      {"crc with a wrong bit", {Chunk(kQ, 0, 64, crc ^ 1)}, "chunk.crc32c"},
      {"crc of another chunk", {Chunk(kQ, 0, 64, crc), Chunk(kQ, 64, 64, crc)}, "chunk.crc32c"},
      {"a second header", {First(false, kBase, "")}, "chunk"},
      {"an empty message", {""}, "chunk"},
      {"no protobuf", {"\xff\xff\xff"}, "chunk"},
      {"a chunk cut off", {Chunk(kQ, 0, 64).substr(0, 40)}, "chunk"},
      {"nothing follows", {}, "chunk.data"},
      {"q lacks its last byte", {Chunk(kQ, 0, 4095)}, "chunk.data"},
      {"k lacks its first byte",
       {Chunk(kQ, 0, 4096), Chunk(kK, 1, 2047), Chunk(kV, 0, 2048)},
       "chunk.data"},
      {"v is missing", {Chunk(kQ, 0, 4096), Chunk(kK, 0, 2048)}, "chunk.data"},
      {"a hole",
       {Chunk(kQ, 0, 100), Chunk(kQ, 101, 3995), Chunk(kK, 0, 2048), Chunk(kV, 0, 2048)},
       "chunk.data"},
  };
  for (bool backward : {false, true}) {
    for (const ChunkRow& row : rows) {
      SCOPED_TRACE(absl::StrCat(backward ? "backward: " : "forward: ", row.what));
      std::vector<std::string> messages = {First(backward, kBase, "")};
      messages.insert(messages.end(), row.chunks.begin(), row.chunks.end());
      if (messages.size() == 1) messages.push_back(Chunk(kQ, 0, 1));
      Expect(Call(backward, messages), kInvalid, row.field);
    }
  }
  // dout belongs to Backward; out and lse only if the header announces them.
  Expect(Call(false, {First(false, kBase, ""), Chunk(kDout, 0, 8)}), kInvalid, "chunk.tensor");
  const std::string with_result = First(true, kBase, "has_forward_result: true");
  Expect(Call(true, {with_result, Chunk(kLse, 256, 1)}), kInvalid, "chunk.data");
  Expect(Call(true, {with_result, Chunk(kQ, 0, 4096), Chunk(kK, 0, 2048), Chunk(kV, 0, 2048),
                     Chunk(kDout, 0, 4096), Chunk(kOut, 0, 4096)}),
         kInvalid, "chunk.data");
}

TEST_F(BadRequestsTest, MissingBytesAreNamed) {
  const Outcome outcome = Call(
      false, {First(false, kBase, ""), Chunk(kQ, 0, 4096), Chunk(kK, 0, 1000), Chunk(kV, 0, 2048)});
  Expect(outcome, kInvalid, "chunk.data");
  EXPECT_THAT(outcome.status.error_message(), ::testing::HasSubstr("of k was sent"));
  EXPECT_THAT(outcome.status.error_message(), ::testing::HasSubstr("the byte at 1000"));
}

TEST_F(BadRequestsTest, ChunksOverTheLimit) {
  const std::string large = "shape { seq_len_q: 40000 }";  // q has 20 MB
  Expect(Call(false, {First(false, kBase, large), Chunk(kQ, 0, (16 << 20) + 1)}), kInvalid,
         "chunk.data");
  // Larger than the limit, but rejected by this server and not by gRPC.
  const std::string larger = "shape { seq_len_q: 80000 }";
  const Outcome outcome = Call(false, {First(false, kBase, larger), Chunk(kQ, 0, (32 << 20) + 1)});
  Expect(outcome, kInvalid, "chunk.data");
  EXPECT_THAT(outcome.status.error_message(), ::testing::HasSubstr("larger than the limit"));
}

TEST_F(BadRequestsTest, InlineTensorsAreNotSentAgain) {
  v1::ForwardHeader header = Parse<v1::ForwardHeader>(kBase, "");
  v1::InlineTensor* tensor = header.add_inline_tensors();
  tensor->set_tensor(v1::TENSOR_ID_K);
  tensor->set_data(Pattern(kK, 0, 2048));
  Expect(Call(false, {First(header), Chunk(kK, 0, 1)}), kInvalid, "chunk.offset");
}

TEST_F(BadRequestsTest, MoreRanksThanWorkers) {
  const Outcome outcome = Call(false, {First(false, kBase, "plan { world_size: 3 }")});
  EXPECT_EQ(outcome.status.error_code(), StatusCode::FAILED_PRECONDITION);
}

// Tests run in the order of their definition.
TEST_F(BadRequestsTest, AtLeastTwoHundredCasesWereTested) {
  if (::testing::GTEST_FLAG(filter) != "*") GTEST_SKIP() << "some were left out";
  EXPECT_GE(checked_, 200);
  RecordProperty("bad_requests", checked_);
  std::printf("%d bad requests\n", checked_);
}

}  // namespace
}  // namespace ringattn::server
