#include "client/files/safetensors.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string TempPath(const std::string& name) { return testing::TempDir() + "/" + name; }

// A file image in memory, aligned like a mapping.
class Image {
 public:
  Image(const std::string& header, size_t data_bytes) : Image(header, data_bytes, header.size()) {}

  Image(const std::string& header, size_t data_bytes, uint64_t claimed_header_bytes) {
    size_ = 8 + header.size() + data_bytes;
    storage_.resize(size_ / 8 + 1);
    uint8_t* bytes = reinterpret_cast<uint8_t*>(storage_.data());
    std::memcpy(bytes, &claimed_header_bytes, 8);
    std::memcpy(bytes + 8, header.data(), header.size());
  }

  absl::Span<const uint8_t> bytes() const {
    return {reinterpret_cast<const uint8_t*>(storage_.data()), size_};
  }

 private:
  std::vector<uint64_t> storage_;
  size_t size_ = 0;
};

std::string Padded(std::string header) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

std::string ErrorOf(const std::string& header, size_t data_bytes) {
  const auto contents = ParseSafetensors(Image(Padded(header), data_bytes).bytes());
  if (contents.ok()) return "accepted";
  EXPECT_EQ(contents.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(contents.status().message());
}

TEST(Safetensors, WrittenFileReadsBack) {
  const std::string path = TempPath("roundtrip.safetensors");
  std::filesystem::remove(path);  // from an earlier run
  auto writer = SafetensorsWriter::Create(path,
                                          {{"half", FileDType::kBF16, {3, 5}},
                                           {"lse", FileDType::kF32, {2, 4}},
                                           {"empty", FileDType::kI32, {0, 7}},
                                           {"scalar", FileDType::kI64, {}},
                                           {"odd \"name\"", FileDType::kU8, {3}}},
                                          {{"seed", "7"}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_EQ((*writer)->data("half").size(), 30u);
  EXPECT_EQ((*writer)->data("empty").size(), 0u);
  std::memset((*writer)->data("half").data(), 1, 30);
  std::memset((*writer)->data("lse").data(), 2, 32);
  (*writer)->ReleasePages();
  std::memset((*writer)->data("odd \"name\"").data(), 3, 3);
  ASSERT_TRUE((*writer)->Commit().ok());
  writer->reset();

  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->tensors().size(), 5u);
  EXPECT_EQ(file->metadata().at("seed"), "7");
  const TensorView* half = file->Find("half");
  ASSERT_NE(half, nullptr);
  EXPECT_EQ(half->dtype, FileDType::kBF16);
  EXPECT_EQ(half->shape, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(half->data), 30), std::string(30, '\1'));
  const TensorView* lse = file->Find("lse");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(lse->data) % 4, 0u);
  EXPECT_EQ(lse->data[31], 2);
  file->ReleasePages();
  EXPECT_EQ(lse->data[31], 2);
  EXPECT_EQ(file->Find("scalar")->bytes, 8);
  EXPECT_EQ(file->Find("odd \"name\"")->data[2], 3);
  EXPECT_EQ(file->Find("absent"), nullptr);
}

TEST(Safetensors, AnAbandonedWriterLeavesNothing) {
  const std::string folder = TempPath("abandoned");
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  {
    auto writer = SafetensorsWriter::Create(folder + "/f", {{"x", FileDType::kF32, {4}}}, {});
    ASSERT_TRUE(writer.ok());
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(Safetensors, TouchingAheadChangesNothing) {
  constexpr int64_t kBytes = 40 << 20;  // several steps
  const std::string path = TempPath("touched");
  {
    auto abandoned = SafetensorsWriter::Create(path, {{"a", FileDType::kU8, {kBytes}}}, {});
    ASSERT_TRUE(abandoned.ok()) << abandoned.status();
    (*abandoned)->TouchAhead();
  }
  auto writer = SafetensorsWriter::Create(path, {{"a", FileDType::kU8, {kBytes}}}, {});
  ASSERT_TRUE(writer.ok()) << writer.status();
  const absl::Span<uint8_t> data = (*writer)->data("a");
  const auto pattern = [](int64_t i) { return static_cast<uint8_t>(i * 7 + i / 4096); };
  for (int64_t i = 0; i < kBytes; ++i) {
    data[i] = pattern(i);
    if (i == kBytes / 4) (*writer)->TouchAhead();
    if (i == kBytes / 2) (*writer)->ReleasePages();
    if (i % (4 << 20) == 0) (*writer)->NoteFilled(static_cast<double>(i) / kBytes);
  }
  ASSERT_TRUE((*writer)->Commit().ok());
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const TensorView* read = file->Find("a");
  ASSERT_NE(read, nullptr);
  int64_t wrong = 0;
  for (int64_t i = 0; i < kBytes; ++i) wrong += read->data[i] != pattern(i);
  EXPECT_EQ(wrong, 0);
}

TEST(Safetensors, AnOldFileStaysUntilCommit) {
  const std::string path = TempPath("old.safetensors");
  std::ofstream(path) << "old";
  {
    auto writer = SafetensorsWriter::Create(path, {{"x", FileDType::kF32, {4}}}, {});
    ASSERT_TRUE(writer.ok());
  }
  std::string content;
  std::ifstream(path) >> content;
  EXPECT_EQ(content, "old");
}

TEST(Safetensors, CommitReplacesAnOldFile) {
  const std::string path = TempPath("replaced.safetensors");
  std::ofstream(path) << "old";
  auto writer = SafetensorsWriter::Create(path, {{"x", FileDType::kF32, {4}}}, {});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)->Commit().ok());
  EXPECT_TRUE(SafetensorsFile::Open(path).ok());
}

TEST(Safetensors, WriterErrors) {
  EXPECT_EQ(SafetensorsWriter::Create(TempPath("no/such/folder/f"), {}, {}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsWriter::Create(
                TempPath("f"), {{"x", FileDType::kF32, {1}}, {"x", FileDType::kF32, {1}}}, {})
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsWriter::Create(
                TempPath("f"), {{"x", FileDType::kF32, {int64_t{1} << 40, int64_t{1} << 40}}}, {})
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(TempPath("f")));
}

TEST(Safetensors, OpenErrors) {
  EXPECT_EQ(SafetensorsFile::Open(TempPath("absent")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open(testing::TempDir()).status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::string empty = TempPath("empty");
  std::ofstream(empty).close();
  const absl::Status status = SafetensorsFile::Open(empty).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(empty));
}

TEST(Safetensors, HeaderLengths) {
  const std::string header = Padded("{}");
  EXPECT_TRUE(ParseSafetensors(Image(header, 0).bytes()).ok());
  for (const uint64_t claimed : {uint64_t{9}, uint64_t{100'000'001}, ~uint64_t{0}, uint64_t{0}}) {
    EXPECT_EQ(ParseSafetensors(Image(header, 0, claimed).bytes()).status().code(),
              absl::StatusCode::kInvalidArgument)
        << claimed;
  }
  const std::string few(7, 'x');
  EXPECT_FALSE(ParseSafetensors({reinterpret_cast<const uint8_t*>(few.data()), 7}).ok());
}

// In a text file the "length" is about 10^18. A header that is too long or truncated is a different
// error.
TEST(Safetensors, OtherFilesAreReportedAsSuch) {
  const auto error_of = [](const std::string& content) {
    const auto contents =
        ParseSafetensors({reinterpret_cast<const uint8_t*>(content.data()), content.size()});
    return contents.ok() ? "accepted" : std::string(contents.status().message());
  };
  const std::string text = "import torch\nprint(1)\n";
  EXPECT_THAT(error_of(text), HasSubstr("not a safetensors file"));
  EXPECT_THAT(error_of(text), Not(HasSubstr("bytes")));
  EXPECT_THAT(error_of(std::string(8, '\x7f')), HasSubstr("not a safetensors file"));
  const std::string huge(8, '\x01');
  EXPECT_THAT(error_of(huge + "{}"), HasSubstr("over the limit"));
  const Image cut(Padded("{\"x\":"), 0, 4096);
  EXPECT_THAT(std::string(ParseSafetensors(cut.bytes()).status().message()),
              HasSubstr("truncated: header of 4096 bytes in a file of 16"));
}

TEST(Safetensors, MalformedHeadersAreExplained) {
  struct Case {
    std::string header;
    size_t data_bytes;
    std::string error;
  };
  const std::string x = R"("dtype":"F32","shape":[2])";
  const Case cases[] = {
      {"[]", 0, "does not begin with \"{\""},
      {" {}", 0, "does not begin with \"{\""},
      {"{", 0, "not valid JSON"},
      {"{} x", 0, "not valid JSON"},
      {R"({"x":{)" + x + "}}", 8, "data_offsets are missing"},
      {R"({"x":{"shape":[2],"data_offsets":[0,8]}})", 8, "dtype is missing"},
      {R"({"x":{"dtype":"F32","data_offsets":[0,8]}})", 8, "shape is missing"},
      {R"({"x":{)" + x + R"(,"data_offsets":[0]}})", 8, "two numbers"},
      {R"({"x":{)" + x + R"(,"data_offsets":[0,8,9]}})", 8, "two numbers"},
      {R"({"x":{)" + x + R"(,"data_offsets":[8,0]}})", 8, "data_offsets end before they begin"},
      {R"({"x":{)" + x + R"(,"data_offsets":[0,16]}})", 8, "ends at byte 16 of 8"},
      {R"({"x":{)" + x + R"(,"data_offsets":[0,4]}})", 4, "needs 8 bytes, data has 4"},
      {R"({"x":{)" + x + R"(,"data_offsets":[0,8]}})", 9, "1 bytes after the last tensor"},
      {R"({"x":{)" + x + R"(,"data_offsets":[4,12]}})", 12, "a hole before"},
      {R"({"x":{)" + x + R"(,"data_offsets":[0,8]},"y":{)" + x + R"(,"data_offsets":[4,12]}})", 12,
       "overlaps"},
      {R"({"x":{)" + x + R"(,"data_offsets":[0,8]},"x":{)" + x + R"(,"data_offsets":[8,16]}})", 16,
       "\"x\" given twice"},
      {R"({"x":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}})", 8,
       "\"dtype\" given twice"},
      {R"({"x":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", 8,
       "tensor \"x\": dtype is \"F33\", must be one of BOOL, U8, I8, F8_E4M3, F8_E5M2, U16, I16, "
       "F16, "
       "BF16, U32, I32, F32, U64, I64, F64"},
      {R"({"x":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", 8,
       "a number in a place where the format allows none"},
      {R"({"x":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8, "a number in a place where"},
      {R"({"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "a negative number"},
      {R"({"x":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "not an integer"},
      {R"({"x":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", 8,
       "an array in a place where"},
      {R"({"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", 8,
       "shape overflows"},
      {R"({"x":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8]}})", 8,
       "shape overflows"},
      {R"({"x":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,8]}})", 8,
       "not an integer"},
      {R"({"x":{)" + x + R"(,"data_offsets":[0,8],"more":1}})", 8,
       "tensor \"x\": \"more\" is not a field of a tensor; use dtype, shape and data_offsets"},
      {R"({"x":[1]})", 8, "an array in a place where the format allows none"},
      {R"({"x":null})", 8, "null in a place where the format allows none"},
      {R"({"__metadata__":{"a":1}})", 0, "a number in a place where the format allows none"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "metadata \"a\" given twice"},
      {R"({"__metadata__":"a"})", 0, "a string in a place where the format allows none"},
      {"{\"\xff\":{}}", 0, "not valid JSON"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(ErrorOf(c.header, c.data_bytes), HasSubstr(c.error)) << c.header;
  }
}

// Valid files may place a tensor at any byte. The odd header length shifts all data as well.
TEST(Safetensors, TensorsThatTheFileDoesNotAlignAreCopied) {
  const std::string path = TempPath("unaligned.safetensors");
  for (const std::string padding : {"", " ", "  ", "   "}) {
    const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                               R"("x":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})" +
                               padding;
    const uint64_t header_bytes = header.size();
    const float values[2] = {1.5f, -2.25f};
    std::string text(reinterpret_cast<const char*>(&header_bytes), 8);
    text += header;
    text += '\x7f';
    text.append(reinterpret_cast<const char*>(values), 8);
    std::ofstream(path, std::ios::binary) << text;
    auto opened = SafetensorsFile::Open(path);
    ASSERT_TRUE(opened.ok()) << opened.status();
    const SafetensorsFile file = *std::move(opened);
    const TensorView* x = file.Find("x");
    ASSERT_NE(x, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(x->data) % 4, 0u);
    EXPECT_EQ(std::memcmp(x->data, values, 8), 0);
    EXPECT_EQ(file.Find("a")->data[0], 0x7f);
  }
}

TEST(Safetensors, DeepNestingAndLongNamesAreBounded) {
  EXPECT_THAT(ErrorOf("{\"x\":" + std::string(100'000, '['), 0),
              HasSubstr("in a place where the format allows none"));
  EXPECT_LT(ErrorOf("{\"" + std::string(100'000, 'n') + "\":{}}", 0).size(), 200u);
}

}  // namespace
}  // namespace ringattn::client
