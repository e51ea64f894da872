// Tensor files in the safetensors format: 8 bytes of header length, a JSON header, then the
// tensors' bytes without holes. Files are mapped, so a file may be larger than memory.
//   auto file = SafetensorsFile::Open("in.safetensors");
//   const TensorView* q = file->Find("q");
//   auto writer = SafetensorsWriter::Create("out.safetensors", {{"out", kF32, {1, 8}}}, {});
//   FillIn((*writer)->data("out"));
//   (*writer)->Commit();
// Tests: safetensors_test.cc; tests/fuzz fuzzes the parser.
#ifndef RINGATTN_CLIENT_FILES_SAFETENSORS_H_
#define RINGATTN_CLIENT_FILES_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/memory/page_toucher.h"

namespace ringattn::client {

// The format's element types.
enum class FileDType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
};
absl::string_view FileDTypeName(FileDType dtype);  // "F32", "BF16", ...
std::optional<FileDType> FileDTypeFromName(absl::string_view name);
std::string FileDTypeNames();  // all, in one list
int64_t FileDTypeBytes(FileDType dtype);

// The maximum header length, as in the format's own library.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

// One tensor of a file. `data` is aligned to the element size. It points into the file's mapping,
// or to a copy if the file does not align the tensor or SetElements replaced it.
struct TensorView {
  std::string name;
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape = {};
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
};

struct SafetensorsContents {
  std::vector<TensorView> tensors;  // by name
  std::map<std::string, std::string> metadata;
  std::vector<std::unique_ptr<uint8_t[]>> copies;  // of unaligned and of replaced tensors
};

// Parses the bytes of a whole file; the views point into them or into copies. Errors:
// INVALID_ARGUMENT with the reason and the tensor that it concerns: bad header length or JSON,
// unknown dtype, a shape that overflows or does not match its bytes, bytes that are out of range,
// overlap or leave holes, or a duplicate name.
absl::StatusOr<SafetensorsContents> ParseSafetensors(absl::Span<const uint8_t> file);

// A file mapped for reading. Movable. Immutable, so thread safe. If another process truncates the
// file, this process ends with SIGBUS.
class SafetensorsFile {
 public:
  // Errors: the system's, such as NOT_FOUND and PERMISSION_DENIED; ParseSafetensors' errors,
  // prefixed with the path.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  SafetensorsFile(SafetensorsFile&& other) noexcept { *this = std::move(other); }
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  ~SafetensorsFile();

  const std::vector<TensorView>& tensors() const { return contents_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return contents_.metadata; }
  const TensorView* Find(absl::string_view name) const;  // null if there is none

  // Replaces the elements of a tensor by `data`, which has them in another type. Pointers to the
  // tensor's old bytes stay valid. REQUIRES: the file has the tensor.
  void SetElements(absl::string_view name, FileDType dtype, std::unique_ptr<uint8_t[]> data);

  // Releases the pages read so far, so that a large file does not count as this process's memory.
  // They return from the page cache when they are touched again.
  void ReleasePages() const;

 private:
  SafetensorsFile() = default;

  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  SafetensorsContents contents_;
};

struct TensorDeclaration {
  std::string name;
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape;
};

// A file being written. The tensors are declared first and then filled in any order through a
// shared mapping, so the page cache and not the process holds the bytes. The path keeps its old
// content until Commit. Thread compatible; different threads may fill different tensors.
class SafetensorsWriter {
 public:
  // Reserves the file's space in the folder of `path`, without a name if the file system supports
  // it, otherwise under a temporary name. Errors: INVALID_ARGUMENT for a duplicate name or a shape
  // that overflows; RESOURCE_EXHAUSTED without space; the system's other errors.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, std::vector<TensorDeclaration> tensors,
      const std::map<std::string, std::string>& metadata);

  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  ~SafetensorsWriter();  // without Commit the file disappears

  // The writable bytes of a declared tensor, initially zero; valid until Commit. Requires that
  // `name` was declared.
  absl::Span<uint8_t> data(absl::string_view name);

  // As SafetensorsFile's. Written bytes are kept.
  void ReleasePages();

  // Starts a thread that populates the pages ahead of a writer that fills them in file order
  // (PageToucher). Call once.
  void TouchAhead();
  // Reports that this share of the file, from its beginning, has been filled. Thread safe.
  void NoteFilled(double share);

  // Gives the file its name. If the process is killed before, the old file remains. Does not fsync:
  // the system writes the contents to disk at its own time.
  absl::Status Commit();

 private:
  SafetensorsWriter() = default;

  absl::Status OpenTemporary();

  std::string path_;
  std::string temporary_path_;  // empty while the file has no name
  int descriptor_ = -1;
  uint8_t* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  std::map<std::string, absl::Span<uint8_t>, std::less<>> data_;
  std::optional<PageToucher> toucher_;  // for mapping_
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_FILES_SAFETENSORS_H_
