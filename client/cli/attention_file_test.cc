#include "client/cli/attention_file.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <optional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client::cli {
namespace {

using ::testing::HasSubstr;

std::string Path(const std::string& name) { return testing::TempDir() + "/" + name; }

// Writes tensors of zeros and reads the problem back. Returns the error, or "".
std::string ErrorOf(const std::vector<TensorDeclaration>& tensors, Problem* problem) {
  const std::string path = Path("attention.safetensors");
  auto writer = SafetensorsWriter::Create(path, tensors, {});
  EXPECT_TRUE(writer.ok()) << writer.status();
  EXPECT_TRUE((*writer)->Commit().ok());
  const auto file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  return std::string(ReadShape(path, *file, problem).message());
}

TEST(AttentionFile, DenseShapesAreRead) {
  Problem problem;
  EXPECT_EQ(ErrorOf({{"q", FileDType::kBF16, {2, 10, 8, 32}},
                     {"k", FileDType::kBF16, {2, 12, 4, 32}},
                     {"v", FileDType::kBF16, {2, 12, 4, 16}}},
                    &problem),
            "");
  EXPECT_EQ(problem.dtype, v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(problem.shape.batch(), 2u);
  EXPECT_EQ(problem.shape.seq_len_q(), 10u);
  EXPECT_EQ(problem.shape.seq_len_kv(), 12u);
  EXPECT_EQ(problem.shape.num_heads(), 8u);
  EXPECT_EQ(problem.shape.num_kv_heads(), 4u);
  EXPECT_EQ(problem.shape.head_dim(), 32u);
  EXPECT_EQ(problem.shape.head_dim_v(), 16u);
  EXPECT_FALSE(problem.shape.has_packed());
}

TEST(AttentionFile, PackedFilesRoundTrip) {
  Problem problem;
  problem.dtype = v1::DATA_TYPE_FLOAT16;
  problem.shape.set_batch(1);
  problem.shape.set_seq_len_q(8);
  problem.shape.set_seq_len_kv(6);
  problem.shape.set_num_heads(2);
  problem.shape.set_num_kv_heads(1);
  problem.shape.set_head_dim(4);
  problem.shape.set_head_dim_v(4);
  for (const uint64_t at : {0, 3, 8}) problem.shape.mutable_packed()->add_cu_seqlens_q(at);
  for (const uint64_t at : {0, 1, 6}) problem.shape.mutable_packed()->add_cu_seqlens_k(at);
  const std::string path = Path("packed.safetensors");
  auto writer = CreateFor(path, problem, {v1::TENSOR_ID_Q, v1::TENSOR_ID_K, v1::TENSOR_ID_V}, true);
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Commit().ok());
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok());
  Problem read;
  ASSERT_TRUE(ReadShape(path, *file, &read).ok());
  EXPECT_EQ(read.shape.SerializeAsString(), problem.shape.SerializeAsString());
}

// The same number of values in another order would be the slopes of other heads.
TEST(AttentionFile, SlopesAreByHeadOrByBatchRowAndHead) {
  const TensorDeclaration tensors[] = {{"q", FileDType::kF32, {3, 4, 2, 8}},
                                       {"k", FileDType::kF32, {3, 4, 2, 8}},
                                       {"v", FileDType::kF32, {3, 4, 2, 8}}};
  const auto error_of = [&](std::vector<int64_t> shape) {
    Problem problem;
    problem.options.mutable_alibi();
    std::string error = ErrorOf(
        {tensors[0], tensors[1], tensors[2], {"alibi_slopes", FileDType::kF32, shape}}, &problem);
    EXPECT_EQ(error.empty(), problem.options.alibi().slopes_size() > 0);
    return error;
  };
  EXPECT_EQ(error_of({2}), "");
  EXPECT_EQ(error_of({3, 2}), "");
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{2, 3}, {6}, {3}, {1, 2}, {2, 1}, {3, 2, 1}, {0}}) {
    EXPECT_THAT(error_of(shape), HasSubstr("\"alibi_slopes\"")) << shape[0];
  }
  EXPECT_THAT(error_of({2, 3}), HasSubstr("it must be [2] or [3, 2]"));
}

// Writes the tensors, converts them and reads the problem.
class ConvertedFile : public testing::Test {
 protected:
  template <typename T>
  void Add(const std::string& name, FileDType dtype, const std::vector<T>& values) {
    declarations_.push_back({name, dtype, {static_cast<int64_t>(values.size())}});
    const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
    contents_[name] = std::vector<uint8_t>(bytes, bytes + values.size() * sizeof(T));
  }

  absl::Status Read() {
    for (const char* name : {"q", "k", "v"}) {
      declarations_.push_back({name, FileDType::kBF16, {4, 2, 8}});
    }
    auto writer = SafetensorsWriter::Create(path_, declarations_, {});
    EXPECT_TRUE(writer.ok()) << writer.status();
    for (const auto& [name, bytes] : contents_) {
      std::copy(bytes.begin(), bytes.end(), (*writer)->data(name).begin());
    }
    EXPECT_TRUE((*writer)->Commit().ok());
    auto file = SafetensorsFile::Open(path_);
    EXPECT_TRUE(file.ok()) << file.status();
    file_.emplace(*std::move(file));
    if (absl::Status status = ConvertTensors(path_, &*file_); !status.ok()) return status;
    problem_.options.mutable_segment_ids();
    problem_.options.mutable_sinks();
    return ReadShape(path_, *file_, &problem_);
  }

  template <typename T>
  std::vector<T> Values(v1::TensorId tensor) {
    const auto tensors = ReadOptionTensors(path_, *file_, problem_, Direction::kForward);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    const ConstBytes bytes = tensors->at(tensor);
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  const std::string path_ = Path("converted.safetensors");
  std::vector<TensorDeclaration> declarations_;
  std::map<std::string, std::vector<uint8_t>> contents_;
  std::optional<SafetensorsFile> file_;
  Problem problem_;
};

// PyTorch's integers are I64, and a model's sinks have its parameters' type.
TEST_F(ConvertedFile, IntegersAndSinksOfOtherTypesAreRead) {
  Add<int64_t>("cu_seqlens_q", FileDType::kI64, {0, 3, 4});
  Add<int32_t>("cu_seqlens_k", FileDType::kI32, {0, 1, 4});
  Add<int64_t>("q_segment_ids", FileDType::kI64, {0, -1, 7, (int64_t{1} << 31) - 1});
  Add<int32_t>("kv_segment_ids", FileDType::kI32, {0, 0, 7, 7});
  Add<uint16_t>("sinks", FileDType::kBF16, {0x3fc0, 0xc010});
  ASSERT_TRUE(Read().ok());
  EXPECT_THAT(problem_.shape.packed().cu_seqlens_q(), testing::ElementsAre(0u, 3u, 4u));
  EXPECT_THAT(problem_.shape.packed().cu_seqlens_k(), testing::ElementsAre(0u, 1u, 4u));
  EXPECT_THAT(Values<int32_t>(v1::TENSOR_ID_Q_SEGMENT_IDS),
              testing::ElementsAre(0, -1, 7, std::numeric_limits<int32_t>::max()));
  EXPECT_THAT(Values<int32_t>(v1::TENSOR_ID_KV_SEGMENT_IDS), testing::ElementsAre(0, 0, 7, 7));
  EXPECT_THAT(Values<float>(v1::TENSOR_ID_SINKS), testing::ElementsAre(1.5f, -2.25f));
}

TEST_F(ConvertedFile, IntegersThatDoNotFitAreRejected) {
  Add<int64_t>("q_segment_ids", FileDType::kI64, {0, 1, 2, int64_t{1} << 31});
  EXPECT_THAT(std::string(Read().message()),
              HasSubstr("\"q_segment_ids\" has 2147483648 at 3; it must fit int32"));
}

TEST(AttentionFile, DocumentsRequirePackedTensors) {
  const TensorDeclaration q{"q", FileDType::kF32, {1, 4, 2, 8}};
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) {
    Problem problem;
    EXPECT_THAT(
        ErrorOf({q,
                 {"k", FileDType::kF32, {1, 4, 2, 8}},
                 {"v", FileDType::kF32, {1, 4, 2, 8}},
                 {name, FileDType::kI32, {2}}},
                &problem),
        HasSubstr(std::string("\"") + name + "\" needs packed documents, but q has 4 dimensions"));
  }
}

TEST(AttentionFile, PackingFollowsFromTheTensors) {
  Problem problem;
  EXPECT_EQ(ErrorOf({{"qkv", FileDType::kBF16, {2, 10, 3, 8, 32}}}, &problem), "");
  EXPECT_EQ(problem.shape.packing(), v1::PACKING_QKV);
  EXPECT_EQ(problem.shape.batch(), 2u);
  EXPECT_EQ(problem.shape.seq_len_q(), 10u);
  EXPECT_EQ(problem.shape.seq_len_kv(), 10u);
  EXPECT_EQ(problem.shape.num_kv_heads(), 8u);
  EXPECT_EQ(problem.shape.head_dim_v(), 32u);
  EXPECT_FALSE(TravelsAlone(problem, v1::TENSOR_ID_Q));
  EXPECT_FALSE(TravelsAlone(problem, v1::TENSOR_ID_DV));
  const TensorDeclaration q{"q", FileDType::kF32, {1, 4, 4, 8}};
  const TensorDeclaration kv{"kv", FileDType::kF32, {1, 5, 2, 2, 8}};
  Problem of_kv;
  EXPECT_EQ(ErrorOf({q, kv}, &of_kv), "");
  EXPECT_EQ(of_kv.shape.packing(), v1::PACKING_KV);
  EXPECT_EQ(of_kv.shape.seq_len_kv(), 5u);
  EXPECT_EQ(of_kv.shape.num_kv_heads(), 2u);
  EXPECT_TRUE(TravelsAlone(of_kv, v1::TENSOR_ID_Q));
  EXPECT_FALSE(TravelsAlone(of_kv, v1::TENSOR_ID_K));
  const std::pair<std::vector<TensorDeclaration>, const char*> wrong[] = {
      {{kv}, "\"q\" is missing"},
      {{q, kv, {"v", FileDType::kF32, {1, 5, 2, 8}}}, "\"v\" cannot be combined with \"kv\""},
      {{q, {"qkv", FileDType::kF32, {1, 4, 3, 4, 8}}}, "\"q\" cannot be combined with \"qkv\""},
      {{{"qkv", FileDType::kF32, {1, 4, 2, 4, 8}}}, "\"qkv\" has shape"},
      {{{"qkv", FileDType::kF32, {4, 8}}}, "five dimensions, or four when packed"},
      {{q, {"kv", FileDType::kF32, {5, 2, 2, 8}}}, "\"kv\" must have as many dimensions"},
      {{q, {"kv", FileDType::kF32, {1, 5, 2, 2, 7}}}, "\"kv\" has shape"},
      {{q, {"kv", FileDType::kF16, {1, 5, 2, 2, 8}}}, "\"kv\" is F16, q is F32"},
  };
  for (const auto& [tensors, error] : wrong) {
    Problem none;
    EXPECT_THAT(ErrorOf(tensors, &none), HasSubstr(error));
  }
}

TEST(AttentionFile, MismatchedTensorsAreNamed) {
  const TensorDeclaration q{"q", FileDType::kF32, {1, 4, 2, 8}};
  const TensorDeclaration k{"k", FileDType::kF32, {1, 4, 2, 8}};
  const TensorDeclaration v{"v", FileDType::kF32, {1, 4, 2, 8}};
  struct Case {
    std::vector<TensorDeclaration> tensors;
    std::string error;
  };
  const Case cases[] = {
      {{q, v}, "\"k\" is missing"},
      {{q, k, {"v", FileDType::kF16, {1, 4, 2, 8}}}, "\"v\" is F16, q is F32"},
      {{q, k, {"v", FileDType::kF32, {4, 2, 8}}}, "\"v\" must have as many dimensions"},
      {{q, k, {"v", FileDType::kF32, {1, 5, 2, 8}}}, "\"v\" has shape [1, 5, 2, 8]"},
      {{q, {"k", FileDType::kF32, {2, 4, 2, 8}}, v}, "\"k\" has shape"},
      {{q, {"k", FileDType::kF32, {1, 4, 2, 7}}, v}, "\"k\" has shape"},
      {{{"q", FileDType::kF32, {8}}, k, v}, "four dimensions, or three"},
      {{{"q", FileDType::kF32, {4, 2, 8}},
        {"k", FileDType::kF32, {4, 2, 8}},
        {"v", FileDType::kF32, {4, 2, 8}}},
       "cu_seqlens_q\" is missing"},
      {{{"q", FileDType::kF32, {4, 2, 8}},
        {"k", FileDType::kF32, {4, 2, 8}},
        {"v", FileDType::kF32, {4, 2, 8}},
        {"cu_seqlens_q", FileDType::kI16, {2}}},
       "must be I32 or I64"},
      {{{"q", FileDType::kF64, {1, 4, 2, 8}},
        {"k", FileDType::kF64, {1, 4, 2, 8}},
        {"v", FileDType::kF64, {1, 4, 2, 8}}},
       "is F64, not F32, BF16 or F16"},
  };
  for (const Case& c : cases) {
    Problem problem;
    EXPECT_THAT(ErrorOf(c.tensors, &problem), HasSubstr(c.error));
  }
}

}  // namespace
}  // namespace ringattn::client::cli
